//! The cases worth a name, each with the numbers worked out by hand.

use inflight_scheduler::{
    AdmissionError, Batch, Batching, Commit, FinishReason, MemoryConfig, Policy, Preemption,
    RowInputs, Scheduler, SchedulerConfig, SequenceId, SequenceSpec, StateSlot,
};

use crate::engine::{Engine, Moment, Turn};
use crate::workload::Lengths;

const A: SequenceId = SequenceId(0);
const B: SequenceId = SequenceId(1);
const C: SequenceId = SequenceId(2);

/// Neither prefixes nor preempted sequences are kept.
const MEMORY: MemoryConfig = MemoryConfig {
    prefix_caching: false,
    preemption: Preemption::Recompute,
    num_swap_blocks: 0,
    keeps_cold_prefixes: false,
    max_moved_blocks: 0,
};

fn scheduler(max_num_batched_tokens: usize, block_size: usize, num_blocks: usize) -> Scheduler {
    Scheduler::new(SchedulerConfig {
        other_windows: Vec::new(),
        max_num_seqs: 4,
        max_num_batched_tokens,
        max_model_len: 100,
        block_size,
        num_blocks,
        memory: MEMORY,
    })
    .expect("the limits are sound")
}

/// A sequence with the prompt 100, 101, ... that stops at token 7.
fn spec(id: SequenceId, prompt_len: u32, max_tokens: usize) -> SequenceSpec {
    let prompt = (100..100 + prompt_len).collect();
    SequenceSpec { max_tokens, stop_token_ids: vec![7], ..SequenceSpec::new(id, prompt) }
}

/// Adds a sequence that fits.
fn add(scheduler: &mut Scheduler, id: SequenceId, prompt_len: u32, max_tokens: usize) {
    scheduler.add(spec(id, prompt_len, max_tokens)).expect("it fits");
}

/// Plans a batch and launches it.
fn launch(scheduler: &mut Scheduler) -> Batch {
    let batch = scheduler.plan().expect("somebody needs a row");
    scheduler.advance(&batch);
    scheduler.check_integrity().expect("sound after every launch");
    batch
}

/// Who has which positions in a batch, and whether a token comes of it.
fn rows(batch: &Batch) -> Vec<(SequenceId, std::ops::Range<usize>, bool)> {
    batch.rows.iter().map(|row| (row.id, row.start..row.context_len, row.samples)).collect()
}

#[test]
fn chunks_fill_what_decodes_leave_of_the_budget() {
    let mut scheduler = scheduler(8, 4, 100);
    add(&mut scheduler, A, 3, 10);
    add(&mut scheduler, B, 10, 10);
    add(&mut scheduler, C, 6, 10);
    let first = launch(&mut scheduler);
    assert_eq!(rows(&first), [(A, 0..3, true), (B, 0..5, false)]);
    assert!(first.rows.iter().all(|row| row.fresh && row.inputs == RowInputs::Known));
    // A's token is on the device; C gets the two tokens that are left and reserves all its blocks.
    let second = launch(&mut scheduler);
    assert_eq!(rows(&second), [(A, 3..4, true), (B, 5..10, true), (C, 0..2, false)]);
    assert_eq!(second.num_tokens, 8);
    let inputs: Vec<RowInputs> = second.rows.iter().map(|row| row.inputs).collect();
    assert_eq!(inputs, [RowInputs::Pending, RowInputs::Known, RowInputs::Known]);
    let fresh: Vec<bool> = second.rows.iter().map(|row| row.fresh).collect();
    assert_eq!(fresh, [false, false, true]);
    let slots: Vec<StateSlot> = second.rows.iter().map(|row| row.state_slot).collect();
    assert_eq!(slots, [StateSlot(0), StateSlot(1), StateSlot(2)]);
    assert_eq!(scheduler.block_tables(C).first().blocks().len(), 2);
    assert_eq!(scheduler.num_free_blocks(), 100 - 1 - 3 - 2);
    scheduler.commit(A, 1).expect("A runs");
    let third = launch(&mut scheduler);
    assert_eq!(rows(&third), [(A, 4..5, true), (B, 10..11, true), (C, 2..6, true)]);
}

#[test]
fn a_decode_is_known_once_its_token_is_committed() {
    let mut scheduler = scheduler(8, 4, 100);
    add(&mut scheduler, A, 3, 10);
    launch(&mut scheduler);
    let commit = scheduler.commit(A, 42);
    let expected = Commit { token: 42, finish: None, num_generated: 1, prompt_len: 3 };
    assert_eq!(commit, Some(expected));
    let batch = launch(&mut scheduler);
    assert_eq!((batch.rows[0].start, batch.rows[0].inputs), (3, RowInputs::Known));
    assert_eq!(scheduler.tokens(A), [100, 101, 102, 42]);
}

/// Two sequences of three tokens in six blocks of two places. Both fit until both need a fourth
/// block for position 6; the newer one then gives way, while its token for that position is in
/// flight.
fn preempt_with_a_token_in_flight() -> Scheduler {
    let mut scheduler = scheduler(8, 2, 6);
    add(&mut scheduler, A, 3, 6);
    add(&mut scheduler, B, 3, 6);
    assert_eq!(rows(&launch(&mut scheduler)), [(A, 0..3, true), (B, 0..3, true)]);
    for position in 3..6 {
        let batch = launch(&mut scheduler);
        let decodes = [A, B].map(|id| (id, position..position + 1, true));
        assert_eq!(rows(&batch), decodes);
        for id in [A, B] {
            assert!(scheduler.commit(id, 1).is_some());
        }
    }
    assert_eq!((scheduler.num_free_blocks(), scheduler.num_preemptions()), (0, 0));
    assert_eq!(rows(&launch(&mut scheduler)), [(A, 6..7, true)]);
    assert_eq!((scheduler.num_preemptions(), scheduler.num_waiting()), (1, 1));
    assert_eq!(scheduler.block_tables(B).first().blocks(), []);
    scheduler
}

#[test]
fn a_token_in_flight_commits_to_its_preempted_sequence() {
    let mut scheduler = preempt_with_a_token_in_flight();
    assert_eq!(scheduler.commit(A, 1).map(|commit| commit.num_generated), Some(4));
    let commit = scheduler.commit(B, 55).expect("a preempted sequence takes its token");
    assert_eq!((commit.num_generated, commit.finish), (4, None));
    assert_eq!(scheduler.tokens(B), [100, 101, 102, 1, 1, 1, 55]);
    // B needs four blocks for its seven tokens and one is free: it waits until A has ended.
    assert_eq!(rows(&launch(&mut scheduler)), [(A, 7..8, true)]);
    assert_eq!(scheduler.commit(A, 1).map(|commit| commit.finish), Some(None));
    let commit = scheduler.commit(A, 1).expect("A ends with its sixth token");
    assert_eq!((commit.num_generated, commit.finish), (6, Some(FinishReason::Length)));
    let batch = launch(&mut scheduler);
    assert_eq!(rows(&batch), [(B, 0..7, true)]);
    assert!(batch.rows[0].fresh && batch.rows[0].inputs == RowInputs::Known);
    assert_eq!(batch.rows[0].prompt_len, 3);
}

#[test]
fn a_preempted_sequence_is_not_planned_before_its_token_is_committed() {
    let mut scheduler = preempt_with_a_token_in_flight();
    // A goes, all blocks are free, but nobody on the host knows B's last token yet.
    assert!(scheduler.abort(A));
    assert_eq!(scheduler.num_free_blocks(), 6);
    assert_eq!(scheduler.plan(), None);
    assert!(scheduler.commit(B, 55).is_some());
    assert_eq!(rows(&launch(&mut scheduler)), [(B, 0..7, true)]);
}

#[test]
fn a_token_in_flight_may_end_its_preempted_sequence() {
    let mut scheduler = preempt_with_a_token_in_flight();
    let commit = scheduler.commit(B, 7).expect("a preempted sequence takes its token");
    assert_eq!(commit.finish, Some(FinishReason::Stop { token: 7 }));
    assert_eq!((scheduler.num_waiting(), scheduler.has_sequence(B)), (0, false));
    assert_eq!(scheduler.check_integrity(), Ok(()));
}

#[test]
fn a_stop_token_costs_one_stray_row() {
    let mut scheduler = scheduler(8, 4, 100);
    add(&mut scheduler, A, 3, 10);
    launch(&mut scheduler);
    launch(&mut scheduler);
    let commit = scheduler.commit(A, 7).expect("A runs");
    assert_eq!(commit.finish, Some(FinishReason::Stop { token: 7 }));
    assert_eq!((scheduler.num_free_blocks(), scheduler.is_idle()), (100, true));
    assert_eq!(scheduler.commit(A, 3), None);
}

#[test]
fn a_length_limit_costs_nothing_and_frees_at_the_launch() {
    let mut scheduler = scheduler(8, 4, 1);
    add(&mut scheduler, A, 4, 1);
    add(&mut scheduler, B, 4, 1);
    assert_eq!(rows(&launch(&mut scheduler)), [(A, 0..4, true)]);
    assert_eq!((scheduler.num_free_blocks(), scheduler.num_running()), (1, 1));
    // B takes A's block and slot while A's only token is in flight.
    let batch = launch(&mut scheduler);
    assert_eq!(rows(&batch), [(B, 0..4, true)]);
    assert_eq!((batch.rows[0].state_slot, batch.rows[0].fresh), (StateSlot(0), true));
    assert_eq!(scheduler.plan(), None);
    for id in [A, B] {
        let commit = scheduler.commit(id, 1).expect("its token is in flight");
        assert_eq!(commit.finish, Some(FinishReason::Length));
    }
    assert!(scheduler.is_idle());
}

#[test]
fn the_last_allowed_token_may_be_a_stop_token() {
    let mut scheduler = scheduler(8, 4, 1);
    add(&mut scheduler, A, 4, 1);
    launch(&mut scheduler);
    let commit = scheduler.commit(A, 7).expect("its token is in flight");
    assert_eq!(commit.finish, Some(FinishReason::Stop { token: 7 }));
}

#[test]
fn stop_tokens_count_only_after_min_tokens() {
    let mut scheduler = scheduler(8, 4, 100);
    scheduler.add(SequenceSpec { min_tokens: 2, ..spec(A, 3, 10) }).expect("it fits");
    for finish in [None, None, Some(FinishReason::Stop { token: 7 })] {
        launch(&mut scheduler);
        assert_eq!(scheduler.commit(A, 7).map(|commit| commit.finish), Some(finish));
    }
}

#[test]
fn nobody_overtakes_in_the_queue() {
    let mut scheduler = scheduler(64, 1, 20);
    add(&mut scheduler, A, 10, 2);
    launch(&mut scheduler);
    add(&mut scheduler, B, 15, 2);
    add(&mut scheduler, C, 1, 1);
    // C would fit beside A, but B came first.
    assert_eq!(rows(&launch(&mut scheduler)), [(A, 10..11, true)]);
    assert_eq!(rows(&launch(&mut scheduler)), [(B, 0..15, true), (C, 0..1, true)]);
}

#[test]
fn admission_leaves_every_running_sequence_its_next_block() {
    let mut scheduler = scheduler(64, 4, 5);
    add(&mut scheduler, A, 4, 8);
    add(&mut scheduler, B, 8, 4);
    // A holds one block and may want two more, B needs two and may want a third: 1 + 2 + 2 <= 5.
    assert_eq!(rows(&launch(&mut scheduler)), [(A, 0..4, true), (B, 0..8, true)]);
    let mut scheduler = self::scheduler(64, 4, 4);
    add(&mut scheduler, A, 4, 8);
    add(&mut scheduler, B, 8, 4);
    assert_eq!(rows(&launch(&mut scheduler)), [(A, 0..4, true)]);
}

#[test]
fn a_plan_that_was_not_launched_is_made_again() {
    let mut scheduler = scheduler(8, 4, 100);
    add(&mut scheduler, A, 20, 10);
    let first = scheduler.plan().expect("A needs a row");
    let second = scheduler.plan().expect("A still needs a row");
    assert_eq!((first.rows, second.number), (second.rows.clone(), first.number + 1));
    assert!(second.rows[0].fresh);
}

#[test]
fn requests_that_can_never_fit_are_refused_by_name() {
    // Ten blocks of four: 40 places, so 41 tokens, since the last one needs none.
    let scheduler = scheduler(8, 4, 10);
    let check = |prompt_len, max_tokens, expected: Result<(), &str>| {
        let result = scheduler.check_fits(prompt_len, max_tokens);
        let message = result.map_err(|error| error.to_string());
        match expected {
            Ok(()) => assert_eq!(message, Ok(())),
            Err(part) => assert!(message.clone().is_err_and(|m| m.contains(part)), "{message:?}"),
        }
    };
    check(0, 1, Err("prompt is empty"));
    check(1, 0, Err("max_tokens must be at least 1"));
    check(100, 1, Err("prompt has 100 tokens, and at least one must be generated"));
    check(99, 1, Err("need 25 KV cache blocks of 4 tokens, the whole cache has 10"));
    check(usize::MAX, usize::MAX, Err("(max_model_len) is 100 tokens"));
    check(40, 1, Ok(()));
    check(41, 1, Err("need 11 KV cache blocks"));
    check(1, 40, Ok(()));
    check(1, 41, Err("need 11 KV cache blocks"));
    check(1, usize::MAX, Err("need 25 KV cache blocks"));
}

#[test]
fn max_tokens_may_reach_beyond_the_context() {
    let scheduler = scheduler(8, 4, 25);
    assert_eq!(scheduler.check_fits(99, usize::MAX), Ok(()));
    let error = scheduler.check_fits(100, usize::MAX);
    assert_eq!(error, Err(AdmissionError::PromptTooLong { prompt_len: 100, max_model_len: 100 }));
}

#[test]
fn a_refused_sequence_leaves_no_trace() {
    let mut scheduler = scheduler(8, 4, 10);
    assert_eq!(scheduler.add(spec(A, 0, 1)), Err(AdmissionError::EmptyPrompt));
    assert!(scheduler.is_idle());
    assert_eq!(scheduler.plan(), None);
    assert!(!scheduler.abort(A));
}

#[test]
#[should_panic(expected = "sequence 0 was added twice")]
fn an_id_in_use_panics() {
    let mut scheduler = scheduler(8, 4, 10);
    add(&mut scheduler, A, 1, 1);
    add(&mut scheduler, A, 1, 1);
}

#[test]
#[should_panic(expected = "batch 1 was launched twice")]
fn launching_a_batch_twice_panics() {
    let mut scheduler = scheduler(8, 4, 10);
    add(&mut scheduler, A, 1, 5);
    let batch = launch(&mut scheduler);
    scheduler.advance(&batch);
}

#[test]
#[should_panic(expected = "the batch launched is not the latest plan")]
fn launching_a_replaced_plan_panics() {
    let mut scheduler = scheduler(8, 4, 10);
    add(&mut scheduler, A, 1, 5);
    let replaced = scheduler.plan().expect("A needs a row");
    scheduler.plan().expect("A still needs a row");
    scheduler.advance(&replaced);
}

#[test]
#[should_panic(expected = "sequence 0 has no token in flight")]
fn a_token_out_of_nowhere_panics() {
    let mut scheduler = scheduler(8, 4, 10);
    add(&mut scheduler, A, 1, 5);
    scheduler.commit(A, 1);
}

/// Mixed lengths of which the longest needs 60 places.
fn mixed(i: usize) -> Lengths {
    Lengths {
        num_stop_tokens: u32::from(i.is_multiple_of(3)),
        ..Lengths::of(1 + i * 7 % 30, 1 + i * 11 % 31)
    }
}

/// vllm#49675, vllm#35541: preemption must not turn into a thrash that never ends.
#[test]
fn fifty_requests_finish_in_a_pool_barely_larger_than_one() {
    for overlap in [false, true] {
        let config = SchedulerConfig {
            other_windows: Vec::new(),
            max_num_seqs: 16,
            max_num_batched_tokens: 32,
            max_model_len: 61,
            block_size: 4,
            num_blocks: 16,
            memory: MEMORY,
        };
        let mut engine = Engine::new(config, overlap);
        engine.run(&[Turn { adds: (0..50).map(mixed).collect(), aborts: Vec::new() }]);
        assert_eq!(engine.records.len(), 50);
        assert!(engine.scheduler.num_preemptions() > 0, "the test is meant to preempt");
    }
}

/// lmdeploy#1788, vllm#26400: aborts at any phase of a step leak nothing and disturb nobody.
#[test]
fn two_thousand_aborts_leave_the_neighbours_alone() {
    let moments = [Moment::BeforePlan, Moment::Launched, Moment::Advanced, Moment::MidCollect];
    let config = SchedulerConfig {
        other_windows: Vec::new(),
        max_num_seqs: 16,
        max_num_batched_tokens: 48,
        max_model_len: 61,
        block_size: 4,
        num_blocks: 40,
        memory: MEMORY,
    };
    let mut engine = Engine::new(config, true);
    let mut num_added = 0;
    for i in 0..2000 {
        // Sixteen run and eight wait, and each turn one of them is aborted at the next moment.
        let alive = engine.records.iter().filter(|(_, record)| !record.has_ended());
        let alive: Vec<usize> =
            alive.map(|(id, _)| usize::try_from(id.0).expect("ids are small")).collect();
        let target = alive.get(i * 7 % alive.len().max(1)).copied().unwrap_or(0);
        let adds: Vec<Lengths> = (num_added..).map(mixed).take(24 - alive.len()).collect();
        num_added += adds.len();
        engine.turn(&Turn { adds, aborts: vec![(moments[i % 4], target)] });
    }
    engine.drain();
    let num_aborted = engine.records.values().filter(|record| record.is_aborted).count();
    assert!(num_aborted > 1900, "only {num_aborted} of 2000 aborts met a living sequence");
    assert!(num_added - num_aborted > 200, "{num_added} added, {num_aborted} aborted");
    assert!(engine.scheduler.num_preemptions() > 0, "the test is meant to preempt, too");
}

/// A prompt of two tokens is cut by the budget, and two more outputs of it wait for its second
/// token: a member of the static batch that could decode meanwhile waits for them, too. The engine
/// checks that nobody joins once somebody has decoded.
#[test]
fn a_static_batch_decodes_when_all_outputs_of_its_requests_are_there() {
    let config = SchedulerConfig {
        other_windows: Vec::new(),
        max_num_seqs: 2,
        max_num_batched_tokens: 7,
        max_model_len: 20,
        block_size: 2,
        num_blocks: 11,
        memory: MEMORY,
    };
    let policy = Policy { batching: Batching::Static { batch_size: 3 }, ..Policy::default() };
    let outputs = Lengths { n: 3, ..Lengths::of(2, 1) };
    let adds = vec![Lengths::of(6, 14), outputs];
    for overlap in [false, true] {
        let mut engine = Engine::with_policy(config.clone(), policy.clone(), overlap);
        engine.run(&[Turn { adds: adds.clone(), aborts: Vec::new() }]);
        let rows = |batch: usize| engine.batches[batch].rows.iter().map(|row| row.id.0);
        assert_eq!(rows(0).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(rows(1).collect::<Vec<_>>(), [1], "the prompt's last token alone");
    }
}
