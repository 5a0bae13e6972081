//! A long prompt enters running decodes: what do they feel, and what does it cost?

use std::time::Duration;

use anyhow::Result;
use inflight_engine::{Policy, Targets, Tuning};
use serde::Serialize;

use super::load::{Arrival, Rig, Served};
use super::quantile;

/// How it is run.
#[derive(Clone, Debug)]
pub struct LongPrompt {
    /// Decodes that run.
    pub num_decodes: usize,
    /// Tokens of each decode's prompt.
    pub decode_prompt: usize,
    /// Tokens that each decode generates.
    pub decode_output: usize,
    /// Tokens of the long prompt.
    pub prompt_len: usize,
    /// When it comes, after the decodes.
    pub at: Duration,
    /// Fixed limits on a batch's prompt tokens to compare with.
    pub chunks: Vec<usize>,
    /// Targets for the time between tokens.
    pub targets: Vec<Duration>,
}

/// One run.
#[derive(Clone, Debug, Serialize)]
pub struct LongPromptRow {
    /// `no target`, `chunk` or `target`.
    pub mode: &'static str,
    /// Prompt tokens of a batch, if fixed.
    pub chunk: Option<usize>,
    /// The target, if there is one.
    pub target_ms: Option<f64>,
    /// From the long prompt's arrival to its first token.
    pub ttft_s: f64,
    /// Between two tokens of the decodes, from the start to the end.
    pub itl_p50_ms: f64,
    /// The same.
    pub itl_p99_ms: f64,
    /// The same.
    pub itl_max_ms: f64,
    /// The same, of tokens that came while the prompt was computed.
    pub itl_p99_beside_prompt_ms: f64,
    /// Tokens of prompts and outputs a second, from the start to the last token.
    pub tokens_per_s: f64,
}

/// Runs it without a target, with each fixed chunk, and with each target. The first run is made
/// twice, since it meets shapes for the first time.
///
/// # Errors
/// The engine fails.
pub fn run_long_prompt(
    rig: &mut Rig,
    long: &LongPrompt,
    show: &mut dyn FnMut(&LongPromptRow),
) -> Result<Vec<LongPromptRow>> {
    let usual = Policy::default;
    let mut variants = vec![("no target", usual())];
    for &chunk in &long.chunks {
        variants.push(("chunk", Policy { max_batch_prefill_tokens: Some(chunk), ..usual() }));
    }
    for &target in &long.targets {
        let targets = Targets { itl: Some(target), ttft: None };
        variants.push(("target", Policy { targets, ..usual() }));
    }
    let arrivals = arrivals(long);
    rig.run(&Tuning { overlap: true, policy: usual() }, &arrivals)?;
    let mut rows = Vec::new();
    for (mode, policy) in variants {
        let (chunk, target) = (policy.max_batch_prefill_tokens, policy.targets.itl);
        let served = rig.run(&Tuning { overlap: true, policy }, &arrivals)?;
        let row = summarize(long, (mode, chunk, target), &served);
        show(&row);
        rows.push(row);
    }
    Ok(rows)
}

fn arrivals(long: &LongPrompt) -> Vec<Arrival> {
    let decode = Arrival {
        at: Duration::ZERO,
        prompt_len: long.decode_prompt,
        output_len: long.decode_output,
        tenant: "",
    };
    let mut arrivals = vec![decode; long.num_decodes];
    let (at, prompt_len) = (long.at, long.prompt_len);
    arrivals.push(Arrival { at, prompt_len, output_len: 1, tenant: "" });
    arrivals
}

fn summarize(
    long: &LongPrompt,
    (mode, chunk, target): (&'static str, Option<usize>, Option<Duration>),
    served: &[Served],
) -> LongPromptRow {
    let (decodes, prompt) = served.split_at(long.num_decodes);
    let mut gaps: Vec<_> = decodes.iter().flat_map(Served::gaps_s).map(|s| 1e3 * s).collect();
    let (came, done) = (prompt[0].submitted, prompt[0].tokens[0]);
    let pairs = decodes.iter().flat_map(|served| served.tokens.windows(2));
    let beside = pairs.filter(|pair| pair[1] > came && pair[0] < done);
    let mut beside: Vec<_> = beside.map(|pair| 1e3 * (pair[1] - pair[0]).as_secs_f64()).collect();
    let wall_s = decodes.iter().map(Served::latency_s).fold(0.0, f64::max);
    let num_tokens =
        long.num_decodes * (long.decode_prompt + long.decode_output) + long.prompt_len + 1;
    LongPromptRow {
        mode,
        chunk,
        target_ms: target.map(|target| 1e3 * target.as_secs_f64()),
        ttft_s: prompt[0].first_token_s(),
        itl_p50_ms: quantile(&mut gaps, 0.5),
        itl_p99_ms: quantile(&mut gaps, 0.99),
        itl_max_ms: quantile(&mut gaps, 1.0),
        itl_p99_beside_prompt_ms: quantile(&mut beside, 0.99),
        tokens_per_s: num_tokens as f64 / wall_s.max(prompt[0].latency_s()).max(1e-9),
    }
}
