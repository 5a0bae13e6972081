//! Logprobs of prompts by the default model, against the exact ones.
//!
//! # Source
//! `crates/model/tests/default_model/exact.json`: in 64-bit arithmetic, by `make_exact.py` there.

#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use std::path::PathBuf;

use inflight_backend::{CpuBackend, CpuConfig, KvDtype, WeightPrecision};
use inflight_engine::{Engine, EngineConfig, RequestSpec};
use inflight_model::{Decoder, ModelFiles};
use serde::Deserialize;
use support::{config, submit};

#[derive(Deserialize)]
struct Text {
    tokens: Vec<u32>,
    /// From here on `logprobs` are known.
    first: usize,
    logprobs: Vec<f32>,
}

#[test]
#[ignore = "needs the default model: make test"]
fn prompts_are_as_likely_as_exact_arithmetic_says() {
    let exact = include_str!("../../model/tests/default_model/exact.json");
    let texts: Vec<Text> = serde_json::from_str(exact).unwrap();
    let path = PathBuf::from(std::env::var_os("INFLIGHT_TEST_MODEL").unwrap());
    let files = ModelFiles::open(&path).unwrap();
    let config = EngineConfig {
        max_num_seqs: 12,
        max_num_batched_tokens: 192,
        max_model_len: 2048,
        block_size: 16,
        ..config(true)
    };
    let cpu =
        CpuConfig { weights: WeightPrecision::F32, kv_dtype: KvDtype::F32, ..CpuConfig::detect() };
    let backend = CpuBackend::new(cpu).unwrap();
    let decoder = Decoder::load(&backend, &files.config, &files.weights, 2048, &mut |_| {});
    let (engine, handle) = Engine::new(backend, decoder.unwrap(), config).unwrap();
    let thread = std::thread::spawn(|| engine.run());
    let spec = |text: &Text| RequestSpec {
        prompt: text.tokens.clone(),
        max_tokens: Some(1),
        prompt_logprobs: Some(0),
        ..RequestSpec::default()
    };
    let clients: Vec<_> = texts.iter().map(|text| submit(&handle, spec(text))).collect();
    for (client, text) in clients.into_iter().zip(&texts) {
        let prompt = client.wait().prompt;
        assert_eq!(prompt.len() + 1, text.tokens.len());
        // The first token has no entry.
        for (found, expected) in prompt[text.first - 1..].iter().zip(&text.logprobs) {
            assert!((found.logprob - expected).abs() < 0.002, "{} {expected}", found.logprob);
        }
        assert_eq!(prompt.len() + 1 - text.first, text.logprobs.len());
    }
    handle.drain();
    thread.join().unwrap().unwrap();
}
