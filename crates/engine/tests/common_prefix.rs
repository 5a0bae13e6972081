//! Many requests that begin alike: the beginning is in memory once, and changes no token.

mod support;

use std::sync::atomic::Ordering;

use inflight_engine::{EngineConfig, MemoryConfig, RequestSpec, SamplingParams};
use support::{Client, Output, VOCAB_SIZE, config, start, submit_outputs};

const NUM_REQUESTS: u32 = 64;
const PREFIX: u32 = 4096;
const BLOCK_SIZE: usize = 16;
const PREFIX_BLOCKS: usize = PREFIX as usize / BLOCK_SIZE;

/// The common beginning, then `own` tokens of the request's own.
fn request(i: u32, own: u32, max_tokens: usize) -> RequestSpec {
    let prefix = (0..PREFIX).map(|k| (k * k * 5 + k * 31 + 3) % VOCAB_SIZE);
    let own = (0..own).map(|k| (i * 53 + k * 11 + 7) % VOCAB_SIZE);
    RequestSpec {
        prompt: prefix.chain(own).collect(),
        max_tokens: Some(max_tokens),
        sampling: SamplingParams {
            temperature: 1.0,
            seed: u64::from(i),
            ..SamplingParams::default()
        },
        ..RequestSpec::default()
    }
}

fn pool(num_blocks: usize, overlap: bool, prefix_caching: bool) -> EngineConfig {
    EngineConfig {
        max_num_seqs: NUM_REQUESTS as usize,
        max_num_batched_tokens: 1024,
        max_model_len: PREFIX as usize + 64,
        block_size: BLOCK_SIZE,
        num_blocks,
        memory: MemoryConfig { prefix_caching, ..MemoryConfig::default() },
        ..config(overlap)
    }
}

/// Serves requests in a pool of just so many blocks; all must run at the same time.
fn serve(config: EngineConfig, specs: Vec<RequestSpec>, is_one_request: bool) -> Vec<Output> {
    let num_blocks = config.num_blocks;
    let engine = start(config);
    let clients: Vec<Client> = if is_one_request {
        submit_outputs(&engine.handle, specs)
    } else {
        specs.into_iter().map(|spec| engine.submit(spec)).collect()
    };
    let stats = engine.handle.stats();
    let (mut most_running, mut most_held) = (0, 0);
    while engine.handle.num_outstanding() > 0 {
        most_running = most_running.max(stats.num_running.load(Ordering::Relaxed));
        let free = stats.num_free_blocks.load(Ordering::Relaxed);
        most_held = most_held.max(num_blocks - free.min(num_blocks));
        std::thread::yield_now();
    }
    let outputs = clients.into_iter().map(Client::wait).collect();
    assert_eq!((most_running, most_held), (NUM_REQUESTS as usize, num_blocks));
    assert_eq!(stats.num_preemptions.load(Ordering::Relaxed), 0);
    assert_eq!(stats.memory.num_leaked_blocks.load(Ordering::Relaxed), 0);
    engine.stop();
    outputs
}

/// Each request alone, nothing shared.
fn alone(specs: impl Iterator<Item = RequestSpec>) -> Vec<Output> {
    let engine = start(pool(PREFIX_BLOCKS + 4, false, false));
    let outputs = specs.map(|spec| engine.submit(spec).wait()).collect();
    engine.stop();
    outputs
}

/// 17 tokens and 14 generated ones, the last of which is no input: two blocks of 16 each. Unshared,
/// 64 requests would take 64 * 258 = 16,512 blocks; shared they take 256 + 64 * 2.
#[test]
fn a_common_prefix_is_in_memory_once() {
    let specs = || (0..NUM_REQUESTS).map(|i| request(i, 17, 14));
    let expected = alone(specs().step_by(9));
    for overlap in [false, true] {
        let config = pool(PREFIX_BLOCKS + NUM_REQUESTS as usize * 2, overlap, true);
        let outputs = serve(config, specs().collect(), false);
        assert!(outputs.iter().step_by(9).eq(&expected), "overlap {overlap}");
    }
}

/// Outputs of one request share its prompt's full blocks and copy the last, partly filled one: 8
/// tokens, and 8 generated ones, in one block each.
#[test]
fn outputs_copy_only_the_block_that_they_write_to() {
    let specs = || {
        (0..NUM_REQUESTS)
            .map(|i| RequestSpec { sampling: request(i, 0, 1).sampling, ..request(0, 8, 8) })
    };
    let expected = alone(specs().step_by(9));
    for prefix_caching in [false, true] {
        let config = pool(PREFIX_BLOCKS + NUM_REQUESTS as usize, true, prefix_caching);
        let outputs = serve(config, specs().collect(), true);
        assert!(outputs.iter().step_by(9).eq(&expected), "prefix caching {prefix_caching}");
    }
}
