//! Cold prefixes in a file: found after a restart, never used when they are bad.

mod support;

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use inflight_engine::{
    CacheFileOptions, EngineConfig, MemoryConfig, Preemption, RequestSpec, SamplingParams,
};
use support::{Client, Output, Running, VOCAB_SIZE, config, engine};

const NUM_CHATS: u32 = 12;
/// Sixteen full blocks of four.
const PREFIX: u32 = 64;

/// The pool has room for two chats, so that nearly all leave it.
fn tiered(overlap: bool) -> EngineConfig {
    let memory = MemoryConfig {
        num_swap_blocks: 400,
        keeps_cold_prefixes: true,
        max_moved_blocks: 8,
        preemption: Preemption::Swap,
        ..MemoryConfig::default()
    };
    EngineConfig { num_blocks: 40, memory, ..config(overlap) }
}

fn turn(chat: u32) -> RequestSpec {
    let prefix = (0..PREFIX).map(|k| (chat * 37 + k * k * 3 + 11) % VOCAB_SIZE);
    RequestSpec {
        prompt: prefix.chain([chat, 5, 9]).collect(),
        max_tokens: Some(6),
        sampling: SamplingParams {
            temperature: 1.0,
            seed: u64::from(chat),
            frequency_penalty: 0.3,
            ..SamplingParams::default()
        },
        ..RequestSpec::default()
    }
}

/// The path of a file that is gone when the test ends.
struct TestPath(PathBuf);

impl TestPath {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("inflight-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        Self(path)
    }
}

impl Drop for TestPath {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn start(config: EngineConfig, path: &Path, max_bytes: u64) -> Running {
    let (mut engine, handle) = engine(config);
    let content = "the test's model".to_owned();
    engine
        .keep_in_file(&CacheFileOptions { path: path.to_owned(), max_bytes, content })
        .expect("usable");
    Running { handle, thread: std::thread::spawn(|| engine.run()) }
}

/// Serves every chat, some at once; gives their tokens and how many blocks came from the file.
fn serve(engine: Running, at_once: usize) -> (Vec<Output>, u64) {
    let turns: Vec<RequestSpec> = (0..NUM_CHATS).map(turn).collect();
    let mut outputs = Vec::new();
    for some in turns.chunks(at_once) {
        let clients: Vec<Client> = some.iter().map(|spec| engine.submit(spec.clone())).collect();
        outputs.extend(clients.into_iter().map(Client::wait));
    }
    let handle = engine.handle.clone();
    engine.stop();
    let memory = &handle.stats().memory;
    assert_eq!(memory.num_leaked_blocks.load(Ordering::Relaxed), 0);
    (outputs, memory.num_read.load(Ordering::Relaxed))
}

#[test]
fn chats_are_found_after_a_restart() {
    let path = TestPath::new("restart");
    let (expected, num_read) = serve(start(tiered(true), &path.0, 64 << 20), 1);
    assert_eq!(num_read, 0);
    for (overlap, at_once) in [(false, 1), (true, 1), (true, 5)] {
        let (outputs, num_read) = serve(start(tiered(overlap), &path.0, 64 << 20), at_once);
        assert_eq!(outputs, expected, "overlap {overlap}, {at_once} at once");
        // Sixteen blocks of each chat.
        assert!(num_read >= 16 * u64::from(NUM_CHATS), "{num_read}");
    }
}

#[test]
fn so_are_chats_that_never_left_the_pool() {
    let path = TestPath::new("roomy");
    let roomy = || EngineConfig { num_blocks: 1000, ..tiered(true) };
    let (expected, _) = serve(start(roomy(), &path.0, 64 << 20), 1);
    let (outputs, num_read) = serve(start(roomy(), &path.0, 64 << 20), 1);
    assert_eq!(outputs, expected);
    assert_eq!(num_read, 16 * u64::from(NUM_CHATS));
}

#[test]
fn bad_blocks_are_computed_again() {
    let path = TestPath::new("bad");
    let (expected, _) = serve(start(tiered(true), &path.0, 64 << 20), 1);
    let mut bytes = std::fs::read(&path.0).unwrap();
    // A bit of every third page behind the header, be it a slot's header or a block.
    for page in (1..bytes.len() / 4096).step_by(3) {
        bytes[page * 4096 + 500] ^= 4;
    }
    bytes.truncate(bytes.len() - 3000);
    std::fs::write(&path.0, bytes).unwrap();
    let (outputs, num_read) = serve(start(tiered(true), &path.0, 64 << 20), 3);
    assert_eq!(outputs, expected);
    assert!(num_read < 16 * u64::from(NUM_CHATS - 1), "{num_read}: some were bad");
}

#[test]
fn the_file_keeps_to_its_limit() {
    let path = TestPath::new("limit");
    let limit = 200 << 10;
    let (expected, _) = serve(start(tiered(true), &path.0, limit), 1);
    let (outputs, _) = serve(start(tiered(true), &path.0, limit), 4);
    assert_eq!(outputs, expected);
    let length = std::fs::metadata(&path.0).unwrap().len();
    assert!((limit / 2..=limit).contains(&length), "{length}");
}
