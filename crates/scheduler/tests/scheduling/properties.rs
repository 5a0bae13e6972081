//! Random scripts: arrivals, aborts at any moment, stop tokens, and pools that are far too small.

use std::time::Duration;

use inflight_kv_cache::{Attended, Retention, SinkWindow};
use inflight_scheduler::{
    Batching, Gate, MemoryConfig, Mixing, Order, Policy, Preemption, SchedulerConfig, Targets,
};
use proptest::prelude::*;

use crate::device::MoveTime;
use crate::engine::{Engine, Moment, Turn};
use crate::workload::{Lengths, Standing};

/// Pools range from less than one longest sequence to nearly two, so that many runs preempt.
fn config() -> impl Strategy<Value = SchedulerConfig> {
    let sizes = (1usize..8, 0usize..24, 2usize..64, 1usize..6, 60usize..180);
    (sizes, memory()).prop_map(
        |((max_num_seqs, spare_budget, max_model_len, block_size, pool_percent), memory)| {
            SchedulerConfig {
                other_windows: Vec::new(),
                max_num_seqs,
                max_num_batched_tokens: max_num_seqs + spare_budget,
                max_model_len,
                block_size,
                num_blocks: (max_model_len * pool_percent / 100).div_ceil(block_size),
                memory,
            }
        },
    )
}

/// With and without each; the swap space may be too small for all.
fn memory() -> impl Strategy<Value = MemoryConfig> {
    let preemption = prop_oneof![
        1 => Just(Preemption::Auto),
        1 => Just(Preemption::Recompute),
        3 => Just(Preemption::Swap),
    ];
    let num_swap_blocks = prop_oneof![1 => Just(0usize), 2 => 1usize..64];
    (any::<[bool; 2]>(), preemption, num_swap_blocks, 1usize..8).prop_map(
        |([prefix_caching, keeps], preemption, num_swap_blocks, max_moved_blocks)| MemoryConfig {
            prefix_caching,
            preemption,
            num_swap_blocks,
            keeps_cold_prefixes: keeps && num_swap_blocks > 0,
            max_moved_blocks,
        },
    )
}

/// The same for a model of several layer groups, of which the first sees everything.
fn grouped() -> impl Strategy<Value = SchedulerConfig> {
    let window = prop_oneof![1 => Just(None), 3 => (1usize..20).prop_map(Some)];
    (config(), prop::collection::vec(window, 1..4)).prop_map(|(config, other_windows)| {
        let num_groups = 1 + other_windows.len();
        let num_swap_blocks = config.memory.num_swap_blocks * num_groups;
        let memory = MemoryConfig { num_swap_blocks, ..config.memory };
        let num_blocks = config.num_blocks * num_groups;
        SchedulerConfig { other_windows, memory, num_blocks, ..config }
    })
}

/// Sequences that keep sinks and a window by choice, if asked for, beside those that keep all.
fn sinks_or_all(config: &SchedulerConfig, script: Vec<(Turn, Choices)>) -> Vec<Turn> {
    let choose = |(mut turn, choices): (Turn, Choices)| {
        for (lengths, choice) in turn.adds.iter_mut().zip(choices) {
            if let Some((num_sinks, window)) = choice.filter(|(num_sinks, _)| num_sinks % 2 == 0) {
                let sinks = SinkWindow::new(num_sinks, window, config.block_size);
                lengths.retention = Retention::Sinks(sinks);
            }
        }
        turn
    };
    script.into_iter().map(choose).collect()
}

fn lengths() -> impl Strategy<Value = Lengths> {
    let num_stop_tokens = prop_oneof![2 => Just(0u32), 1 => Just(1), 1 => Just(2)];
    let flags = (any::<bool>(), prop_oneof![3 => Just(false), 1 => Just(true)]);
    let n = prop_oneof![4 => Just(1usize), 1 => 2usize..5];
    let shared = ((0u64..2, 0usize..30), 0u32..2, flags, n);
    (1usize..24, 1usize..40, 0usize..4, num_stop_tokens, shared, standing()).prop_map(
        |(
            prompt_len,
            max_tokens,
            min_tokens,
            num_stop_tokens,
            (family, salt, (counts_tokens, probes_prompt), n),
            standing,
        )| {
            Lengths {
                prompt_len,
                max_tokens,
                min_tokens,
                num_stop_tokens,
                n,
                family,
                salt,
                counts_tokens,
                probes_prompt,
                standing,
                retention: Retention::All,
            }
        },
    )
}

/// Tokens at a prompt's end that decide what stays of it.
const NUM_OBSERVED: usize = 3;

/// For each sequence that comes in a turn, two numbers that say what it keeps, if not as usual.
type Choices = Vec<Option<(usize, usize)>>;

/// Turns, and what each of a turn's sequences is to keep, as [`forgetful`] reads it.
fn choosy_script() -> impl Strategy<Value = Vec<(Turn, Choices)>> {
    let choices = prop::collection::vec(prop::option::of((0usize..6, 1usize..20)), 3);
    prop::collection::vec((turn(), choices), 1..24)
}

/// Some sequences keep sinks and a window by choice, or a part of the prompt; the others what the
/// model's layers see. Prompts are only cut where those that decide fit a batch, if alone.
fn forgetful(
    config: &SchedulerConfig,
    window: Option<usize>,
    script: Vec<(Turn, Choices)>,
) -> Vec<Turn> {
    let SchedulerConfig { block_size, max_num_batched_tokens, .. } = *config;
    let may_cut = max_num_batched_tokens >= NUM_OBSERVED;
    let usual = window.map_or(Retention::All, |window| Retention::Window { window });
    let choose = |(mut turn, choices): (Turn, Choices)| {
        for (lengths, choice) in turn.adds.iter_mut().zip(choices) {
            lengths.retention = match choice {
                None => usual,
                Some((5, num_kept)) if may_cut => Retention::Attended(Attended::new(
                    lengths.prompt_len,
                    num_kept + NUM_OBSERVED,
                    NUM_OBSERVED,
                    block_size,
                )),
                Some((num_sinks, window)) => {
                    Retention::Sinks(SinkWindow::new(num_sinks, window, block_size))
                }
            };
        }
        turn
    };
    script.into_iter().map(choose).collect()
}

fn standing() -> impl Strategy<Value = Standing> {
    let patience = prop_oneof![4 => Just(None), 1 => (0u64..60).prop_map(Some)];
    (-2i32..3, 0u8..4, patience).prop_map(|(priority, tenant, patience)| Standing {
        priority,
        tenant,
        patience,
    })
}

fn policy() -> impl Strategy<Value = Policy> {
    let mixing =
        prop_oneof![Just(Mixing::Chunked), Just(Mixing::PrefillFirst), Just(Mixing::DecodeFirst),];
    let order = prop_oneof![Just(Order::Fcfs), Just(Order::Priority), Just(Order::Fair)];
    let gate = (prop::sample::select(vec![0.0, 0.3, 1.2, 5.0]), 0u64..8).prop_map(
        |(waiting_served_ratio, max_waiting_tokens)| Gate {
            waiting_served_ratio,
            max_waiting_tokens,
        },
    );
    let batching = prop_oneof![
        3 => Just(Batching::Continuous),
        1 => (1usize..6).prop_map(|batch_size| Batching::Static { batch_size }),
    ];
    let millis = |range: std::ops::Range<u64>| {
        prop_oneof![Just(None), range.prop_map(|ms| Some(Duration::from_millis(ms)))]
    };
    let limits = (prop::option::of(1usize..20), prop::option::of(63usize..200), millis(1..60));
    let itl = prop_oneof![Just(None), (1u64..900).prop_map(|us| Some(Duration::from_micros(us)))];
    (batching, mixing, order, gate, limits, itl, millis(1..60)).prop_map(
        |(batching, mixing, order, gate, limits, itl, ttft)| {
            let mixes = batching == Batching::Continuous && mixing == Mixing::Chunked;
            let (max_batch_prefill_tokens, max_batch_total_tokens, max_queue_time) = limits;
            Policy {
                batching,
                mixing,
                order,
                gate,
                max_batch_prefill_tokens,
                max_batch_total_tokens,
                targets: Targets { itl: itl.filter(|_| mixes), ttft },
                max_queue_time,
            }
        },
    )
}

fn moment() -> impl Strategy<Value = Moment> {
    prop_oneof![
        Just(Moment::BeforePlan),
        Just(Moment::Launched),
        Just(Moment::Advanced),
        Just(Moment::MidCollect),
    ]
}

fn turn() -> impl Strategy<Value = Turn> {
    let adds = prop_oneof![
        1 => Just(Vec::new()),
        1 => prop::collection::vec(lengths(), 1..4),
    ];
    let aborts = prop_oneof![
        5 => Just(Vec::new()),
        1 => prop::collection::vec((moment(), 0usize..32), 1..3),
    ];
    (adds, aborts).prop_map(|(adds, aborts)| Turn { adds, aborts })
}

fn run(config: &SchedulerConfig, script: &[Turn], overlap: bool) -> Engine {
    let mut engine = Engine::new(config.clone(), overlap);
    engine.run(script);
    engine
}

fn run_policy(config: &SchedulerConfig, policy: &Policy, script: &[Turn], overlap: bool) -> Engine {
    let mut engine = Engine::with_policy(config.clone(), policy.clone(), overlap);
    engine.run(script);
    engine
}

fn check_same_tokens(serial: &Engine, overlapped: &Engine) -> Result<(), TestCaseError> {
    prop_assert_eq!(serial.records.len(), overlapped.records.len());
    for (id, record) in &serial.records {
        let other = &overlapped.records[id];
        if !record.is_aborted && !other.is_aborted {
            prop_assert_eq!(&record.tokens, &other.tokens);
            prop_assert_eq!(record.finish, other.finish);
        }
    }
    Ok(())
}

/// Overlap and the time of moves change neither tokens nor, the latter, batches.
fn check_overlap(config: &SchedulerConfig, script: &[Turn]) -> Result<(), TestCaseError> {
    let serial = run(config, script, false);
    let overlapped = run(config, script, true);
    let mut early = Engine::with_moves(config.clone(), true, MoveTime::Early);
    early.run(script);
    prop_assert_eq!(&early.batches, &overlapped.batches);
    check_same_tokens(&serial, &overlapped)
}

proptest! {
    // A failure prints its input; what it taught is kept as a named scenario, not as a seed.
    #![proptest_config(ProptestConfig {
        cases: 2000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// The engine and the device check everything else while they run.
    #[test]
    fn every_schedule_yields_every_sequence_its_own_tokens(
        config in config(),
        script in prop::collection::vec(turn(), 1..24),
    ) {
        check_overlap(&config, &script)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1500,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Sequences that let go of tokens see exactly what their positions say, whatever the schedule.
    #[test]
    fn so_do_sequences_that_forget(
        config in config(),
        window in prop::option::of(1usize..20),
        script in choosy_script(),
    ) {
        let script = forgetful(&config, window, script);
        check_overlap(&config, &script)?;
    }
}

/// One block with every batch: a sequence of three groups takes more than a hundred to leave and
/// come back.
#[test]
fn whoever_gave_way_comes_back_block_by_block() {
    let config = SchedulerConfig {
        max_num_seqs: 2,
        max_num_batched_tokens: 2,
        max_model_len: 42,
        block_size: 1,
        num_blocks: 111,
        other_windows: vec![None, Some(1)],
        memory: MemoryConfig {
            prefix_caching: true,
            preemption: Preemption::Swap,
            num_swap_blocks: 63,
            keeps_cold_prefixes: false,
            max_moved_blocks: 1,
        },
    };
    let lengths = |prompt_len, max_tokens, family, salt| Lengths {
        prompt_len,
        max_tokens,
        min_tokens: 0,
        num_stop_tokens: 0,
        n: 1,
        family,
        salt,
        counts_tokens: false,
        probes_prompt: false,
        standing: Standing { priority: 0, tenant: 0, patience: None },
        retention: Retention::All,
    };
    let last = Lengths { probes_prompt: true, ..lengths(17, 17, (0, 0), 0) };
    let script = [
        Turn { adds: vec![lengths(3, 1, (0, 3), 1)], aborts: Vec::new() },
        Turn {
            adds: vec![lengths(4, 16, (0, 3), 1), lengths(1, 1, (0, 0), 0), last],
            aborts: vec![(Moment::BeforePlan, 30)],
        },
    ];
    check_overlap(&config, &script).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 700,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Every layer group of every sequence holds what its layers see, whatever the schedule.
    #[test]
    fn so_do_sequences_of_several_layer_groups(
        config in grouped(),
        script in choosy_script(),
    ) {
        let script = sinks_or_all(&config, script);
        check_overlap(&config, &script)?;
    }

    #[test]
    fn so_do_they_under_every_policy(
        config in grouped(),
        policy in policy(),
        script in prop::collection::vec(turn(), 1..16),
    ) {
        let serial = run_policy(&config, &policy, &script, false);
        let overlapped = run_policy(&config, &policy, &script, true);
        check_same_tokens(&serial, &overlapped)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 600,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn so_does_every_policy(
        config in config(),
        policy in policy(),
        window in prop::option::of(1usize..20),
        script in choosy_script(),
    ) {
        let script = forgetful(&config, window, script);
        let serial = run_policy(&config, &policy, &script, false);
        let overlapped = run_policy(&config, &policy, &script, true);
        check_same_tokens(&serial, &overlapped)?;
    }

    #[test]
    fn the_same_script_gives_the_same_batches(
        config in config(),
        policy in policy(),
        script in prop::collection::vec(turn(), 1..12),
        overlap: bool,
    ) {
        let first = run_policy(&config, &policy, &script, overlap);
        let second = run_policy(&config, &policy, &script, overlap);
        prop_assert_eq!(first.batches, second.batches);
        prop_assert_eq!(first.decisions, second.decisions);
    }
}
