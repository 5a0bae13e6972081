//! Does a request get the same tokens alone as in a crowd, and the same logits to the last bit
//! however its prompt is cut? On a small model of random weights.

use anyhow::Result;
use inflight_backend::{Backend, philox};
use inflight_engine::{Engine, EngineConfig, KvKeep, MemoryConfig, SamplingParams};
use inflight_model::{Decoder, eval::all_logits};

use crate::{BuiltInConfig, OfflineWorkload, RequestLengths, run_offline};

/// Cut by 13, the last piece is a single token.
const INPUT_LEN: usize = 196;
const SMALL_PIECE: usize = 13;
const OUTPUT_LEN: usize = 24;
const MAX_MODEL_LEN: usize = INPUT_LEN + OUTPUT_LEN;
/// Requests that are run alone as well.
const NUM_ALONE: usize = 6;

/// What the runs gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvarianceCheck {
    /// Tokens, and positions whose logits were compared.
    pub num_tokens: usize,
    /// Tokens that the runs do not agree on, and positions whose logits have other bits.
    pub num_different: usize,
}

/// How requests are run.
#[derive(Clone, Copy)]
struct Setting {
    num_prompts: usize,
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
}

/// Runs some requests among 256 others, then one at a time with their prompts whole and in pieces;
/// and one prompt's logits, whole, in pieces and token by token.
///
/// # Errors
/// What keeps an engine from running on `backend` at all.
pub fn check_invariance<B: Backend>(backend: &B) -> Result<InvarianceCheck> {
    check_among(backend, NUM_ALONE + 256)
}

fn check_among<B: Backend>(backend: &B, num_prompts: usize) -> Result<InvarianceCheck> {
    let crowd = Setting { num_prompts, max_num_seqs: num_prompts, max_num_batched_tokens: 1024 };
    let whole = Setting { num_prompts: NUM_ALONE, max_num_seqs: 1, ..crowd };
    let cut = Setting { max_num_batched_tokens: SMALL_PIECE, ..whole };
    let crowd = tokens(backend, crowd)?;
    let mut check = compare_logits(backend)?;
    for alone in [tokens(backend, whole)?, tokens(backend, cut)?] {
        let (crowd, alone) = (crowd[..NUM_ALONE].concat(), alone.concat());
        check.num_tokens += alone.len();
        check.num_different += crowd.len().abs_diff(alone.len());
        check.num_different += crowd.iter().zip(&alone).filter(|(a, b)| a != b).count();
    }
    Ok(check)
}

fn tokens<B: Backend>(backend: &B, setting: Setting) -> Result<Vec<Vec<u32>>> {
    let Setting { num_prompts, max_num_seqs, max_num_batched_tokens } = setting;
    let block_size = 16;
    let config = EngineConfig {
        overlap: true,
        max_num_seqs,
        max_num_batched_tokens,
        max_model_len: MAX_MODEL_LEN,
        block_size,
        num_blocks: max_num_seqs * MAX_MODEL_LEN.div_ceil(block_size),
        max_outstanding: num_prompts + 1,
        kv_keep: KvKeep::All,
        memory: MemoryConfig::default(),
    };
    let (engine, handle) = Engine::new(backend.clone(), decoder(backend)?, config)?;
    let sampled = SamplingParams { temperature: 1.0, top_p: 0.95, ..SamplingParams::default() };
    let workload = OfflineWorkload {
        lengths: vec![RequestLengths { input: INPUT_LEN, output: OUTPUT_LEN }; num_prompts],
        shared_prefix: 0,
        sampling: vec![SamplingParams::default(), sampled],
        grammar: None,
        warm_up: true,
    };
    Ok(run_offline(engine, handle, &workload, &mut |_| {})?.tokens)
}

fn compare_logits<B: Backend>(backend: &B) -> Result<InvarianceCheck> {
    let decoder = decoder(backend)?;
    let vocab_size = decoder.config().vocab_size;
    let draw = |i| (philox::uniform(11, i) * vocab_size as f64) as u32;
    let prompt: Vec<u32> = (0..).take(INPUT_LEN).map(draw).collect();
    let whole = all_logits(backend, &decoder, &prompt, INPUT_LEN)?;
    let mut check = InvarianceCheck { num_tokens: 0, num_different: 0 };
    for piece in [1, SMALL_PIECE, 64] {
        let pieces = all_logits(backend, &decoder, &prompt, piece)?;
        let rows = pieces.chunks_exact(vocab_size).zip(whole.chunks_exact(vocab_size));
        let same = |(a, b): (&[f32], &[f32])| {
            a.iter().map(|x| x.to_bits()).eq(b.iter().map(|x| x.to_bits()))
        };
        check.num_tokens += INPUT_LEN;
        check.num_different += rows.filter(|rows| !same(*rows)).count();
    }
    Ok(check)
}

fn decoder<B: Backend>(backend: &B) -> Result<Decoder<B>> {
    let files = BuiltInConfig::Tiny.dummy(0)?;
    Ok(Decoder::load(backend, &files.config, &files.weights, MAX_MODEL_LEN, &mut |_| {})?)
}

#[cfg(test)]
mod tests {
    use inflight_backend::{CpuBackend, CpuConfig, KvDtype};

    use super::*;

    /// The CPU's arithmetic never depends on the batch.
    #[test]
    fn the_cpu_is_invariant() {
        for kv_dtype in [KvDtype::F16, KvDtype::Int8] {
            let config = CpuConfig { num_threads: 2, kv_dtype, ..CpuConfig::detect() };
            let check = check_among(&CpuBackend::new(config).unwrap(), 24).unwrap();
            assert_eq!(check.num_tokens, 3 * INPUT_LEN + 2 * NUM_ALONE * OUTPUT_LEN);
            assert_eq!(check.num_different, 0);
        }
    }
}
