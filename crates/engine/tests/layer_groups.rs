//! Models whose layers look back differently far: tokens are those of transformers' logits whatever
//! the schedule, and of each group only what it sees takes blocks.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail as tests do")]

mod support;

use std::path::Path;
use std::sync::atomic::Ordering;

use inflight_backend::{CpuBackend, CpuConfig, KvDtype, WeightPrecision};
use inflight_engine::{
    CacheFileOptions, Engine, EngineConfig, EngineHandle, KvKeep, KvWindow, MemoryConfig,
    Preemption, RequestSpec,
};
use inflight_model::{Decoder, LayerGroups, ModelFiles, eval::logits_from};
use support::{Client, Running, config, submit, submit_outputs};

/// One layer sees everything, three see 12 tokens: four groups. Two layers and three that see 9
/// tokens: five groups. Two and five that see 10 and rotate otherwise: seven groups. That their
/// logits are those of transformers, other tests say
/// (`crates/model/tests/families.rs`).
const MODELS: [&str; 3] = ["qwen2_mixed", "qwen3_mixed", "gemma3"];

fn files(model: &str) -> ModelFiles {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    ModelFiles::open(&fixtures.join(model)).unwrap()
}

fn decoder(model: &str) -> (CpuBackend, Decoder<CpuBackend>) {
    let (kv_dtype, weights) = (KvDtype::F32, WeightPrecision::F32);
    let config = CpuConfig { kv_dtype, weights, num_threads: 1, ..CpuConfig::detect() };
    let (backend, files) = (CpuBackend::new(config).unwrap(), files(model));
    let decoder = Decoder::load(&backend, &files.config, &files.weights, 256, &mut |_| {});
    (backend, decoder.unwrap())
}

fn engine(model: &str, config: EngineConfig) -> (Engine<CpuBackend>, EngineHandle) {
    let (backend, decoder) = decoder(model);
    Engine::new(backend, decoder, EngineConfig { max_model_len: 256, ..config }).unwrap()
}

fn start(model: &str, config: EngineConfig) -> Running {
    let (engine, handle) = engine(model, config);
    Running { handle, thread: std::thread::spawn(|| engine.run()) }
}

/// Greedy requests of which some begin alike; prompts are shorter and longer than the windows.
fn requests() -> Vec<RequestSpec> {
    let request = |i: u32| RequestSpec {
        prompt: (0..3 + 19 * i).map(|j| ((i / 2) * 31 + j * 7) % 200).collect(),
        max_tokens: Some(70),
        ..RequestSpec::default()
    };
    (0..6).map(request).collect()
}

/// What the model says after a request's prompt, by passes over the whole text.
fn greedy(model: &str, spec: &RequestSpec) -> Vec<u32> {
    let (backend, decoder) = decoder(model);
    let mut tokens = spec.prompt.clone();
    for _ in 0..spec.max_tokens.unwrap() {
        let logits = logits_from(&backend, &decoder, &tokens, tokens.len() - 1, 64).unwrap();
        let ids = 0..logits.len();
        // The lowest of equal ones.
        let best = ids.rev().max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
        tokens.push(best as u32);
    }
    tokens.split_off(spec.prompt.len())
}

/// Cold prefixes are kept on the host, and all that is found there is moved.
fn tiered() -> MemoryConfig {
    MemoryConfig {
        preemption: Preemption::Swap,
        num_swap_blocks: 2000,
        keeps_cold_prefixes: true,
        max_moved_blocks: 9,
        ..MemoryConfig::default()
    }
}

fn outputs(clients: Vec<Client>) -> Vec<Vec<u32>> {
    clients.into_iter().map(|client| client.wait().ids()).collect()
}

#[test]
fn every_schedule_gives_the_tokens_of_whole_passes() {
    let plain = MemoryConfig { prefix_caching: false, ..MemoryConfig::default() };
    let swap = MemoryConfig {
        preemption: Preemption::Swap,
        num_swap_blocks: 300,
        max_moved_blocks: 4,
        ..MemoryConfig::default()
    };
    for (model, small) in MODELS.into_iter().zip([130, 160, 190]) {
        let specs = requests();
        let expected: Vec<_> = specs.iter().map(|spec| greedy(model, spec)).collect();
        let mut num_preemptions = 0;
        let (mut num_swaps, mut num_fetched) = (0, 0);
        for overlap in [false, true] {
            for (num_blocks, memory) in [
                (1000, plain.clone()),
                (1000, MemoryConfig::default()),
                (small, plain.clone()),
                (small, MemoryConfig::default()),
                (small, swap.clone()),
                (small, tiered()),
            ] {
                let config = EngineConfig { num_blocks, memory, ..config(overlap) };
                let engine = start(model, config.clone());
                for round in 0..2 {
                    let clients = specs.iter().map(|spec| engine.submit(spec.clone())).collect();
                    assert_eq!(outputs(clients), expected, "{model}, {config:?}, round {round}");
                }
                let handle = engine.handle.clone();
                engine.stop();
                let stats = handle.stats();
                assert_eq!(stats.memory.num_leaked_blocks.load(Ordering::Relaxed), 0);
                num_preemptions += stats.num_preemptions.load(Ordering::Relaxed);
                num_swaps += stats.num_swaps.load(Ordering::Relaxed);
                num_fetched += stats.memory.num_fetched.load(Ordering::Relaxed);
            }
        }
        let counts = [num_preemptions, num_swaps, num_fetched];
        assert!(counts.iter().all(|count| *count > 0), "{model}: {counts:?}");
    }
}

/// The group that sees everything grows by a block every four tokens; the others keep what the next
/// token sees, twelve tokens, and what shares blocks with them.
#[test]
fn windows_take_as_much_however_long_a_stream_is() {
    let memory = MemoryConfig { prefix_caching: false, ..MemoryConfig::default() };
    let config = EngineConfig { num_blocks: 100, memory, ..config(false) };
    let (mut engine, handle) = engine("qwen2_mixed", config);
    let groups = LayerGroups::new(&files("qwen2_mixed").config);
    assert_eq!((groups.num_groups(), groups.width()), (4, 1));
    let spec = RequestSpec {
        prompt: vec![3, 1, 4, 1, 5],
        max_tokens: Some(180),
        ..RequestSpec::default()
    };
    let client = submit(&handle, spec);
    let mut most_of_windows = 0;
    // After each step but the last one, which gives all back.
    for num_computed in 5..184_usize {
        engine.step().unwrap();
        let num_used = 100 - handle.stats().num_free_blocks.load(Ordering::Relaxed);
        // The row began where the prompt or the token before ended.
        let start = if num_computed == 5 { 0 } else { num_computed - 1 };
        let num_dropped = (start + 1).saturating_sub(12) / 4 * 4;
        let of_window = (num_computed - num_dropped).div_ceil(4);
        assert_eq!(num_used, num_computed.div_ceil(4) + 3 * of_window, "{num_computed} tokens");
        most_of_windows = most_of_windows.max(of_window);
    }
    engine.step().unwrap();
    assert_eq!(client.wait().ids().len(), 180);
    assert_eq!(most_of_windows, 4, "12 tokens lie in four blocks of four at most");
}

#[test]
fn a_prompt_that_was_computed_is_found_in_all_groups() {
    for (model, overlap) in MODELS.into_iter().zip([false, true, true]) {
        let engine = start(model, config(overlap));
        let first = RequestSpec { max_tokens: Some(30), ..requests()[5].clone() };
        let (before, num_found) = engine.submit(first.clone()).wait_and_count();
        assert_eq!(num_found, 0);
        // A chat that goes on: all but the answer's last tokens is there.
        let mut prompt = first.prompt.clone();
        prompt.extend(before.ids());
        prompt.extend([9, 8, 7]);
        let next = RequestSpec { prompt, ..first.clone() };
        let expected = greedy(model, &next);
        let (after, num_found) = engine.submit(next).wait_and_count();
        assert_eq!(after.ids(), expected);
        // 98 tokens and 30, of which the last has no keys: 31 blocks of four are full.
        assert_eq!(num_found, 124);
        engine.stop();
    }
}

/// Other chats have taken all blocks since; a chat that goes on begins with what the host has, and
/// after a restart with what a file has.
#[test]
fn a_chat_comes_back_from_the_host_and_from_a_file() {
    for ((model, overlap), num_blocks) in
        MODELS.into_iter().zip([false, true, true]).zip([130, 160, 190])
    {
        let name = format!("inflight-{}-groups-{model}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let config = EngineConfig { num_blocks, memory: tiered(), ..config(overlap) };
        let start = || {
            let (mut engine, handle) = engine(model, config.clone());
            let file = CacheFileOptions {
                path: path.clone(),
                max_bytes: 64 << 20,
                content: model.to_owned(),
            };
            engine.keep_in_file(&file).unwrap();
            Running { handle, thread: std::thread::spawn(|| engine.run()) }
        };
        let engine = start();
        let first = RequestSpec { max_tokens: Some(30), ..requests()[5].clone() };
        let mut prompt = first.prompt.clone();
        prompt.extend(engine.submit(first.clone()).wait().ids());
        prompt.extend([9, 8, 7]);
        let next = RequestSpec { prompt, ..first };
        let expected = greedy(model, &next);
        for other in 1..6 {
            let prompt = (0..150).map(|i| (i * other + other) % 200).collect();
            let other = RequestSpec { prompt, max_tokens: Some(9), ..RequestSpec::default() };
            engine.submit(other).wait();
        }
        // Its 128 tokens are 31 full blocks that all groups' last windows are there for.
        let (after, num_found) = engine.submit(next.clone()).wait_and_count();
        assert_eq!((after.ids(), num_found), (expected.clone(), 124), "{model}");
        let handle = engine.handle.clone();
        engine.stop();
        let memory = &handle.stats().memory;
        assert!(memory.num_fetched.load(Ordering::Relaxed) > 31);
        assert_eq!(memory.num_leaked_blocks.load(Ordering::Relaxed), 0);

        let engine = start();
        let (again, num_found) = engine.submit(next).wait_and_count();
        assert_eq!((again.ids(), num_found), (expected, 128), "{model}");
        let handle = engine.handle.clone();
        engine.stop();
        std::fs::remove_file(&path).unwrap();
        assert!(handle.stats().memory.num_read.load(Ordering::Relaxed) > 31);
    }
}

#[test]
fn outputs_of_one_request_share_its_prompt() {
    for model in MODELS {
        let memory = MemoryConfig { prefix_caching: false, ..MemoryConfig::default() };
        let engine = start(model, EngineConfig { memory, ..config(true) });
        // Longer than any window; of no group a block goes with its last token.
        let mut spec = requests()[4].clone();
        spec.prompt.truncate(62);
        let expected = greedy(model, &spec);
        let clients = submit_outputs(&engine.handle, vec![spec; 4]);
        let outputs: Vec<_> = clients.into_iter().map(Client::wait_and_count).collect();
        assert!(outputs.iter().all(|(output, _)| output.ids() == expected));
        let num_shared: Vec<usize> = outputs.iter().map(|(_, shared)| *shared).collect();
        assert_eq!(num_shared, [0, 61, 61, 61]);
        engine.stop();
    }
}

#[test]
fn sinks_and_a_window_by_choice_hold_for_all_groups() {
    let keep = |window| Some(KvKeep::Latest(KvWindow { num_sinks: 4, window }));
    let memory = MemoryConfig { prefix_caching: false, ..MemoryConfig::default() };
    let mut tokens = Vec::new();
    for (overlap, num_blocks) in [(false, 400), (true, 400), (true, 30)] {
        let config = EngineConfig { num_blocks, memory: memory.clone(), ..config(overlap) };
        let engine = start("qwen2_mixed", config);
        let spec = RequestSpec { kv_keep: keep(8), ..requests()[3].clone() };
        let refused = RequestSpec { kv_keep: keep(12), ..spec.clone() };
        let reason = engine.handle.limits().validate(refused).unwrap_err().reason;
        assert!(reason.contains("more than the model's own window"), "{reason}");
        let clients = vec![engine.submit(spec.clone()), engine.submit(spec)];
        tokens.extend(outputs(clients));
        engine.stop();
    }
    assert!(tokens.iter().all(|output| *output == tokens[0] && output.len() == 70));
}
