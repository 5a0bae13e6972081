//! Requests that pool: the state after the prompt instead of tokens.

#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use std::path::Path;
use std::sync::mpsc::channel;

use inflight_backend::{CpuBackend, CpuConfig, KvDtype, WeightPrecision};
use inflight_engine::{Pooling, RequestSpec};
use inflight_model::ModelFiles;
use serde_json::Value;
use support::{MODEL, StateSink, config, engine_on, mixed_request, submit};

/// Prompts and, for their last token, the logits that transformers computes.
fn references() -> Vec<(Vec<u32>, Vec<f32>)> {
    let text = std::fs::read(Path::new(MODEL).join("expected.json")).unwrap();
    let expected: Value = serde_json::from_slice(&text).unwrap();
    let sequence = |sequence: &Value| {
        let read = |value: &Value| serde_json::from_value(value.clone()).unwrap();
        let last_logits: Vec<Vec<f32>> =
            serde_json::from_value(sequence["last_logits"].clone()).unwrap();
        (read(&sequence["input_ids"]), last_logits.last().unwrap().clone())
    };
    expected["sequences"].as_array().unwrap().iter().map(sequence).collect()
}

/// `[vocab_size, hidden_size]`, in rows.
fn output_matrix() -> Vec<Vec<f32>> {
    let ModelFiles { config, weights, .. } = ModelFiles::open(Path::new(MODEL)).unwrap();
    let shape = [config.vocab_size, config.hidden_size];
    let matrix = weights.tensor("lm_head.weight", &shape).unwrap().to_f32();
    matrix.chunks_exact(config.hidden_size).map(<[f32]>::to_vec).collect()
}

/// The output matrix turns a state into the logits after it: so those tell whether it is right.
#[test]
fn states_are_those_of_transformers() {
    let matrix = output_matrix();
    for overlap in [true, false] {
        let cpu = CpuConfig {
            num_threads: 2,
            weights: WeightPrecision::F32,
            kv_dtype: KvDtype::F32,
            ..CpuConfig::detect()
        };
        let (engine, handle) = engine_on(CpuBackend::new(cpu).unwrap(), config(overlap));
        let thread = std::thread::spawn(|| engine.run());
        // Others are served beside them; every prompt comes twice, so that its prefix is known.
        let others: Vec<_> = (0..6).map(|i| submit(&handle, mixed_request(i))).collect();
        for (prompt, logits) in references().into_iter().flat_map(|one| [one.clone(), one]) {
            let spec = RequestSpec {
                prompt,
                max_tokens: Some(1),
                pooling: Some(Pooling::LastToken),
                ..RequestSpec::default()
            };
            let request = handle.limits().validate(spec).unwrap();
            let (sender, states) = channel();
            handle.submit(request, Box::new(StateSink(sender))).unwrap();
            let state = states.recv().unwrap();
            let largest = logits.iter().fold(0_f32, |max, x| max.max(x.abs()));
            for (row, expected) in matrix.iter().zip(&logits) {
                let logit: f32 = row.iter().zip(&state).map(|(w, x)| w * x).sum();
                assert!((logit - expected).abs() <= 1e-3 * largest, "{logit} is not {expected}");
            }
        }
        others.into_iter().for_each(|client| drop(client.wait()));
        handle.drain();
        thread.join().unwrap().unwrap();
    }
}
