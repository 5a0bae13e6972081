//! The cost model against what an H200 was measured to take, in `docs/BENCHMARKS.md`: 8B in bf16,
//! and with weights in fp8.

use inflight_engine::{EngineConfig, KvKeep, MemoryConfig, Policy};
use inflight_model::{DummyWeights, Fp8Weights, ModelConfig, Weights};
use inflight_sim::plan::{Arrival, PlanReport, Planned, simulate};
use inflight_sim::{CostModel, Gpu};

const LLAMA: &str = include_str!("../../bench/configs/llama-3.1-8b.json");

struct Run {
    num_requests: usize,
    input: usize,
    output: usize,
    fp8: bool,
    overlap: bool,
}

impl Run {
    fn of(num_requests: usize, input: usize, output: usize) -> Self {
        Self { num_requests, input, output, fp8: false, overlap: true }
    }

    fn report(&self) -> PlanReport {
        let mut model = ModelConfig::from_json("llama", LLAMA).expect("it is a model");
        model.fp8_weights = self.fp8.then_some(Fp8Weights::AtLoad);
        let planned = Planned {
            model: &model,
            weights: &Weights::Dummy(DummyWeights { seed: 0 }),
            cost: CostModel::new(Gpu::named("h200").expect("it is known")),
            policy: Policy::default(),
            noise: 0.0,
            seed: 0,
            engine: EngineConfig {
                overlap: self.overlap,
                max_num_seqs: 256,
                max_num_batched_tokens: 8192,
                max_model_len: self.input + self.output,
                block_size: 16,
                num_blocks: 50_000,
                memory: MemoryConfig::default(),
                kv_keep: KvKeep::All,
                max_outstanding: 4096,
            },
        };
        let one =
            |_| Arrival { at_s: 0.0, prompt_len: self.input, output_len: self.output, tenant: 0 };
        let arrivals: Vec<_> = (0..self.num_requests).map(one).collect();
        simulate(&planned, &arrivals).expect("it runs").0
    }
}

/// Measured on the device; `error` is what the simulation may be off.
#[track_caller]
fn check(what: &str, simulated: f64, measured: f64, error: f64) {
    let off = simulated / measured - 1.0;
    println!("{what:<40}{simulated:>10.2}{measured:>10.2}{:>8.1} %", 100.0 * off);
    assert!(off.abs() <= error, "{what}: {simulated:.2}, measured {measured:.2}");
}

/// What the model's constants were fitted to.
#[test]
fn fitted_figures_are_met() {
    check("1 request, ms a step", Run::of(1, 64, 64).report().itl_ms.p50, 4.07, 0.03);
    check("256 of 512 + 128, ms a step", Run::of(256, 512, 128).report().itl_ms.p50, 13.4, 0.05);
    check("prefill of 1,024, ms", Run::of(1, 1024, 1).report().ttft_ms.p50, 21.8, 0.08);
    check("prefill of 8,192, ms", Run::of(1, 8192, 1).report().ttft_ms.p50, 205.9, 0.05);
}

/// What they were not fitted to.
#[test]
fn other_figures_are_foretold() {
    check("32 of 64 + 64, ms a step", Run::of(32, 64, 64).report().itl_ms.p50, 4.33, 0.05);
    check("32 of 256 + 256, ms a step", Run::of(32, 256, 256).report().itl_ms.p50, 4.65, 0.05);
    check("128 of 512 + 128, ms a step", Run::of(128, 512, 128).report().itl_ms.p50, 8.3, 0.08);
    let off = Run { overlap: false, ..Run::of(32, 256, 256) };
    check("the same without overlap", off.report().itl_ms.p50, 4.85, 0.06);
    let fp8 = Run { fp8: true, ..Run::of(32, 256, 96) };
    check("32 of 256 + 96, weights in fp8", fp8.report().itl_ms.p50, 3.46, 0.08);
}
