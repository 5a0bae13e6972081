//! A request's tokens depend on nothing but the request: not on overlap, neighbours, chunking or
//! preemption.

mod support;

use std::sync::atomic::Ordering;

use inflight_engine::{EngineConfig, EngineHandle, FinishReason, MemoryConfig, Preemption};
use support::{Output, config, mixed_request, start};

const NUM_REQUESTS: u32 = 64;

/// How often what happened.
#[derive(Clone, Copy, Debug)]
struct Events {
    preemptions: u64,
    swaps: u64,
    /// Blocks of prefixes copied to the host, and fetched from it.
    kept: u64,
    fetched: u64,
    cached_tokens: usize,
}

/// Serves all requests at the same time, and once more what the first time may have left behind.
fn twice_at_once(config: EngineConfig) -> ([Vec<Output>; 2], Events) {
    let engine = start(config);
    let mut cached_tokens = 0;
    let outputs = [(); 2].map(|()| {
        let clients: Vec<_> = (0..NUM_REQUESTS).map(|i| engine.submit(mixed_request(i))).collect();
        let outputs = clients.into_iter().map(support::Client::wait_and_count);
        let (outputs, cached): (Vec<_>, Vec<_>) = outputs.unzip();
        cached_tokens += cached.iter().sum::<usize>();
        outputs
    });
    let events = events(&engine.handle, cached_tokens);
    engine.stop();
    (outputs, events)
}

fn events(handle: &EngineHandle, cached_tokens: usize) -> Events {
    let stats = handle.stats();
    let preemptions = stats.num_preemptions.load(Ordering::Relaxed);
    assert_eq!(stats.memory.num_leaked_blocks.load(Ordering::Relaxed), 0);
    Events {
        preemptions,
        swaps: stats.num_swaps.load(Ordering::Relaxed),
        kept: stats.memory.num_kept.load(Ordering::Relaxed),
        fetched: stats.memory.num_fetched.load(Ordering::Relaxed),
        cached_tokens,
    }
}

/// Nothing is kept.
const PLAIN: MemoryConfig = MemoryConfig {
    prefix_caching: false,
    preemption: Preemption::Recompute,
    num_swap_blocks: 0,
    keeps_cold_prefixes: false,
    max_moved_blocks: 0,
};

fn one_at_a_time(config: EngineConfig) -> Vec<Output> {
    let engine = start(config);
    let outputs = (0..NUM_REQUESTS).map(|i| engine.submit(mixed_request(i)).wait()).collect();
    engine.stop();
    outputs
}

#[test]
fn overlap_neighbours_chunks_and_preemption_change_no_token() {
    let plain = |overlap| EngineConfig { memory: PLAIN, ..config(overlap) };
    let alone = one_at_a_time(plain(false));
    let check = |name: &str, config: EngineConfig| {
        let (outputs, events) = twice_at_once(config);
        for (i, (output, expected)) in
            outputs.iter().flat_map(|outputs| outputs.iter().zip(&alone).enumerate())
        {
            assert_eq!(output, expected, "{name}, request {i}: {:?}", mixed_request(i as u32));
        }
        events
    };
    assert_eq!(one_at_a_time(plain(true)), alone);
    check("overlap off", plain(false));
    check("overlap on", plain(true));
    let chunks = |overlap| EngineConfig { max_num_batched_tokens: 16, ..plain(overlap) };
    check("small chunks, overlap off", chunks(false));
    check("small chunks, overlap on", chunks(true));
    // 36 blocks of 4 tokens: about two of the longer sequences fit.
    for overlap in [false, true] {
        let small_pool = EngineConfig { num_blocks: 36, ..plain(overlap) };
        let events = check("small pool", small_pool.clone());
        assert!(events.preemptions > 0 && events.swaps == 0, "{events:?}");
        let swap = MemoryConfig {
            preemption: Preemption::Swap,
            num_swap_blocks: 200,
            keeps_cold_prefixes: false,
            max_moved_blocks: 5,
            ..PLAIN
        };
        let events = check("swap", EngineConfig { memory: swap.clone(), ..small_pool.clone() });
        assert!(events.swaps > 0 && events.cached_tokens == 0, "{events:?}");
        let both = MemoryConfig { prefix_caching: true, ..swap };
        let events =
            check("swap and prefixes", EngineConfig { memory: both.clone(), ..small_pool });
        assert!(events.swaps > 0, "{events:?}");
        let tier =
            MemoryConfig { keeps_cold_prefixes: true, num_swap_blocks: 1500, ..both.clone() };
        for num_blocks in [36, 80] {
            let events = check(
                "host tier",
                EngineConfig { num_blocks, memory: tier.clone(), ..config(overlap) },
            );
            assert!(events.kept > 0 && events.fetched > 0, "{events:?}");
        }
        let roomy = EngineConfig { num_blocks: 1400, ..config(overlap) };
        let events = check("prefixes", roomy);
        assert!(events.cached_tokens > 500, "{events:?}");
    }
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
