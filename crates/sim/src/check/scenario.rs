//! What a seed stands for: an engine, its device's faults, who asks for what and when.

use std::time::Duration;

use inflight_engine::{EngineConfig, KvKeep, KvWindow, MemoryConfig, Policy, Preemption, Tuning};

use super::policies::policy;
use super::requests::{Planned, requests};
use crate::{Faults, Random};

/// Everything that a run depends on.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// All else is drawn from this.
    pub seed: u64,
    /// The engine.
    pub engine: EngineConfig,
    /// How far back each of the model's layers looks; `None`: it sees everything.
    pub windows: Vec<Option<usize>>,
    /// What decides at first.
    pub policy: Policy,
    /// What decides from some moment on.
    pub tunings: Vec<(Duration, Tuning)>,
    /// Whether full blocks have checksums.
    pub checks_blocks: bool,
    /// In order of their arrival.
    pub requests: Vec<Planned>,
    /// What goes wrong on the device.
    pub faults: Faults,
    /// Operators take up to this share longer than they should.
    pub noise: f64,
}

impl Scenario {
    /// The one of `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let window = random.chance(20).then(|| random.range(1, 60));
        let of_one_layer = engine(&mut random, window);
        let more = &mut Random::new(!seed);
        let windows = windows(more, window);
        let engine = with_layers(more, of_one_layer.clone(), windows.len());
        let policy_now = policy(&mut random, &engine);
        let num_tunings = if random.chance(15) { random.range(1, 3) } else { 0 };
        let tuning = |random: &mut Random| {
            let at = Duration::from_secs_f64(random.exponential(2e-3));
            (at, Tuning { overlap: random.chance(50), policy: policy(random, &engine) })
        };
        let mut tunings: Vec<_> = (0..num_tunings).map(|_| tuning(&mut random)).collect();
        tunings.sort_by_key(|(at, _)| *at);
        let requests = requests(&mut random, &of_one_layer, window);
        let faults = faults(&mut random);
        let noise = random.pick(&[0.0, 0.1, 3.0]);
        let checks_blocks = random.chance(30);
        let policy = policy_now;
        Self { seed, engine, windows, policy, tunings, checks_blocks, requests, faults, noise }
    }
}

fn engine(random: &mut Random, window: Option<usize>) -> EngineConfig {
    let max_num_seqs = random.range(1, 12);
    let block_size = random.pick(&[1, 2, 4, 4, 8]);
    let max_model_len = random.range(8, 160);
    // Room for one sequence and a little more, or for many.
    let one = max_model_len.div_ceil(block_size);
    let num_blocks = match random.range(0, 3) {
        0 => random.range(one.div_ceil(2), one + 2),
        1 => one + random.range(0, one / 2),
        2 => one + random.range(0, 2 * one),
        _ => 8 * one,
    };
    let swaps = random.chance(50);
    let spare_budget = if random.chance(50) { 64 } else { 0 } + random.range(0, 40);
    let room = num_blocks * block_size;
    EngineConfig {
        overlap: random.chance(75),
        max_num_seqs,
        max_num_batched_tokens: max_num_seqs + spare_budget,
        max_model_len,
        block_size,
        num_blocks,
        memory: MemoryConfig {
            prefix_caching: random.chance(60),
            preemption: random.pick(&[Preemption::Auto, Preemption::Swap, Preemption::Recompute]),
            num_swap_blocks: if swaps { random.range(1, 2 * one) } else { 0 },
            keeps_cold_prefixes: swaps && random.chance(50),
            max_moved_blocks: random.range(1, 6),
        },
        kv_keep: if random.chance(15) { latest(random, room, window) } else { KvKeep::All },
        max_outstanding: 256,
    }
}

/// Windows of all layers; those behind the first one form groups of their own if they look back
/// less far, or further.
fn windows(random: &mut Random, first: Option<usize>) -> Vec<Option<usize>> {
    let num_more = if random.chance(20) { random.range(1, 4) } else { 0 };
    let kinds = [first, Some(random.range(1, 60)), Some(random.range(1, 60))];
    let more = (0..num_more).map(|_| random.pick(&kinds)).collect::<Vec<_>>();
    [first].into_iter().chain(more).collect()
}

/// Blocks for so many layers, a little less for each behind the first. Where there are several, the
/// host keeps cold prefixes more often than not.
fn with_layers(random: &mut Random, engine: EngineConfig, num_layers: usize) -> EngineConfig {
    let swaps = engine.memory.num_swap_blocks > 0 && num_layers > 1;
    let memory = MemoryConfig {
        keeps_cold_prefixes: engine.memory.keeps_cold_prefixes || swaps && random.chance(60),
        num_swap_blocks: engine.memory.num_swap_blocks * num_layers,
        ..engine.memory
    };
    let for_more = engine.num_blocks * (num_layers - 1) * 2 / 3;
    EngineConfig { num_blocks: engine.num_blocks + for_more, memory, ..engine }
}

/// Sinks and a window, mostly less than `room` and than the model's own window.
pub(super) fn latest(random: &mut Random, room: usize, window: Option<usize>) -> KvKeep {
    let most = window.unwrap_or(room).min(room).max(2);
    let num_sinks = random.range(0, (most / 4).min(8));
    KvKeep::Latest(KvWindow { num_sinks, window: random.range(1, most / 2) })
}

fn faults(random: &mut Random) -> Faults {
    Faults {
        lost_at: random.chance(5).then(|| random.range(1, 3000) as u64),
        out_of_memory_at: random.chance(2).then(|| random.range(0, 80)),
        slow_per_mille: random.pick(&[0, 0, 0, 20]),
        flips_after: None,
        skipped_wait: None,
    }
}
