//! Who decides in a run: policies drawn from a seed.

use std::time::Duration;

use inflight_engine::{Batching, EngineConfig, Gate, Mixing, Order, Policy, Targets};

use crate::Random;

/// Draws a policy that works with the engine's limits.
pub(super) fn policy(random: &mut Random, engine: &EngineConfig) -> Policy {
    let largest = engine.max_model_len.min(engine.num_blocks * engine.block_size);
    let batching = match random.range(0, 7) {
        0 => Batching::Static { batch_size: random.range(1, engine.max_num_seqs) },
        _ => Batching::Continuous,
    };
    let mixing = match random.range(0, 5) {
        0 => Mixing::PrefillFirst,
        1 => Mixing::DecodeFirst,
        _ => Mixing::Chunked,
    };
    let may_aim = batching == Batching::Continuous && mixing == Mixing::Chunked;
    let time = |random: &mut Random| Duration::from_secs_f64(random.exponential(200e-6) + 1e-6);
    let total = random.range(largest, 4 * largest);
    Policy {
        batching,
        mixing,
        order: random.pick(&[Order::Fcfs, Order::Fcfs, Order::Priority, Order::Fair]),
        gate: if random.chance(25) { Gate::USUAL } else { Gate::default() },
        max_batch_prefill_tokens: random.chance(25).then(|| random.range(1, 24)),
        max_batch_total_tokens: random.chance(15).then_some(total),
        targets: Targets {
            itl: (may_aim && random.chance(25)).then(|| time(random)),
            ttft: random.chance(15).then(|| time(random)),
        },
        max_queue_time: random.chance(15).then(|| 20 * time(random)),
    }
}
