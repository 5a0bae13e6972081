//! Prefixes that the host keeps, over real streams: what comes back is what went.

mod support;

use std::sync::atomic::Ordering;

use inflight_engine::{
    EngineConfig, FinishReason, MemoryConfig, Preemption, RequestSpec, SamplingParams,
};
use support::{Client, Output, Running, VOCAB_SIZE, config, start};

const NUM_CHATS: u32 = 24;
/// Sixteen full blocks of four.
const PREFIX: u32 = 64;

/// 24 chats of 16 blocks are four times this pool.
fn tiered(overlap: bool) -> EngineConfig {
    let memory = MemoryConfig {
        num_swap_blocks: 600,
        keeps_cold_prefixes: true,
        // Whatever the device's speed.
        preemption: Preemption::Swap,
        max_moved_blocks: 5,
        ..MemoryConfig::default()
    };
    EngineConfig { num_blocks: 96, memory, ..config(overlap) }
}

/// A turn of a chat: its beginning, something new, and penalties that look at both.
fn turn(chat: u32, number: u32) -> RequestSpec {
    let prefix = (0..PREFIX).map(|k| (chat * 37 + k * k * 3 + 11) % VOCAB_SIZE);
    let new = (0..3 + number % 4).map(|k| (number * 91 + k * 7) % VOCAB_SIZE);
    RequestSpec {
        prompt: prefix.chain(new).collect(),
        max_tokens: Some(6),
        sampling: SamplingParams {
            temperature: if chat.is_multiple_of(2) { 1.0 } else { 0.0 },
            seed: u64::from(chat ^ number << 8),
            repetition_penalty: 1.2,
            frequency_penalty: 0.3,
            ..SamplingParams::default()
        },
        ..RequestSpec::default()
    }
}

fn stat(engine: &Running, cell: impl Fn(&inflight_engine::MemoryStats) -> u64) -> u64 {
    cell(&engine.handle.stats().memory)
}

fn num_fetched(engine: &Running) -> u64 {
    stat(engine, |memory| memory.num_fetched.load(Ordering::Relaxed))
}

fn num_leaked(engine: &Running) -> u64 {
    stat(engine, |memory| memory.num_leaked_blocks.load(Ordering::Relaxed) as u64)
}

#[test]
fn chats_that_come_back_get_the_same_tokens_with_and_without_the_host() {
    let serve = |config: EngineConfig, at_once: usize| {
        let engine = start(config);
        let turns: Vec<RequestSpec> =
            (0..3).flat_map(|n| (0..NUM_CHATS).map(move |chat| turn(chat, n))).collect();
        let mut outputs: Vec<Output> = Vec::new();
        for some in turns.chunks(at_once) {
            let clients: Vec<Client> =
                some.iter().map(|spec| engine.submit(spec.clone())).collect();
            outputs.extend(clients.into_iter().map(Client::wait));
        }
        let fetched = num_fetched(&engine);
        assert_eq!(num_leaked(&engine), 0);
        engine.stop();
        (outputs, fetched)
    };
    let plain = MemoryConfig { prefix_caching: false, ..MemoryConfig::default() };
    let (expected, _) = serve(EngineConfig { memory: plain, ..config(false) }, 1);
    for overlap in [false, true] {
        for at_once in [1, 5] {
            let (outputs, fetched) = serve(tiered(overlap), at_once);
            assert_eq!(outputs, expected, "overlap {overlap}, {at_once} at once");
            // Two rounds of returning chats; the pool has the last few itself.
            assert!(fetched > 400, "{fetched}");
        }
    }
}

#[test]
fn aborts_during_moves_leak_nothing_and_change_no_neighbour() {
    let engine = start(tiered(true));
    let expected: Vec<Output> =
        (0..NUM_CHATS).map(|chat| engine.submit(turn(chat, 9)).wait()).collect();
    let fetched_before = num_fetched(&engine);
    let mut random = 1u32;
    let mut next = |below: u32| {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (random >> 8) % below
    };
    let (mut num_aborted, mut num_ended) = (0, 0);
    for _ in 0..250 {
        let neighbour = next(NUM_CHATS);
        let kept = engine.submit(turn(neighbour, 9));
        let doomed: Vec<Client> =
            (0..4).map(|_| engine.submit(turn(next(NUM_CHATS), next(50)))).collect();
        for client in &doomed {
            for _ in 0..next(4000) {
                std::hint::spin_loop();
            }
            engine.handle.abort(client.id);
        }
        for client in doomed {
            match client.wait().finish {
                FinishReason::Aborted => num_aborted += 1,
                _ => num_ended += 1,
            }
        }
        assert_eq!(kept.wait(), expected[neighbour as usize]);
    }
    assert!(num_aborted > 900, "{num_aborted} aborted, {num_ended} ended before");
    assert!(num_fetched(&engine) > fetched_before + 500);
    // The figures of the last step, once everything has arrived.
    while engine.handle.num_outstanding() > 0 {
        std::thread::yield_now();
    }
    engine.submit(turn(0, 9)).wait();
    let handle = engine.handle.clone();
    engine.stop();
    let stats = handle.stats();
    assert_eq!(stats.memory.num_leaked_blocks.load(Ordering::Relaxed), 0);
    assert_eq!(stats.num_free_blocks.load(Ordering::Relaxed), 96);
    assert_eq!(stats.num_free_swap_blocks.load(Ordering::Relaxed), 600);
}
