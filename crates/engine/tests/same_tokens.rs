//! A request's tokens depend on nothing but the request: not on overlap, neighbours, chunking or
//! preemption.

mod support;

use inflight_engine::{EngineConfig, FinishReason};
use support::{Output, config, mixed_request, start};

const NUM_REQUESTS: u32 = 64;

fn all_at_once(config: EngineConfig) -> (Vec<Output>, u64) {
    let engine = start(config);
    let clients: Vec<_> = (0..NUM_REQUESTS).map(|i| engine.submit(mixed_request(i))).collect();
    let outputs = clients.into_iter().map(support::Client::wait).collect();
    let stats = engine.handle.stats();
    let preemptions = stats.num_preemptions.load(std::sync::atomic::Ordering::Relaxed);
    engine.stop();
    (outputs, preemptions)
}

fn one_at_a_time(config: EngineConfig) -> Vec<Output> {
    let engine = start(config);
    let outputs = (0..NUM_REQUESTS).map(|i| engine.submit(mixed_request(i)).wait()).collect();
    engine.stop();
    outputs
}

#[test]
fn overlap_neighbours_chunks_and_preemption_change_no_token() {
    let alone = one_at_a_time(config(false));
    let check = |name: &str, config: EngineConfig| {
        let (outputs, preemptions) = all_at_once(config);
        for (i, (output, expected)) in outputs.iter().zip(&alone).enumerate() {
            assert_eq!(output, expected, "{name}, request {i}: {:?}", mixed_request(i as u32));
        }
        preemptions
    };
    assert_eq!(one_at_a_time(config(true)), alone);
    check("overlap off", config(false));
    check("overlap on", config(true));
    let chunks = |overlap| EngineConfig { max_num_batched_tokens: 16, ..config(overlap) };
    check("small chunks, overlap off", chunks(false));
    check("small chunks, overlap on", chunks(true));
    // 36 blocks of 4 tokens: about two of the longer sequences fit.
    let small_pool = |overlap| EngineConfig { num_blocks: 36, ..config(overlap) };
    assert!(check("small pool, overlap off", small_pool(false)) > 0, "nothing was preempted");
    assert!(check("small pool, overlap on", small_pool(true)) > 0, "nothing was preempted");
}

#[test]
fn requests_end_as_they_should() {
    let engine = start(config(true));
    let mut seen_stop = false;
    for i in 0..NUM_REQUESTS {
        let spec = mixed_request(i);
        let output = engine.submit(spec.clone()).wait();
        let (ids, max_tokens) = (output.ids(), spec.max_tokens.unwrap());
        let stops = |k: &usize| *k >= spec.min_tokens && spec.stop_token_ids.contains(&ids[*k]);
        match output.finish {
            FinishReason::Stop { token } => {
                seen_stop = true;
                assert_eq!(ids.last(), Some(&token));
                assert_eq!((0..ids.len()).find(stops), Some(ids.len() - 1));
            }
            FinishReason::Length => {
                assert_eq!(ids.len(), max_tokens);
                assert_eq!((0..ids.len() - 1).find(stops), None);
            }
            other => panic!("request {i}: {other:?}"),
        }
        assert!(ids.len() >= spec.min_tokens.min(max_tokens));
        assert!(!ids.contains(&7) || i % 5 != 2, "token 7 was banned");
        for update in &output.tokens {
            assert_eq!(update.logprob.is_some(), i % 6 == 0);
            assert_eq!(update.top_logprobs.len(), spec.sampling.top_logprobs.unwrap_or(0) as usize);
        }
    }
    assert!(seen_stop, "no request ended by a stop token");
    engine.stop();
}
