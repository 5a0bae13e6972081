//! What is told of prompts, against transformers: logprobs of their tokens, the mean of their
//! states; whatever the chunks, neighbours, cached prefixes and preemptions.

#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;

use inflight_backend::{CpuBackend, CpuConfig, KvDtype, WeightPrecision};
use inflight_engine::{
    EngineConfig, EngineHandle, MemoryConfig, Pooling, Preemption, PromptToken, RequestSpec,
};
use serde::Deserialize;
use support::{StateSink, config, engine_on, mixed_request, submit};

/// By `make_prompts.py`.
#[derive(Deserialize)]
struct Reference {
    prompts: Vec<Prompt>,
}

#[derive(Deserialize)]
struct Prompt {
    tokens: Vec<u32>,
    logprobs: Vec<f32>,
    ranks: Vec<u32>,
    top: Vec<Vec<u32>>,
    top_logprobs: Vec<Vec<f32>>,
    mean_state: Vec<f32>,
}

fn references() -> Vec<Prompt> {
    serde_json::from_str::<Reference>(include_str!("data/prompts.json")).unwrap().prompts
}

fn exact_cpu() -> CpuBackend {
    let cpu = CpuConfig {
        num_threads: 2,
        weights: WeightPrecision::F32,
        kv_dtype: KvDtype::F32,
        ..CpuConfig::detect()
    };
    CpuBackend::new(cpu).unwrap()
}

/// Engines in which prompts meet all that may befall them.
fn configs() -> Vec<(&'static str, EngineConfig)> {
    let mut all = Vec::new();
    for overlap in [true, false] {
        all.push(("usual", config(overlap)));
        all.push(("small chunks", EngineConfig { max_num_batched_tokens: 16, ..config(overlap) }));
        // Fewer probes than tokens in a batch.
        all.push(("few rows", EngineConfig { max_num_seqs: 3, ..config(overlap) }));
        let memory = MemoryConfig { preemption: Preemption::Recompute, ..MemoryConfig::default() };
        all.push(("small pool", EngineConfig { num_blocks: 40, memory, ..config(overlap) }));
        let memory = MemoryConfig {
            preemption: Preemption::Swap,
            num_swap_blocks: 200,
            max_moved_blocks: 5,
            ..MemoryConfig::default()
        };
        all.push(("swap", EngineConfig { num_blocks: 40, memory, ..config(overlap) }));
    }
    all
}

/// Serves every request thrice, so that the second time its prompt is known, among others.
fn serve(config: EngineConfig, each: impl Fn(&EngineHandle)) -> u64 {
    let (engine, handle) = engine_on(exact_cpu(), config);
    let thread = std::thread::spawn(|| engine.run());
    for round in 0..3 {
        let others: Vec<_> =
            (0..12).map(|i| submit(&handle, mixed_request(round * 12 + i))).collect();
        each(&handle);
        others.into_iter().for_each(|client| drop(client.wait()));
    }
    let num_preemptions = handle.stats().num_preemptions.load(Ordering::Relaxed);
    handle.drain();
    thread.join().unwrap().unwrap();
    num_preemptions
}

#[test]
fn logprobs_of_prompts_are_those_of_transformers() {
    let references = references();
    for (name, config) in configs() {
        let num_preemptions = serve(config, |handle| {
            let spec = |(i, prompt): (usize, &Prompt)| RequestSpec {
                prompt: prompt.tokens.clone(),
                max_tokens: Some(1 + 5 * i),
                prompt_logprobs: Some(3),
                ..RequestSpec::default()
            };
            let specs = references.iter().enumerate().map(spec);
            let clients: Vec<_> = specs.map(|spec| submit(handle, spec)).collect();
            for (client, expected) in clients.into_iter().zip(&references) {
                let (output, num_cached) = client.wait_and_count();
                assert_eq!(num_cached, 0, "the whole prompt was computed");
                check(&output.prompt, expected, name);
            }
        });
        assert!(num_preemptions > 0 || !["small pool", "swap"].contains(&name), "{name}");
    }
}

fn check(found: &[PromptToken], expected: &Prompt, name: &str) {
    let tokens: Vec<u32> = found.iter().map(|found| found.token).collect();
    assert_eq!(tokens, expected.tokens[1..], "{name}");
    for (i, found) in found.iter().enumerate() {
        let logprob = expected.logprobs[i];
        assert!((found.logprob - logprob).abs() < 1e-3, "{name}: {} {logprob}", found.logprob);
        let rank = expected.ranks[i];
        // Neighbours in rank may be as likely as each other.
        let is_rank = match found.rank {
            Some(found) => found.abs_diff(rank) <= 1,
            None => rank >= 20,
        };
        assert!(is_rank, "{name}: {:?} {rank}", found.rank);
        let top = found.top_logprobs.iter().zip(&expected.top[i]).zip(&expected.top_logprobs[i]);
        for (((id, found), expected_id), expected) in top {
            assert!((found - expected).abs() < 1e-3, "{name}: {id} {expected_id}");
        }
        assert_eq!(found.top_logprobs.len(), 3);
        assert_eq!(found.top_logprobs[0].0, expected.top[i][0], "{name}");
    }
}

#[test]
fn means_of_states_are_those_of_transformers() {
    let references = references();
    for (name, config) in configs() {
        serve(config, |handle| {
            let pool = |prompt: &Prompt| {
                let spec = RequestSpec {
                    prompt: prompt.tokens.clone(),
                    max_tokens: Some(1),
                    pooling: Some(Pooling::Mean),
                    ..RequestSpec::default()
                };
                let request = handle.limits().validate(spec).unwrap();
                let (sender, state) = channel();
                handle.submit(request, Box::new(StateSink(sender))).unwrap();
                state
            };
            let states: Vec<_> = references.iter().map(pool).collect();
            for (state, expected) in states.into_iter().zip(&references) {
                let state = state.recv().unwrap();
                assert_eq!(state.len(), expected.mean_state.len());
                for (found, expected) in state.iter().zip(&expected.mean_state) {
                    assert!((found - expected).abs() < 1e-3, "{name}: {found} {expected}");
                }
            }
        });
    }
}
