//! Does the loop give the same tokens with overlap as without? On a small model of random weights.

use anyhow::Result;
use inflight_backend::Backend;
use inflight_engine::{Engine, EngineConfig, KvKeep, MemoryConfig, SamplingParams};
use inflight_model::Decoder;

use crate::{BuiltInConfig, OfflineRun, OfflineWorkload, Report, RequestLengths, run_offline};

const NUM_REQUESTS: usize = 12;
const INPUT_LEN: usize = 40;
const OUTPUT_LEN: usize = 48;
const MAX_MODEL_LEN: usize = INPUT_LEN + OUTPUT_LEN;

/// What both runs gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoopCheck {
    /// Tokens of each run.
    pub num_tokens: usize,
    /// Tokens that the runs do not agree on.
    pub num_different: usize,
    /// See [`WAITS_DEFINITION`](crate::WAITS_DEFINITION), with overlap.
    pub num_waits: usize,
}

impl LoopCheck {
    /// Whether both runs gave the same tokens.
    pub fn passed(&self) -> bool {
        self.num_different == 0 && self.num_waits == 0
    }
}

/// Runs greedy, sampled, penalised and logprob requests with overlap on and off.
///
/// # Errors
/// What keeps an engine from running on `backend` at all.
pub fn check_loop<B: Backend>(backend: &B) -> Result<LoopCheck> {
    let on = run(backend, true)?;
    let off = run(backend, false)?;
    let (tokens, others) = (on.tokens.concat(), off.tokens.concat());
    let num_different = tokens.iter().zip(&others).filter(|(a, b)| a != b).count();
    Ok(LoopCheck {
        num_tokens: tokens.len(),
        num_different: num_different + tokens.len().abs_diff(others.len()),
        num_waits: Report::new(&on, true, 0).num_waits_before_launch,
    })
}

fn run<B: Backend>(backend: &B, overlap: bool) -> Result<OfflineRun> {
    let files = BuiltInConfig::Tiny.dummy(0)?;
    let (model, weights) = (&files.config, &files.weights);
    let decoder = Decoder::load(backend, model, weights, MAX_MODEL_LEN, &mut |_| {})?;
    let block_size = 16;
    let config = EngineConfig {
        overlap,
        max_num_seqs: NUM_REQUESTS,
        // Less than all prompts, so that some are computed in chunks beside running sequences.
        max_num_batched_tokens: 3 * INPUT_LEN + 7,
        max_model_len: MAX_MODEL_LEN,
        block_size,
        num_blocks: NUM_REQUESTS * MAX_MODEL_LEN.div_ceil(block_size),
        memory: MemoryConfig::default(),
        max_outstanding: NUM_REQUESTS + 1,
        kv_keep: KvKeep::All,
    };
    let (engine, handle) = Engine::new(backend.clone(), decoder, config)?;
    let workload = OfflineWorkload {
        lengths: vec![RequestLengths { input: INPUT_LEN, output: OUTPUT_LEN }; NUM_REQUESTS],
        shared_prefix: 0,
        sampling: kinds(),
        grammar: None,
        warm_up: true,
    };
    run_offline(engine, handle, &workload, &mut |_| {})
}

fn kinds() -> Vec<SamplingParams> {
    let greedy = SamplingParams::default();
    vec![
        greedy.clone(),
        SamplingParams { temperature: 0.8, top_k: 50, top_p: 0.95, ..greedy.clone() },
        SamplingParams { repetition_penalty: 1.3, frequency_penalty: 0.2, ..greedy.clone() },
        SamplingParams { temperature: 1.0, top_logprobs: Some(5), ..greedy },
    ]
}

#[cfg(test)]
mod tests {
    use inflight_backend::{CpuBackend, CpuConfig, KvDtype};

    use super::*;

    #[test]
    fn the_cpu_gives_the_same_tokens() {
        for kv_dtype in [KvDtype::F16, KvDtype::Int8, KvDtype::Fp8, KvDtype::Int4] {
            let config = CpuConfig { num_threads: 2, kv_dtype, ..CpuConfig::detect() };
            let check = check_loop(&CpuBackend::new(config).unwrap()).unwrap();
            assert_eq!(check.num_tokens, NUM_REQUESTS * OUTPUT_LEN);
            assert!(check.passed(), "{kv_dtype}: {check:?}");
        }
    }
}
