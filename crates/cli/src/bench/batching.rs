//! `inflight bench batching`: what batching gains, on one engine.

use std::num::NonZeroUsize;
use std::time::Duration;

use anyhow::{Result, ensure};
use inflight_backend::Backend;
use inflight_bench::batching::{
    Burst, BurstRow, Lengths, LongPrompt, LongPromptRow, Rates, RatesRow, Rig, Tenants, TenantsRow,
    run_burst, run_long_prompt, run_rates, run_tenants,
};
use inflight_engine::EngineConfig;
use serde_json::{Value, json};

use super::outputs::Outputs;
use super::{batching_plots, engine_json, open_measured};
use crate::args::{BatchingArgs, BatchingExperiment, OverlapChoice};
use crate::assembly::{Assembled, Model, UseEngine, with_engine};
use crate::device::{Chosen, choose};
use crate::resolve::{Workload, resolve_gpu_use};

/// The seed of the publication's lengths.
const SEED: u64 = 0xCADE;
/// Tokens of the longest request as published: the largest context of its model.
const LONGEST: usize = 2048;
/// Requests that may be there beside those that run.
const MAX_QUEUE: usize = 4096;
/// What the long prompt enters.
const NUM_DECODES: usize = 32;

pub(super) fn bench_batching(args: &BatchingArgs) -> Result<()> {
    ensure!(
        args.rates.iter().all(|rate| rate.is_finite() && *rate > 0.0),
        "--rates: requests a second must be over 0"
    );
    let is_time = |ms: &f64| *ms > 0.0 && Duration::try_from_secs_f64(ms / 1e3).is_ok();
    ensure!(args.target_itl_ms.iter().all(is_time), "--target-itl-ms must be over 0");
    let (name, files) = open_measured(&args.measured, &args.engine)?;
    let device = choose(args.engine.device, resolve_gpu_use(&args.engine))?;
    let sizes = Sizes::new(args, matches!(device, Chosen::Cpu { .. }));
    let mut engine_args = args.engine.clone();
    engine_args.memory = engine_args.memory.measured();
    if engine_args.max_model_len.is_none() {
        let needed = sizes.max_model_len(args);
        let most = files.config.max_position;
        ensure!(needed <= most, "{name} was made for {most} tokens; {needed} are needed: --scale");
        engine_args.max_model_len = NonZeroUsize::new(needed);
    }
    let outputs = Outputs::create(&args.files)?;
    let workload = Workload { num_requests: None, max_queue: MAX_QUEUE, overlap: true };
    let model = Model { name: &name, path: None, files: &files };
    let run = RunExperiments { args, sizes, name: &name };
    let figures = with_engine(&device, &model, &engine_args, workload, run)?;
    outputs.write(|| Ok(figures.clone()), || batching_plots::sheet(&figures))
}

/// What depends on the kind of device, unless told otherwise.
#[derive(Clone, Copy)]
struct Sizes {
    scale: usize,
    num_prompts: usize,
    rate_prompts: usize,
}

impl Sizes {
    fn new(args: &BatchingArgs, is_cpu: bool) -> Self {
        let usual = |asked: Option<NonZeroUsize>, on_cpu, on_gpu| {
            asked.map_or(if is_cpu { on_cpu } else { on_gpu }, NonZeroUsize::get)
        };
        Self {
            scale: usual(args.scale, 8, 1),
            num_prompts: usual(args.num_prompts, 64, 1000),
            rate_prompts: usual(args.rate_prompts, 32, 100),
        }
    }

    fn long_prompt(&self, args: &BatchingArgs) -> usize {
        args.long_prompt.map_or(32_768 / self.scale, NonZeroUsize::get)
    }

    fn max_model_len(&self, args: &BatchingArgs) -> usize {
        let has_long = args.experiments.contains(&BatchingExperiment::LongPrompt);
        let long = if has_long { self.long_prompt(args) + 16 } else { 0 };
        (LONGEST / self.scale).max(16).max(long)
    }
}

struct RunExperiments<'a> {
    args: &'a BatchingArgs,
    sizes: Sizes,
    name: &'a str,
}

impl UseEngine for RunExperiments<'_> {
    type Output = Value;

    fn use_engine<B: Backend>(self, assembled: Assembled<B>) -> Result<Value> {
        let Assembled { engine, handle, config, device, summary, .. } = assembled;
        eprintln!("{summary}");
        let mut rig = Rig::start(engine, handle)?;
        let mut figures = json!({
            "bench": "batching",
            "version": env!("CARGO_PKG_VERSION"),
            "model": self.name,
            "device": device,
            "engine": engine_json(&config),
            "scale": self.sizes.scale,
            "seed": SEED,
        });
        for experiment in &self.args.experiments {
            let (key, rows) = match experiment {
                BatchingExperiment::Burst => ("burst", self.burst(&mut rig, &config)?),
                BatchingExperiment::Rates => {
                    let measured = figures["burst"].as_array().and_then(|rows| rows.last());
                    let rates = self.rates(measured);
                    ("rates", self.run_rates(&mut rig, rates, &config)?)
                }
                BatchingExperiment::LongPrompt => ("long_prompt", self.long_prompt(&mut rig)?),
                BatchingExperiment::Tenants => ("tenants", self.tenants(&mut rig, &config)?),
            };
            figures[key] = rows;
        }
        rig.stop()?;
        Ok(figures)
    }
}

impl RunExperiments<'_> {
    fn lengths(&self) -> Lengths {
        Lengths { scale: self.sizes.scale, seed: SEED }
    }

    fn burst(&self, rig: &mut Rig, config: &EngineConfig) -> Result<Value> {
        let overlaps = match self.args.overlap {
            OverlapChoice::On => vec![true],
            OverlapChoice::Off => vec![false],
            OverlapChoice::Both => vec![false, true],
        };
        let burst = Burst {
            lengths: self.lengths(),
            num_prompts: self.sizes.num_prompts,
            num_published_batches: self.args.static_batches.get(),
            limits: self.args.limits.clone(),
            max_num_seqs: config.max_num_seqs,
            overlaps,
        };
        println!("all at once: prompts of {} tokens", burst.lengths.burst_prompt());
        println!(
            " limit  mode                     rows  overlap  requests  wall s  tokens/s  ratio"
        );
        // The first mode of each limit is what the others are compared with.
        let mut base = 1.0;
        let rows = run_burst(rig, &burst, &mut |row: &BurstRow| {
            if row.mode.ends_with("published size") {
                base = row.tokens_per_s;
            }
            println!(
                "{:6}  {:23}  {:5}  {:>7}  {:8}  {:6.2}  {:8.0}  {:5.2}",
                row.limit,
                row.mode,
                row.batch_size,
                if row.overlap { "on" } else { "off" },
                row.num_requests,
                row.wall_s,
                row.tokens_per_s,
                row.tokens_per_s / base
            );
        })?;
        Ok(serde_json::to_value(rows)?)
    }

    /// Those asked for, or parts of what a burst's run served.
    fn rates(&self, measured: Option<&Value>) -> Vec<f64> {
        let served =
            measured.and_then(|row| Some(row["num_requests"].as_f64()? / row["wall_s"].as_f64()?));
        match (&self.args.rates[..], served) {
            ([], Some(served)) => [0.25, 0.5, 0.75].map(|part| part * served).to_vec(),
            ([], None) => vec![1.0, 4.0],
            (asked, _) => asked.to_vec(),
        }
    }

    fn run_rates(
        &self,
        rig: &mut Rig,
        requests_per_s: Vec<f64>,
        config: &EngineConfig,
    ) -> Result<Value> {
        let rates = Rates {
            lengths: self.lengths(),
            num_prompts: self.sizes.rate_prompts,
            limit: self.args.limits.iter().copied().max().unwrap_or(1536),
            requests_per_s,
            max_num_seqs: config.max_num_seqs,
        };
        println!("\nat random times, output limit {}", rates.limit);
        println!("  req/s  mode             latency p50, p99 s  ms/token  ttft s  itl p50, p99 ms");
        let rows = run_rates(rig, &rates, &mut |row: &RatesRow| {
            println!(
                "{:7.2}  {:15}  {:9.3}  {:8.3}  {:8.1}  {:6.3}  {:7.1}  {:7.1}",
                row.requests_per_s,
                row.mode,
                row.latency_p50_s,
                row.latency_p99_s,
                row.latency_per_token_p50_ms,
                row.ttft_p50_s,
                row.itl_p50_ms,
                row.itl_p99_ms
            );
        })?;
        Ok(serde_json::to_value(rows)?)
    }

    fn long_prompt(&self, rig: &mut Rig) -> Result<Value> {
        let lengths = self.lengths();
        let long = LongPrompt {
            num_decodes: NUM_DECODES,
            decode_prompt: lengths.scaled(256),
            decode_output: lengths.scaled(1536),
            prompt_len: self.sizes.long_prompt(self.args),
            at: Duration::from_secs(1),
            chunks: self.args.chunks.iter().map(|chunk| chunk.get()).collect(),
            targets: self.args.target_itl_ms.iter().map(|ms| millis(*ms)).collect(),
        };
        println!("\na prompt of {} tokens enters {NUM_DECODES} decodes", long.prompt_len);
        println!(
            "mode       chunk  target ms  ttft s  itl p50, p99, max ms         p99 beside  tokens/s"
        );
        let rows = run_long_prompt(rig, &long, &mut |row: &LongPromptRow| {
            println!(
                "{:9}  {:>5}  {:>9}  {:6.3}  {:8.2}  {:8.2}  {:8.2}  {:10.2}  {:8.0}",
                row.mode,
                row.chunk.map_or("-".to_owned(), |chunk| chunk.to_string()),
                row.target_ms.map_or("-".to_owned(), |ms| ms.to_string()),
                row.ttft_s,
                row.itl_p50_ms,
                row.itl_p99_ms,
                row.itl_max_ms,
                row.itl_p99_beside_prompt_ms,
                row.tokens_per_s
            );
        })?;
        Ok(serde_json::to_value(rows)?)
    }

    fn tenants(&self, rig: &mut Rig, config: &EngineConfig) -> Result<Value> {
        let lengths = self.lengths();
        let tenants = Tenants {
            prompt_len: lengths.scaled(256),
            output_len: lengths.scaled(128),
            num_modest: 16,
            every: Duration::from_millis(200),
            num_flood: 4 * config.max_num_seqs,
        };
        println!("\none user of 5 requests a second beside a flood of {}", tenants.num_flood);
        println!("mode          latency p50, p95 s  ttft s  itl ms  slowdown");
        let rows = run_tenants(rig, &tenants, &mut |row: &TenantsRow| {
            println!(
                "{:12}  {:9.3}  {:8.3}  {:6.3}  {:6.2}  {:8.2}",
                row.mode,
                row.latency_p50_s,
                row.latency_p95_s,
                row.ttft_p50_s,
                row.itl_p50_ms,
                row.slowdown
            );
        })?;
        Ok(serde_json::to_value(rows)?)
    }
}

fn millis(ms: f64) -> Duration {
    Duration::from_secs_f64(ms / 1e3)
}
