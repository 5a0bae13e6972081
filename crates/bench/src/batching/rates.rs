//! Latency against request rate: requests come at random times, whether or not others are done.

use std::time::Duration;

use anyhow::Result;
use inflight_backend::philox;
use inflight_engine::{Batching, Policy, Tuning};
use serde::Serialize;

use super::load::{Arrival, Rig, Served};
use super::{Lengths, quantile};

/// How rates are run.
#[derive(Clone, Debug)]
pub struct Rates {
    /// How long requests are.
    pub lengths: Lengths,
    /// Requests of each run.
    pub num_prompts: usize,
    /// The publication's limit on output lengths.
    pub limit: usize,
    /// Requests a second, each in a run of its own.
    pub requests_per_s: Vec<f64>,
    /// Most sequences that the engine can run.
    pub max_num_seqs: usize,
}

/// One run. Times are medians and 99th percentiles.
#[derive(Clone, Debug, Serialize)]
pub struct RatesRow {
    /// `static, largest` or `continuous`.
    pub mode: &'static str,
    /// Requests a second that came.
    pub requests_per_s: f64,
    /// Requests.
    pub num_requests: usize,
    /// From arrival to last token.
    pub latency_p50_s: f64,
    /// The same.
    pub latency_p99_s: f64,
    /// Latency by output token.
    pub latency_per_token_p50_ms: f64,
    /// From arrival to first token.
    pub ttft_p50_s: f64,
    /// Between two tokens.
    pub itl_p50_ms: f64,
    /// The same.
    pub itl_p99_ms: f64,
}

/// Runs every rate, static and continuous; `show` gets each row as it comes.
///
/// # Errors
/// The engine fails.
pub fn run_rates(
    rig: &mut Rig,
    rates: &Rates,
    show: &mut dyn FnMut(&RatesRow),
) -> Result<Vec<RatesRow>> {
    let batch_size = rates.max_num_seqs;
    let modes = [
        ("static, largest", Batching::Static { batch_size }),
        ("continuous", Batching::Continuous),
    ];
    let mut rows = Vec::new();
    for &rate in &rates.requests_per_s {
        for (mode, batching) in modes {
            let policy = Policy { batching, ..Policy::default() };
            let served = rig.run(&Tuning { overlap: true, policy }, &arrivals(rates, rate))?;
            let row = summarize(mode, rate, &served);
            show(&row);
            rows.push(row);
        }
    }
    Ok(rows)
}

fn arrivals(rates: &Rates, rate: f64) -> Vec<Arrival> {
    let mut at = 0.0;
    let arrival = |i: usize| {
        let uniform = philox::uniform(rates.lengths.seed ^ 0xA551, i as u32);
        at += -(1.0 - uniform).ln() / rate;
        Arrival {
            at: Duration::from_secs_f64(at),
            prompt_len: rates.lengths.rate_prompt(i),
            output_len: rates.lengths.output(i, rates.limit),
            tenant: "",
        }
    };
    (0..rates.num_prompts).map(arrival).collect()
}

fn summarize(mode: &'static str, requests_per_s: f64, served: &[Served]) -> RatesRow {
    let mut latencies: Vec<_> = served.iter().map(Served::latency_s).collect();
    let per_token = served.iter().map(|s| 1e3 * s.latency_s() / s.tokens.len().max(1) as f64);
    let mut gaps: Vec<_> = served.iter().flat_map(Served::gaps_s).map(|s| 1e3 * s).collect();
    RatesRow {
        mode,
        requests_per_s,
        num_requests: served.len(),
        latency_p50_s: quantile(&mut latencies, 0.5),
        latency_p99_s: quantile(&mut latencies, 0.99),
        latency_per_token_p50_ms: quantile(&mut per_token.collect::<Vec<_>>(), 0.5),
        ttft_p50_s: quantile(
            &mut served.iter().map(Served::first_token_s).collect::<Vec<_>>(),
            0.5,
        ),
        itl_p50_ms: quantile(&mut gaps, 0.5),
        itl_p99_ms: quantile(&mut gaps, 0.99),
    }
}
