//! What each policy promises, with the numbers worked out by hand.

use std::time::Duration;

use inflight_scheduler::{
    Batching, Gate, HeldBack, Lapse, MemoryConfig, Mixing, Order, Policy, Preemption, Scheduler,
    SchedulerConfig, SequenceId, SequenceSpec, Service, Targets, Tenant,
};
use proptest::prelude::*;

const A: SequenceId = SequenceId(0);
const B: SequenceId = SequenceId(1);
const C: SequenceId = SequenceId(2);
const D: SequenceId = SequenceId(3);

/// Serial steps of four rows and eight tokens, in blocks of two.
struct Steps {
    scheduler: Scheduler,
}

impl Steps {
    fn with(policy: Policy, num_blocks: usize) -> Self {
        Self::sized(policy, 8, (100, num_blocks))
    }

    fn sized(
        policy: Policy,
        max_num_batched_tokens: usize,
        (max_model_len, num_blocks): (usize, usize),
    ) -> Self {
        let limits = SchedulerConfig {
            other_windows: Vec::new(),
            max_num_seqs: 4,
            max_num_batched_tokens,
            max_model_len,
            block_size: 2,
            num_blocks,
            memory: MemoryConfig {
                prefix_caching: false,
                preemption: Preemption::Recompute,
                num_swap_blocks: 0,
                keeps_cold_prefixes: false,
                max_moved_blocks: 0,
            },
        };
        Self::within(limits, policy)
    }

    fn within(limits: SchedulerConfig, policy: Policy) -> Self {
        let mut scheduler = Scheduler::new(limits).expect("the limits are sound");
        scheduler.set_policy(policy).expect("the policy is sound");
        Self { scheduler }
    }

    fn add(&mut self, id: SequenceId, prompt_len: usize, max_tokens: usize, service: Service) {
        let spec = SequenceSpec::new(id, vec![1; prompt_len]);
        self.scheduler.add(SequenceSpec { max_tokens, service, ..spec }).expect("it fits");
    }

    fn add_plain(&mut self, id: SequenceId, prompt_len: usize, max_tokens: usize) {
        self.add(id, prompt_len, max_tokens, Service::default());
    }

    /// Runs a batch to its end: who had how many tokens.
    fn step(&mut self) -> Vec<(SequenceId, usize)> {
        let Some(batch) = self.scheduler.plan() else { return Vec::new() };
        self.scheduler.advance(&batch);
        self.scheduler.collect(&batch);
        for row in batch.sampled_rows() {
            self.scheduler.commit(row.id, 7);
        }
        self.scheduler.check_integrity().expect("sound after every step");
        batch.rows.iter().map(|row| (row.id, row.len)).collect()
    }

    fn held_back(&self) -> Option<HeldBack> {
        self.scheduler.decision().held_back
    }
}

fn tenant(name: &str) -> Service {
    Service { tenant: Tenant::named(name), ..Service::default() }
}

fn priority(priority: i32) -> Service {
    Service { priority, ..Service::default() }
}

#[test]
fn a_static_batch_runs_until_its_longest_member_ends() {
    let batching = Batching::Static { batch_size: 2 };
    let mut steps = Steps::with(Policy { batching, ..Policy::default() }, 100);
    steps.add_plain(A, 3, 1);
    steps.add_plain(B, 6, 3);
    steps.add_plain(C, 2, 1);
    // All prompts first, over two steps, as eight tokens are the budget. A has then ended.
    assert_eq!(steps.step(), [(A, 3), (B, 5)]);
    assert_eq!(steps.step(), [(B, 1)]);
    assert_eq!(steps.held_back(), Some(HeldBack::StaticBatch));
    // There is room for C, and it waits.
    assert_eq!(steps.step(), [(B, 1)]);
    assert_eq!(steps.step(), [(B, 1)]);
    assert_eq!(steps.step(), [(C, 2)]);
}

/// A static batch reserves whole blocks: the longest sequence takes four of 8 tokens, 32 places,
/// and is alone no more than the 28 tokens that are allowed. (It was never planned.)
#[test]
fn the_longest_sequence_fits_a_static_batch_of_its_own_length() {
    let limits = SchedulerConfig {
        other_windows: Vec::new(),
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        max_model_len: 28,
        block_size: 8,
        num_blocks: 10,
        memory: MemoryConfig::default(),
    };
    let policy = Policy {
        batching: Batching::Static { batch_size: 3 },
        max_batch_total_tokens: Some(28),
        ..Policy::default()
    };
    let mut steps = Steps::within(limits, policy);
    steps.add_plain(A, 26, 2);
    steps.add_plain(B, 3, 1);
    assert_eq!(steps.step(), [(A, 26)]);
    assert_eq!(steps.held_back(), Some(HeldBack::TotalTokens));
    assert_eq!(steps.step(), [(A, 1)]);
    assert_eq!(steps.step(), [(B, 3)]);
}

#[test]
fn prompts_first_hold_up_decodes() {
    let policy = Policy { mixing: Mixing::PrefillFirst, ..Policy::default() };
    let mut steps = Steps::with(policy, 100);
    steps.add_plain(A, 2, 5);
    assert_eq!(steps.step(), [(A, 2)]);
    steps.add_plain(B, 12, 5);
    assert_eq!(steps.step(), [(B, 8)]);
    assert_eq!(steps.step(), [(B, 4)]);
    assert_eq!(steps.step(), [(A, 1), (B, 1)]);
}

#[test]
fn decodes_first_hold_up_prompts_until_the_gate_opens() {
    let gate = Gate { waiting_served_ratio: 1.5, max_waiting_tokens: 3 };
    let policy = Policy { mixing: Mixing::DecodeFirst, gate, ..Policy::default() };
    let mut steps = Steps::with(policy, 100);
    steps.add_plain(A, 2, 50);
    steps.add_plain(B, 2, 50);
    assert_eq!(steps.step(), [(A, 2), (B, 2)]);
    steps.add_plain(C, 2, 50);
    // One waits, and the ratio wants three for two that run: it waits for three steps.
    for _ in 0..3 {
        assert_eq!(steps.step(), [(A, 1), (B, 1)]);
    }
    assert_eq!(steps.step(), [(C, 2)]);
    // Three decode now and four waiting would be enough; there is one.
    steps.add_plain(D, 2, 50);
    assert_eq!(steps.step(), [(A, 1), (B, 1), (C, 1)]);
    for i in 4..7 {
        steps.add_plain(SequenceId(i), 2, 50);
    }
    // Four wait; one place is free.
    assert_eq!(steps.step(), [(D, 2)]);
    assert_eq!(steps.held_back(), Some(HeldBack::Slots));
}

#[test]
fn the_gate_holds_up_chunks_beside_decodes_too() {
    let gate = Gate { waiting_served_ratio: 2.0, max_waiting_tokens: 0 };
    let mut steps = Steps::with(Policy { gate, ..Policy::default() }, 100);
    steps.add_plain(A, 2, 4);
    assert_eq!(steps.step(), [(A, 2)]);
    steps.add_plain(B, 2, 1);
    assert_eq!(steps.step(), [(A, 1)]);
    assert_eq!(steps.held_back(), Some(HeldBack::Gate));
    steps.add_plain(C, 2, 1);
    assert_eq!(steps.step(), [(A, 1), (B, 2), (C, 2)]);
}

#[test]
fn reserved_totals_let_fewer_run() {
    let policy = Policy {
        max_batch_total_tokens: Some(100),
        max_batch_prefill_tokens: Some(3),
        ..Policy::default()
    };
    let mut steps = Steps::with(policy, 100);
    steps.add_plain(A, 5, 50);
    steps.add_plain(B, 5, 50);
    // A may come to hold 54 tokens, so B's 54 are too many, though nearly all blocks are free.
    assert_eq!(steps.step(), [(A, 3)]);
    assert_eq!(steps.step(), [(A, 2)]);
    assert_eq!(steps.held_back(), Some(HeldBack::TotalTokens));
    let mut num_steps = 0;
    while steps.step() != [(B, 3)] {
        num_steps += 1;
        assert!(num_steps < 60, "B never runs");
    }
    assert_eq!(num_steps, 49, "when A has ended");
}

#[test]
fn lower_priorities_go_first_and_keep_their_blocks() {
    let mut steps = Steps::with(Policy { order: Order::Priority, ..Policy::default() }, 6);
    steps.add(A, 3, 6, priority(5));
    steps.add(B, 3, 6, priority(-1));
    steps.add(C, 3, 6, priority(5));
    // Two fit beside each other; B first, then A, which came before C.
    assert_eq!(steps.step(), [(B, 3), (A, 3)]);
    assert_eq!(steps.held_back(), Some(HeldBack::Blocks));
    for _ in 0..3 {
        assert_eq!(steps.step(), [(B, 1), (A, 1)]);
    }
    // No block is left: A gives way, though it is the older one.
    assert_eq!(steps.step(), [(B, 1)]);
    assert_eq!(steps.scheduler.decision().num_preempted, 1);
    assert_eq!(steps.step(), [(B, 1)]);
    assert_eq!(steps.step()[0], (A, 7), "before C, of the same priority");
}

#[test]
fn tenants_take_turns_by_what_they_had() {
    let mut steps = Steps::with(Policy { order: Order::Fair, ..Policy::default() }, 100);
    for id in 0..6 {
        steps.add(SequenceId(id), 4, 1, tenant("flood"));
    }
    steps.add(SequenceId(6), 4, 1, tenant("modest"));
    // Both had nothing, and the flood came first; then the other one has had less.
    assert_eq!(steps.step(), [(A, 4), (SequenceId(6), 4)]);
    assert_eq!(steps.step(), [(B, 4), (C, 4)]);
    // Whoever comes back starts level with those that wait: it saved nothing up while away.
    steps.add(SequenceId(7), 4, 1, tenant("modest"));
    // Prompts of 40 units and tokens of 20.
    let service: Vec<_> = steps.scheduler.tenants().map(|(_, units)| units).collect();
    assert_eq!(service, [180, 180]);
    assert_eq!(steps.step(), [(D, 4), (SequenceId(7), 4)]);
}

/// After 20 steps of 10 ms, a prompt of 400 tokens and behind it one of 16, in steps of 100.
/// Nobody makes way for one that gave way itself and that it would come back before: of prompts
/// that take several steps nothing would ever be left.
#[test]
fn way_is_made_for_nobody_who_comes_back_later() {
    let mut steps = Steps::with(Policy { order: Order::Fair, ..Policy::default() }, 16);
    steps.add(A, 2, 29, tenant("a"));
    steps.add(B, 12, 10, tenant("a"));
    steps.add(C, 2, 20, tenant("c"));
    let mut num_steps = 0;
    while !steps.scheduler.is_idle() {
        assert!(!steps.step().is_empty() && num_steps < 100, "after {num_steps} steps");
        num_steps += 1;
    }
    assert!(steps.scheduler.num_preemptions() > 0, "blocks ran out");
}

#[test]
fn prompt_tokens_are_shared_by_need() {
    let run = |ttft: Option<u64>| {
        let targets = Targets { itl: None, ttft: ttft.map(Duration::from_millis) };
        let mut steps = Steps::sized(Policy { targets, ..Policy::default() }, 100, (500, 1000));
        steps.add_plain(D, 2, 90);
        for _ in 0..20 {
            let batch = steps.scheduler.plan().expect("D runs");
            steps.scheduler.advance(&batch);
            steps.scheduler.collect(&batch);
            steps.scheduler.commit(D, 7);
            steps.scheduler.observe(&batch, Duration::from_millis(10));
        }
        steps.add_plain(A, 400, 1);
        steps.add_plain(B, 16, 1);
        steps.step()
    };
    assert_eq!(run(None), [(D, 1), (A, 99)], "the first prompt gets all it can use");
    // Ten steps until A is due: 40 tokens would do. B is done at once, and A gets the rest.
    assert_eq!(run(Some(100)), [(D, 1), (A, 83), (B, 16)]);
    // A cannot be in time in any case; B can.
    assert_eq!(run(Some(20)), [(D, 1), (A, 83), (B, 16)]);
}

#[test]
fn time_in_the_queue_ends_with_admission_and_deadlines_do_not() {
    let max_queue_time = Some(Duration::from_millis(10));
    let mut steps = Steps::with(Policy { max_queue_time, ..Policy::default() }, 6);
    let deadline = |ms| Service { deadline: Some(Duration::from_millis(ms)), ..tenant("t") };
    steps.add(A, 3, 8, deadline(30));
    steps.add(B, 9, 3, Service::default());
    steps.add(C, 9, 3, deadline(5));
    steps.step();
    let mut at = |ms| {
        steps.scheduler.set_now(Duration::from_millis(ms));
        steps.scheduler.expire()
    };
    assert_eq!(at(4), []);
    assert_eq!(at(5), [(C, Lapse::Deadline)]);
    assert_eq!(at(9), []);
    assert_eq!(at(10), [(B, Lapse::QueueTime)]);
    assert_eq!(at(29), []);
    assert_eq!(at(30), [(A, Lapse::Deadline)]);
    assert!(steps.scheduler.is_idle());
}

fn no_target() -> impl Strategy<Value = Policy> {
    let mixing =
        prop_oneof![Just(Mixing::Chunked), Just(Mixing::PrefillFirst), Just(Mixing::DecodeFirst),];
    let gates = vec![(0.0, 0), (0.3, 20), (5.0, 0), (5.0, 7)];
    let order = prop_oneof![Just(Order::Fcfs), Just(Order::Priority), Just(Order::Fair)];
    (mixing, prop::sample::select(gates), order, any::<bool>()).prop_map(
        |(mixing, (waiting_served_ratio, max_waiting_tokens), order, is_static)| Policy {
            batching: if is_static {
                Batching::Static { batch_size: 3 }
            } else {
                Batching::Continuous
            },
            mixing,
            order,
            gate: Gate { waiting_served_ratio, max_waiting_tokens },
            ..Policy::default()
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 100,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// One request among others that never stop coming, one a step, from the same and from another
    /// tenant: it ends, whatever the policy.
    #[test]
    fn nobody_starves(policy in no_target(), prompt_len in 1usize..30, max_tokens in 1usize..30) {
        let mut steps = Steps::with(policy, 60);
        for id in 1..20 {
            steps.add(SequenceId(id), 5, 5, tenant(["mine", "other"][id as usize % 2]));
        }
        steps.add(A, prompt_len, max_tokens, tenant("mine"));
        for step in 0..2000 {
            if !steps.scheduler.has_sequence(A) {
                return Ok(());
            }
            let id = SequenceId(20 + step);
            steps.add(id, 5, 5, tenant(["mine", "other"][step as usize % 2]));
            steps.step();
        }
        prop_assert!(false, "it has not ended");
    }
}
