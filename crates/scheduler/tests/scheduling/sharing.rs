//! What sequences share: the numbers of blocks worked out by hand.

use inflight_scheduler::{
    Batch, MemoryConfig, MoveCosts, Preemption, Scheduler, SchedulerConfig, SequenceId,
    SequenceSpec,
};

use crate::engine::{Engine, Turn};
use crate::workload::Lengths;

const BLOCK_SIZE: usize = 16;

fn scheduler(max_num_seqs: usize, memory: MemoryConfig) -> Scheduler {
    Scheduler::new(SchedulerConfig {
        other_windows: Vec::new(),
        max_num_seqs,
        max_num_batched_tokens: 8192,
        max_model_len: 8192,
        block_size: BLOCK_SIZE,
        num_blocks: 4096,
        memory,
    })
    .expect("the limits are sound")
}

/// Tokens that all begin with, then tokens of its own.
fn spec(id: u64, prefix_len: u32, own_len: u32) -> SequenceSpec {
    let own = (0..own_len).map(|i| 1_000_000 + 1000 * id as u32 + i);
    let prompt = (0..prefix_len).chain(own).collect();
    SequenceSpec { max_tokens: 8, ..SequenceSpec::new(SequenceId(id), prompt) }
}

/// Plans, launches and collects a batch; every token is 7.
fn step(scheduler: &mut Scheduler) -> Batch {
    let batch = scheduler.plan().expect("somebody needs a row");
    scheduler.advance(&batch);
    scheduler.collect(&batch);
    for row in batch.sampled_rows() {
        scheduler.commit(row.id, 7);
    }
    scheduler.check_integrity().expect("sound after every step");
    batch
}

fn num_used(scheduler: &Scheduler) -> usize {
    scheduler.config().num_blocks - scheduler.num_free_blocks()
}

#[test]
fn sixty_four_requests_take_their_prefix_once() {
    let mut scheduler = scheduler(64, MemoryConfig::default());
    for id in 0..64 {
        scheduler.add(spec(id, 4096, 20)).expect("it fits");
    }
    // All came at once, but one computes for all, who wait a step for it instead of doing the same.
    let first = step(&mut scheduler);
    assert_eq!(
        first.rows.iter().map(|row| (row.id, row.len)).collect::<Vec<_>>(),
        [(SequenceId(0), 4116)]
    );
    let second = step(&mut scheduler);
    assert_eq!(second.rows.len(), 64);
    assert!(second.rows.iter().skip(1).all(|row| (row.start, row.len) == (4096, 20)));
    // 256 blocks of the prefix, and two each for 20 tokens of their own.
    assert_eq!(num_used(&scheduler), 256 + 64 * 2);
    assert_eq!(scheduler.num_cached_tokens(SequenceId(63)), 4096);
}

#[test]
fn two_hundred_and_fifty_six_sequences_share_a_prefix() {
    let mut scheduler = scheduler(256, MemoryConfig::default());
    for id in 0..256 {
        scheduler.add(spec(id, 1000, 3)).expect("it fits");
    }
    let mut num_computed = 0;
    while !scheduler.is_idle() {
        num_computed += step(&mut scheduler).num_tokens;
    }
    // 62 full blocks are found by all but the first; seven of the eight tokens go through again.
    assert_eq!(num_computed, 1003 + 255 * (1003 - 62 * 16) + 256 * 7);
    assert_eq!(num_used(&scheduler), 0);
}

#[test]
fn outputs_of_a_request_copy_what_is_not_full() {
    let memory = MemoryConfig { prefix_caching: false, ..MemoryConfig::default() };
    let mut scheduler = scheduler(64, memory);
    for id in 0..5 {
        let shares_prompt_of = (id > 0).then_some(SequenceId(0));
        let spec = SequenceSpec { id: SequenceId(id), shares_prompt_of, ..spec(0, 0, 1000) };
        scheduler.add(spec).expect("it fits");
    }
    assert_eq!(step(&mut scheduler).num_tokens, 1000);
    let second = step(&mut scheduler);
    // The prompt's last token for each new output, and the next one for the first.
    assert_eq!((second.num_tokens, second.moves.copies.len()), (5, 4));
    // 62 blocks are shared, the last eight tokens lie in a block of each one's own.
    assert_eq!(num_used(&scheduler), 62 + 5);
}

/// Mixed lengths of which the longest needs 60 places.
fn mixed(i: usize) -> Lengths {
    Lengths { family: (i as u64 % 3, 9), ..Lengths::of(1 + i * 7 % 30, 1 + i * 11 % 31) }
}

/// vllm#49675: a pool of 1.1 times one request's need, whatever becomes of who gives way.
#[test]
fn fifty_requests_finish_however_they_give_way() {
    for (preemption, prefix_caching, overlap) in [
        (Preemption::Recompute, false, true),
        (Preemption::Swap, false, false),
        (Preemption::Swap, false, true),
        (Preemption::Swap, true, true),
        (Preemption::Recompute, true, true),
    ] {
        let config = SchedulerConfig {
            other_windows: Vec::new(),
            max_num_seqs: 16,
            max_num_batched_tokens: 32,
            max_model_len: 61,
            block_size: 4,
            // 60 places are 15 blocks, and a tenth more.
            num_blocks: 17,
            memory: MemoryConfig {
                prefix_caching,
                preemption,
                num_swap_blocks: 64,
                keeps_cold_prefixes: false,
                max_moved_blocks: 4,
            },
        };
        let mut engine = Engine::new(config, overlap);
        engine.run(&[Turn { adds: (0..50).map(mixed).collect(), aborts: Vec::new() }]);
        assert_eq!(engine.records.len(), 50);
        assert!(engine.scheduler.num_preemptions() > 0, "the test is meant to preempt");
        let swaps = engine.scheduler.num_swaps();
        assert_eq!(swaps > 0, preemption == Preemption::Swap);
    }
}

#[test]
fn auto_goes_by_what_was_measured() {
    let swaps = |costs: Option<MoveCosts>| {
        let config = SchedulerConfig {
            other_windows: Vec::new(),
            max_num_seqs: 16,
            max_num_batched_tokens: 32,
            max_model_len: 61,
            block_size: 4,
            num_blocks: 17,
            memory: MemoryConfig {
                prefix_caching: false,
                preemption: Preemption::Auto,
                num_swap_blocks: 64,
                keeps_cold_prefixes: false,
                max_moved_blocks: 4,
            },
        };
        let mut engine = Engine::new(config, true);
        costs.into_iter().for_each(|costs| engine.scheduler.set_costs(costs));
        engine.run(&[Turn { adds: (0..50).map(mixed).collect(), aborts: Vec::new() }]);
        assert!(engine.scheduler.num_preemptions() > 0);
        engine.scheduler.num_swaps()
    };
    let costs = MoveCosts { token_ns: 1000, swap_out_ns: 100, swap_in_ns: 100 };
    assert!(swaps(Some(costs)) > 0);
    assert_eq!(swaps(Some(MoveCosts { token_ns: 10, ..costs })), 0);
    assert_eq!(swaps(None), 0, "not before anything was measured");
}
