//! All requests at once: static batches against continuous batching on the same kernels.

use std::time::Duration;

use anyhow::Result;
use inflight_engine::{Batching, Policy, Tuning};
use serde::Serialize;

use super::Lengths;
use super::load::{Arrival, Rig};

/// Limits on the outputs' lengths, and the sizes of the published static batches for them: what the
/// memory of its GPU had room for.
pub const LIMITS: [(usize, usize); 4] = [(32, 16), (128, 12), (512, 8), (1536, 4)];

/// How the burst is run.
#[derive(Clone, Debug)]
pub struct Burst {
    /// How long requests are.
    pub lengths: Lengths,
    /// Requests of continuous batching, and of static batches as large as fit.
    pub num_prompts: usize,
    /// Batches of the published size: those are slow, and their throughput is steady.
    pub num_published_batches: usize,
    /// Limits of the publication to run.
    pub limits: Vec<usize>,
    /// Most sequences that the engine can run.
    pub max_num_seqs: usize,
    /// Overlap to run with; both, if both are wanted.
    pub overlaps: Vec<bool>,
}

/// One run.
#[derive(Clone, Debug, Serialize)]
pub struct BurstRow {
    /// The publication's limit on output lengths, not scaled.
    pub limit: usize,
    /// `static, published size`, `static, largest` or `continuous`.
    pub mode: &'static str,
    /// Most sequences at once.
    pub batch_size: usize,
    /// Whether the host planned ahead.
    pub overlap: bool,
    /// Requests of this run.
    pub num_requests: usize,
    /// Tokens of prompts and requested outputs.
    pub num_tokens: usize,
    /// From the first step to the last token.
    pub wall_s: f64,
    /// The publication's metric: tokens of prompts and outputs a second.
    pub tokens_per_s: f64,
}

/// Runs every mode for every limit; `show` gets each row as it comes.
///
/// # Errors
/// The engine fails.
pub fn run_burst(
    rig: &mut Rig,
    burst: &Burst,
    show: &mut dyn FnMut(&BurstRow),
) -> Result<Vec<BurstRow>> {
    let mut rows = Vec::new();
    for &(limit, published) in LIMITS.iter().filter(|(limit, _)| burst.limits.contains(limit)) {
        let published = published.min(burst.max_num_seqs);
        let modes = [
            ("static, published size", published, burst.num_published_batches * published),
            ("static, largest", burst.max_num_seqs, burst.num_prompts),
            ("continuous", burst.max_num_seqs, burst.num_prompts),
        ];
        for &overlap in &burst.overlaps {
            for (mode, batch_size, num_requests) in modes {
                let mode = Mode { limit, mode, batch_size, overlap, num_requests };
                let row = run_mode(rig, burst, &mode)?;
                show(&row);
                rows.push(row);
            }
        }
    }
    Ok(rows)
}

struct Mode {
    limit: usize,
    mode: &'static str,
    batch_size: usize,
    overlap: bool,
    num_requests: usize,
}

fn run_mode(rig: &mut Rig, burst: &Burst, mode: &Mode) -> Result<BurstRow> {
    let &Mode { limit, mode, batch_size, overlap, num_requests } = mode;
    let batching = match mode {
        "continuous" => Batching::Continuous,
        _ => Batching::Static { batch_size },
    };
    let tuning = Tuning { overlap, policy: Policy { batching, ..Policy::default() } };
    let arrival = |i| Arrival {
        at: Duration::ZERO,
        prompt_len: burst.lengths.burst_prompt(),
        output_len: burst.lengths.output(i, limit),
        tenant: "",
    };
    let arrivals: Vec<_> = (0..num_requests).map(arrival).collect();
    let served = rig.run(&tuning, &arrivals)?;
    let wall_s = served.iter().map(super::load::Served::latency_s).fold(0.0, f64::max);
    let num_tokens = arrivals.iter().map(|arrival| arrival.prompt_len + arrival.output_len).sum();
    let tokens_per_s = num_tokens as f64 / wall_s.max(1e-9);
    Ok(BurstRow {
        limit,
        mode,
        batch_size,
        overlap,
        num_requests,
        num_tokens,
        wall_s,
        tokens_per_s,
    })
}
