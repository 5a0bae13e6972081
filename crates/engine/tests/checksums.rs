//! Checksums of the KV cache's blocks: where nothing is wrong, nothing is found, and no token
//! changes. That they find what is wrong, the simulator's tests show.

mod support;

use inflight_engine::{EngineConfig, KvKeep, KvWindow, MemoryConfig, Preemption, RequestSpec};
use support::{Running, config, engine};

/// Twelve requests that begin alike; some keep but a window, some a part of the prompt.
fn requests() -> Vec<RequestSpec> {
    let request = |i: u32| RequestSpec {
        prompt: (0..70 + i).map(|k| (k * 7 + if k < 40 { 0 } else { 31 * i }) % 250).collect(),
        max_tokens: Some(30),
        kv_keep: match i % 4 {
            0 => Some(KvKeep::Latest(KvWindow { num_sinks: 4, window: 32 })),
            1 => Some(KvKeep::Attended(40)),
            _ => None,
        },
        ..RequestSpec::default()
    };
    (0..12).map(request).collect()
}

/// What requests give that come twice: the second time what is left of the first is used.
fn serve(config: EngineConfig, checks_blocks: bool) -> Vec<Vec<u32>> {
    let (mut engine, handle) = engine(config);
    if checks_blocks {
        engine.check_blocks().expect("CPUs can");
    }
    let running = Running { handle, thread: std::thread::spawn(|| engine.run()) };
    let mut tokens = Vec::new();
    for _ in 0..2 {
        let clients: Vec<_> = requests().into_iter().map(|spec| running.submit(spec)).collect();
        tokens.extend(clients.into_iter().map(|client| client.wait().ids()));
    }
    running.stop();
    tokens
}

#[test]
fn blocks_that_are_used_again_or_come_back_are_what_they_were() {
    let plain = |overlap| EngineConfig { max_num_batched_tokens: 80, ..config(overlap) };
    let expected = serve(plain(true), false);
    for overlap in [false, true] {
        let memory = MemoryConfig {
            preemption: Preemption::Swap,
            num_swap_blocks: 200,
            keeps_cold_prefixes: true,
            ..MemoryConfig::default()
        };
        let small = EngineConfig { num_blocks: 90, memory, ..plain(overlap) };
        for config in [plain(overlap), small] {
            assert_eq!(serve(config, true), expected, "overlap {overlap}");
        }
    }
}
