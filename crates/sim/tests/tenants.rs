//! Two tenants, one flooding: what the other feels, by the real engine with the costs of an H200.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail as tests do")]

use std::time::Duration;

use inflight_engine::{EngineConfig, KvKeep, MemoryConfig, Order, Policy, Targets};
use inflight_model::{DummyWeights, ModelConfig, Weights};
use inflight_sim::plan::{Arrival, Percentiles, Planned, Served, simulate};
use inflight_sim::{CostModel, Gpu, Random};

const LLAMA: &str = include_str!("../../bench/configs/llama-3.1-8b.json");
const SMOLLM: &str = include_str!("../../bench/configs/smollm2-135m.json");

/// A device, a model on it and what is asked of it.
struct Setting {
    model: &'static str,
    cost: CostModel,
    max_num_seqs: usize,
    budget: usize,
    /// Tokens of prompts and outputs, on average.
    lengths: (usize, usize),
    num_modest: usize,
    modest_every_s: f64,
    num_flood: usize,
    /// Seconds between two requests of the flood, on average; 0: all at once.
    flood_every_s: f64,
}

impl Setting {
    fn h200() -> Self {
        Self {
            model: LLAMA,
            cost: CostModel::new(Gpu::named("h200").unwrap()),
            max_num_seqs: 256,
            budget: 8192,
            lengths: (256, 128),
            num_modest: 24,
            modest_every_s: 0.7,
            num_flood: 1500,
            flood_every_s: 0.01,
        }
    }

    /// A device whose steps take as long as they have rows.
    fn cpu() -> Self {
        Self {
            model: SMOLLM,
            cost: CostModel::new(Gpu::cpu(60e9, 1e12)),
            max_num_seqs: 64,
            budget: 192,
            lengths: (64, 64),
            num_modest: 12,
            modest_every_s: 1.5,
            num_flood: 400,
            flood_every_s: 0.0,
        }
    }

    /// The modest tenant's requests and the flood's, all lengths from one to twice the mean.
    fn arrivals(&self) -> (Vec<Arrival>, Vec<Arrival>) {
        let mut random = Random::new(11);
        let mut requests = |count: usize, every_s: f64, first_s: f64, tenant: usize| {
            let mut at_s = first_s;
            let mut one = || {
                let at = at_s;
                at_s += if every_s > 0.0 { random.exponential(every_s) } else { 0.0 };
                Arrival {
                    at_s: at,
                    prompt_len: random.range(1, 2 * self.lengths.0),
                    output_len: random.range(1, 2 * self.lengths.1),
                    tenant,
                }
            };
            (0..count).map(|_| one()).collect::<Vec<_>>()
        };
        let modest = requests(self.num_modest, self.modest_every_s, 1.0, 0);
        (modest, requests(self.num_flood, self.flood_every_s, 0.0, 1))
    }

    fn serve(&self, policy: Policy, arrivals: &[Arrival]) -> Vec<Served> {
        let model = ModelConfig::from_json("model", self.model).unwrap();
        let planned = Planned {
            model: &model,
            weights: &Weights::Dummy(DummyWeights { seed: 0 }),
            cost: self.cost,
            policy,
            noise: 0.03,
            seed: 5,
            engine: EngineConfig {
                overlap: true,
                max_num_seqs: self.max_num_seqs,
                max_num_batched_tokens: self.budget,
                max_model_len: 1024,
                block_size: 16,
                num_blocks: 64 * self.max_num_seqs,
                memory: MemoryConfig::default(),
                kv_keep: KvKeep::All,
                max_outstanding: 1 << 20,
            },
        };
        simulate(&planned, arrivals).unwrap().1
    }

    /// What the modest tenant feels under `policy` beside the flood.
    fn beside_flood(&self, policy: Policy) -> Felt {
        let (modest, flood) = self.arrivals();
        let mut all: Vec<_> = modest.iter().chain(&flood).copied().collect();
        all.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
        let served = self.serve(policy, &all);
        let of_modest = served.iter().zip(&all).filter(|(_, arrival)| arrival.tenant == 0);
        Felt::of(of_modest.map(|(served, _)| served))
    }

    fn alone(&self) -> Felt {
        let (modest, _) = self.arrivals();
        Felt::of(self.serve(Policy::default(), &modest).iter())
    }
}

/// Milliseconds to first tokens, between tokens, and of whole requests.
#[derive(Debug)]
struct Felt {
    ttft: Percentiles,
    itl: Percentiles,
    whole: Percentiles,
}

impl Felt {
    fn of<'a>(served: impl Iterator<Item = &'a Served>) -> Self {
        let (mut ttft, mut itl, mut whole) = (Vec::new(), Vec::new(), Vec::new());
        for Served { at_s, tokens_s } in served {
            ttft.push(1e3 * (tokens_s[0] - at_s));
            itl.extend(tokens_s.windows(2).map(|pair| 1e3 * (pair[1] - pair[0])));
            whole.push(1e3 * (tokens_s.last().unwrap() - at_s));
        }
        Self {
            ttft: Percentiles::of(ttft),
            itl: Percentiles::of(itl),
            whole: Percentiles::of(whole),
        }
    }
}

fn fair(itl_ms: Option<f64>) -> Policy {
    let itl = itl_ms.map(|ms| Duration::from_secs_f64(ms / 1e3));
    Policy { order: Order::Fair, targets: Targets { itl, ttft: None }, ..Policy::default() }
}

/// Slowdown of the median and mean latency.
fn slowdown(felt: &Felt, alone: &Felt) -> (f64, f64) {
    (felt.whole.p50 / alone.whole.p50, felt.whole.mean / alone.whole.mean)
}

#[test]
fn a_flood_is_hardly_felt_on_an_h200() {
    let setting = Setting::h200();
    let alone = setting.alone();
    let felt = setting.beside_flood(fair(Some(1.25 * alone.itl.p50)));
    let (median, mean) = slowdown(&felt, &alone);
    let free = slowdown(&setting.beside_flood(fair(None)), &alone);
    let unfair = slowdown(&setting.beside_flood(Policy::default()), &alone);
    println!("with a target {median:.2}, fair {:.2}, by arrival {:.2}", free.0, unfair.0);
    assert!(median <= 1.5 && mean <= 1.5, "{median} {mean}");
    assert!(unfair.0 > free.0, "{unfair:?} {free:?}");
}

/// Where a step takes as long as it has rows, every row of the flood slows the other down: a target
/// leaves room for one or two. Its prompts are cut small for the target's sake, too.
#[test]
fn a_flood_is_bounded_where_time_goes_by_rows() {
    let setting = Setting::cpu();
    let alone = setting.alone();
    let felt = setting.beside_flood(fair(Some(1.3 * alone.itl.p50)));
    let (median, mean) = slowdown(&felt, &alone);
    let free = setting.beside_flood(fair(None));
    let unfair = setting.beside_flood(Policy::default());
    let [free_x, unfair_x] = [&free, &unfair].map(|felt| slowdown(felt, &alone).0);
    println!("with a target {median:.2}, fair {free_x:.2}, by arrival {unfair_x:.2}");
    println!("first tokens: {:?}, fair {:?}", alone.ttft, free.ttft);
    assert!(median <= 2.0 && mean <= 2.0, "{median} {mean}");
    assert!(felt.itl.p50 <= 1.3 * alone.itl.p50);
    // Nobody waits for the flood's outputs to end: a few steps of 64 rows.
    assert!(free.ttft.p95 < 10.0 * free.itl.p50, "{:?}", free.ttft);
    assert!(unfair_x > 4.0 * free_x, "{unfair_x} {free_x}");
}
