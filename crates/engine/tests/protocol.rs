//! The two-slot protocol under model checking: the real engine, streams and events, in schedules
//! that shuttle makes up.
//!
//! With every wait in place no schedule gives other tokens than the loop without overlap. With any
//! one wait removed some schedule does, or is caught using a buffer that another stream is using.
//! Some of the requests are under a grammar, so that batches are sampled late.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail as tests do")]

mod grammars;
mod saboteur;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::{
        Arc, Mutex,
        mpsc::{SyncSender, sync_channel},
    },
};

use grammars::Odd;
use inflight_backend::{CpuBackend, CpuConfig};
use inflight_engine::{
    Engine, EngineConfig, KvKeep, MemoryConfig, Preemption, RequestSpec, SamplingParams,
    SinkClosed, TokenSink, Update,
};
use inflight_model::{Decoder, ModelFiles};
use saboteur::{Saboteur, Wait};
use shuttle::{
    Runner,
    scheduler::{PctScheduler, RandomScheduler, Scheduler},
};

const SEED: u64 = 7;
/// Schedules in which every thread is as likely to go on as any other.
const NUM_RANDOM_SCHEDULES: usize = 2000;
/// Schedules in which some threads go before others whenever they can, so that a stream may be late
/// by a whole forward pass; and how often that order changes.
const NUM_ORDERED_SCHEDULES: usize = 500;
const NUM_CHANGES: usize = 3;

struct Tokens(SyncSender<u32>);

impl TokenSink for Tokens {
    fn send(&mut self, update: Update) -> Result<(), SinkClosed> {
        match update {
            Update::Token(update) => self.0.try_send(update.token).map_err(|_| SinkClosed),
            Update::Prompt(_) | Update::Finished(_) => Ok(()),
        }
    }
}

fn requests() -> Vec<RequestSpec> {
    let request = |i: u32| RequestSpec {
        prompt: (0..3 + 5 * i).map(|k| 17 * i + k).collect(),
        max_tokens: Some(6 - i as usize),
        sampling: SamplingParams {
            temperature: i as f32,
            seed: u64::from(i),
            presence_penalty: 0.5,
            ..SamplingParams::default()
        },
        grammar: (i != 1).then(|| Odd::grammar(i, None)),
        ..RequestSpec::default()
    };
    (0..3).map(request).collect()
}

/// What is served, and in how much memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Load {
    /// Everything fits.
    Roomy,
    /// Sequences give way to each other by way of the host: the newest moves there before the
    /// others need its blocks, and comes back into those that the first one has just left.
    Swapping,
}

impl Load {
    fn num_blocks(self) -> usize {
        if self == Self::Roomy { 32 } else { 9 }
    }

    fn memory(self) -> MemoryConfig {
        match self {
            Self::Roomy => MemoryConfig::default(),
            Self::Swapping => MemoryConfig {
                prefix_caching: false,
                preemption: Preemption::Swap,
                num_swap_blocks: 8,
                keeps_cold_prefixes: false,
                max_moved_blocks: 8,
            },
        }
    }

    fn requests(self) -> Vec<RequestSpec> {
        if self == Self::Roomy {
            return requests();
        }
        let request = |i: u32| RequestSpec {
            prompt: (0..7 + i).map(|k| 17 * i + k).collect(),
            max_tokens: Some(14 + 4 * i as usize),
            sampling: SamplingParams {
                temperature: 1.0,
                seed: u64::from(i),
                presence_penalty: 0.5,
                ..SamplingParams::default()
            },
            ..RequestSpec::default()
        };
        (0..2).map(request).collect()
    }
}

/// Serves the requests in one schedule and gives their tokens.
fn serve(load: Load, overlap: bool, removed: Option<Wait>) -> Vec<Vec<u32>> {
    let config = EngineConfig {
        overlap,
        max_num_seqs: 4,
        max_num_batched_tokens: 8,
        max_model_len: 32,
        block_size: 4,
        num_blocks: load.num_blocks(),
        memory: load.memory(),
        max_outstanding: 8,
        kv_keep: KvKeep::All,
    };
    let cpu = CpuBackend::new(CpuConfig { num_threads: 1, ..CpuConfig::detect() }).unwrap();
    let backend = Saboteur::new(cpu, removed);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/qwen3");
    let files = ModelFiles::open(&folder).unwrap();
    let decoder = Decoder::load(&backend, &files.config, &files.weights, 32, &mut |_| {}).unwrap();
    let (engine, handle) = Engine::new(backend, decoder, config).unwrap();
    let submit = |spec| {
        let (sender, tokens) = sync_channel(64);
        let request = handle.limits().validate(spec).unwrap();
        handle.submit(request, Box::new(Tokens(sender))).unwrap();
        tokens
    };
    let clients: Vec<_> = load.requests().into_iter().map(submit).collect();
    handle.drain();
    engine.run().unwrap();
    let num_swaps = handle.stats().num_swaps.load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!(num_swaps > 0, load == Load::Swapping);
    clients.iter().map(|tokens| tokens.try_iter().collect()).collect()
}

/// What the loop without overlap gives.
fn expected(load: Load) -> Vec<Vec<u32>> {
    let tokens = Arc::new(Mutex::new(Vec::new()));
    let result = Arc::clone(&tokens);
    let scheduler = RandomScheduler::new_from_seed(SEED, 1);
    run_schedules(scheduler, move || *result.lock().unwrap() = serve(load, false, None));
    let tokens = std::mem::take(&mut *tokens.lock().unwrap());
    let lengths: Vec<_> = tokens.iter().map(Vec::len).collect();
    let max_tokens = load.requests().into_iter().filter_map(|request| request.max_tokens);
    assert_eq!(lengths, max_tokens.collect::<Vec<_>>());
    tokens
}

fn check_schedules(load: Load, removed: Option<Wait>, expected: &[Vec<u32>]) {
    let expected = Arc::new(expected.to_vec());
    let check = move || assert_eq!(serve(load, true, removed), *expected);
    // Runs that swap are four times as long.
    let fewer = if load == Load::Swapping { 4 } else { 1 };
    let random = RandomScheduler::new_from_seed(SEED, NUM_RANDOM_SCHEDULES / fewer);
    run_schedules(random, check.clone());
    let ordered = NUM_ORDERED_SCHEDULES / fewer;
    run_schedules(PctScheduler::new_from_seed(SEED, NUM_CHANGES, ordered), check);
}

/// The same schedules every time.
fn run_schedules(scheduler: impl Scheduler + 'static, run: impl Fn() + Send + Sync + 'static) {
    let mut config = shuttle::Config::default();
    // An engine is larger than the stacks that threads get otherwise.
    config.stack_size = 1 << 20;
    Runner::new(scheduler, config).run(run);
}

#[test]
fn no_schedule_changes_a_token() {
    check_schedules(Load::Roomy, None, &expected(Load::Roomy));
}

#[test]
fn no_schedule_changes_a_token_that_was_swapped() {
    check_schedules(Load::Swapping, None, &expected(Load::Swapping));
}

fn check_needed(load: Load, waits: &[Wait]) {
    let expected = expected(load);
    for &wait in waits {
        let check = || check_schedules(load, Some(wait), &expected);
        let found = catch_unwind(AssertUnwindSafe(check));
        assert!(found.is_err(), "nothing went wrong without {wait:?}");
    }
}

#[test]
fn every_wait_is_needed() {
    let waits = [Wait::ComputeForH2d, Wait::ComputeForLate, Wait::D2hForCompute, Wait::HostForD2h];
    check_needed(Load::Roomy, &waits);
}

#[test]
fn every_wait_is_needed_for_swaps() {
    let waits = [Wait::H2dForCompute, Wait::ComputeForH2d, Wait::D2hForCompute, Wait::HostForD2h];
    check_needed(Load::Swapping, &waits);
}
