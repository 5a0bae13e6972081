//! What requests have in common is computed once, and gives the same tokens as if it were not.

mod support;

use std::sync::atomic::Ordering;

use inflight_engine::{EngineConfig, MemoryConfig, RequestSpec, SamplingParams};
use support::{Output, Running, config, start, submit_outputs};

const PROMPT_LEN: usize = 27;

/// Output `i` of a request: sampled, penalised, with logprobs.
fn output(prompt_len: usize, i: u32) -> RequestSpec {
    RequestSpec {
        prompt: (0..prompt_len as u32).map(|k| (k * k * 3 + 11 * k + 5) % 256).collect(),
        max_tokens: Some(12),
        sampling: SamplingParams {
            temperature: 1.0,
            seed: u64::from(i),
            repetition_penalty: 1.3,
            presence_penalty: 0.4,
            frequency_penalty: 0.6,
            top_logprobs: Some(3),
            ..SamplingParams::default()
        },
        ..RequestSpec::default()
    }
}

fn uncached(overlap: bool) -> EngineConfig {
    let memory = MemoryConfig { prefix_caching: false, ..MemoryConfig::default() };
    EngineConfig { memory, ..config(overlap) }
}

fn num_computed(engine: &Running) -> u64 {
    engine.handle.stats().num_computed_tokens.load(Ordering::Relaxed)
}

#[test]
fn outputs_of_a_request_share_its_prompt() {
    // A prompt that fills its blocks, one that does not, and one of a single token.
    for prompt_len in [28, PROMPT_LEN, 1] {
        let engine = start(uncached(false));
        let alone: Vec<Output> =
            (0..6).map(|i| engine.submit(output(prompt_len, i)).wait()).collect();
        engine.stop();
        assert_ne!(alone[0], alone[1], "other seeds, other tokens");
        for config in [uncached(false), uncached(true), config(true)] {
            let engine = start(config);
            let specs = (0..6).map(|i| output(prompt_len, i)).collect();
            let clients = submit_outputs(&engine.handle, specs);
            let outputs: Vec<Output> = clients.into_iter().map(support::Client::wait).collect();
            assert_eq!(outputs, alone);
            // The prompt once, its last token for each other output, and eleven inputs each.
            let expected = prompt_len + 5 + 6 * 11;
            assert_eq!(num_computed(&engine), expected as u64, "prompt of {prompt_len}");
            engine.stop();
        }
    }
}

#[test]
fn a_repeated_prompt_is_found_and_other_salts_never_are() {
    let engine = start(config(true));
    let salted = |salt: Option<&str>| RequestSpec {
        cache_salt: salt.map(str::to_owned),
        ..output(PROMPT_LEN, 1)
    };
    let (first, cached) = engine.submit(salted(None)).wait_and_count();
    assert_eq!(cached, 0);
    // Six full blocks of four come before the prompt's last token.
    for (salt, expected) in
        [(None, 24), (Some("a"), 0), (Some("b"), 0), (Some("a"), 24), (None, 24), (Some("b"), 24)]
    {
        let (output, cached) = engine.submit(salted(salt)).wait_and_count();
        assert_eq!((output, cached), (first.clone(), expected), "salt {salt:?}");
    }
    engine.stop();
}

#[test]
fn a_conversation_goes_on_where_it_was() {
    let engine = start(config(true));
    let first = engine.submit(output(PROMPT_LEN, 1)).wait();
    let mut next = output(PROMPT_LEN, 2);
    next.prompt.extend(first.ids());
    next.prompt.extend([9, 8, 7]);
    let (second, cached) = engine.submit(next.clone()).wait_and_count();
    // 27 + 11 tokens went through the model, the twelfth was only drawn.
    assert_eq!(cached, 36);
    engine.stop();
    let plain = start(uncached(false));
    assert_eq!(plain.submit(next).wait(), second);
    plain.stop();
}

#[test]
fn without_caching_nothing_is_found() {
    let engine = start(uncached(true));
    for _ in 0..2 {
        assert_eq!(engine.submit(output(PROMPT_LEN, 1)).wait_and_count().1, 0);
    }
    assert_eq!(num_computed(&engine), 2 * (27 + 11));
    engine.stop();
}
