//! `inflight bench chats`: chats that come back, and where their beginnings were.

use std::time::Duration;

use anyhow::{Result, ensure};
use inflight_backend::Backend;
use inflight_bench::plot::{Bar, Bars, Plot, Sheet};
use inflight_bench::{ChatsPhase, ChatsReport, ChatsWorkload, run_chats};
use inflight_engine::EngineConfig;
use serde_json::{Value, json};

use super::open_measured;
use super::outputs::Outputs;
use crate::args::ChatsArgs;
use crate::assembly::{Assembled, Model, UseEngine, with_engine};
use crate::device::choose;
use crate::resolve::{Workload, resolve_gpu_use};

pub(super) fn bench_chats(args: &ChatsArgs) -> Result<()> {
    let outputs = Outputs::create(&args.files)?;
    let (name, files) = open_measured(&args.measured, &args.engine)?;
    let mut engine_args = args.engine.clone();
    let stream_len = args.stream_len();
    let longest = args.prefix_len.get() + args.turn_len.get() + args.output_len.get();
    let longest = longest.max(stream_len.0 + stream_len.1);
    let max_model_len = engine_args.max_model_len.map_or(longest, |len| len.get());
    engine_args.max_model_len = Some(max_model_len.max(longest).try_into()?);
    let device = choose(engine_args.device, resolve_gpu_use(&engine_args))?;
    let model = Model { name: &name, path: None, files: &files };
    let workload = Workload::serving(args.streams + 64, true);
    let measured = with_engine(&device, &model, &engine_args, workload, Measure { args })?;
    print(&measured.report, &measured.workload);
    outputs.write(|| Ok(measured.as_json(&name)), || measured.sheet(&name))
}

struct Measure<'a> {
    args: &'a ChatsArgs,
}

/// What a run gave, and on what.
struct Measured {
    report: ChatsReport,
    workload: ChatsWorkload,
    config: EngineConfig,
    device: String,
}

impl UseEngine for Measure<'_> {
    type Output = Measured;

    fn use_engine<B: Backend>(self, assembled: Assembled<B>) -> Result<Measured> {
        let Assembled { engine, handle, config, device, summary, .. } = assembled;
        eprint!("{summary}");
        let workload = self.args.workload(&config)?;
        let report = run_chats(engine, handle, &workload, &mut |phase| eprintln!("{phase}"))?;
        Ok(Measured { report, workload, config, device })
    }
}

impl Measured {
    fn as_json(&self, name: &str) -> Value {
        let Self { report, workload, config, device } = self;
        json!({
            "bench": "chats",
            "version": env!("CARGO_PKG_VERSION"),
            "model": name,
            "device": device,
            "kv_cache_tokens": config.num_blocks * config.block_size,
            "host_tokens": config.memory.num_swap_blocks * config.block_size,
            "num_chats": workload.num_chats,
            "prefix_len": workload.prefix_len,
            "num_streams": workload.num_streams,
            "interval_ms": workload.interval.as_millis() as u64,
            "phases": report.phases,
        })
    }

    /// What a turn waits for, what is found, and what that costs the streams.
    fn sheet(&self, name: &str) -> Sheet {
        let bars = |title: &str, unit: &str, names: &[&str], of: fn(&ChatsPhase) -> Vec<f64>| {
            let bar = |phase: &ChatsPhase| Bar { label: phase.name.to_owned(), values: of(phase) };
            // Without chats there is nothing to tell of turns.
            let phases =
                self.report.phases.iter().filter(|phase| of(phase).iter().any(|v| *v > 0.0));
            Plot::Bars(Bars {
                title: title.to_owned(),
                unit: unit.to_owned(),
                names: names.iter().map(|name| (*name).to_owned()).collect(),
                bars: phases.map(bar).collect(),
            })
        };
        Sheet {
            heading: format!("Inflight: chats that come back, {name}"),
            note: format!("inflight bench chats, on {}", self.device),
            plots: vec![
                bars("Time to a turn's first token", "ms", &["p50", "p90"], |phase| {
                    phase.ttft_ms.to_vec()
                }),
                bars("Tokens that were found", "%", &[""], |phase| {
                    vec![100.0 * phase.cached_share]
                }),
                bars("All streams together", "tok/s", &[""], |phase| {
                    vec![phase.stream_tokens_per_s]
                }),
            ],
        }
    }
}

impl ChatsArgs {
    /// Tokens of a stream's prompt, and tokens that it generates.
    fn stream_len(&self) -> (usize, usize) {
        (64, self.prefix_len.get().clamp(64, 960))
    }

    fn workload(&self, config: &EngineConfig) -> Result<ChatsWorkload> {
        let chat_len = self.prefix_len.get() + self.turn_len.get() + self.output_len.get();
        let (prompt_len, generated) = self.stream_len();
        let pool = config.num_blocks * config.block_size;
        let for_chats = pool.saturating_sub(self.streams * (prompt_len + generated));
        ensure!(
            for_chats >= 2 * chat_len,
            "beside {} streams the KV cache of {pool} tokens has room for {for_chats}; two chats \
             take {}",
            self.streams,
            2 * chat_len
        );
        ensure!(
            self.working_set >= 0.1 && self.working_set <= 1e6,
            "--working-set is {}; it must be at least 0.1",
            self.working_set
        );
        Ok(ChatsWorkload {
            num_chats: ((self.working_set * pool as f64) as usize).div_ceil(self.prefix_len.get()),
            num_warm_chats: (for_chats / (2 * chat_len)).max(1),
            prefix_len: self.prefix_len.get(),
            turn_len: self.turn_len.get(),
            output_len: self.output_len.get(),
            num_streams: self.streams,
            stream_len: (prompt_len, generated),
            interval: Duration::from_millis(self.interval_ms),
            turns_per_phase: self.turns.get(),
        })
    }
}

fn print(report: &ChatsReport, workload: &ChatsWorkload) {
    let ChatsWorkload { num_chats, prefix_len, num_streams, .. } = workload;
    println!("{num_chats} chats of {prefix_len} tokens, {num_streams} streams");
    let titles = ["TTFT p50 ms", "p90 ms", "cached %", "fetched", "lost", "streams tok/s"];
    let [p50, p90, cached, fetched, lost, streams] = titles;
    println!("{:>12} {p50:>12} {p90:>9} {cached:>9} {fetched:>9} {lost:>7} {streams:>14}", "");
    for phase in &report.phases {
        let [p50, p90] = phase.ttft_ms;
        println!(
            "{:>12} {p50:>12.1} {p90:>9.1} {:>9.1} {:>9} {:>7} {:>14.1}",
            phase.name,
            100.0 * phase.cached_share,
            phase.num_fetched_blocks,
            phase.num_lost_blocks,
            phase.stream_tokens_per_s
        );
    }
    if let [alone, device, host, recomputed] = &report.phases[..] {
        let ratio = host.ttft_ms[0] / recomputed.ttft_ms[0];
        println!("time to first token from the host: {:.1} % of recomputing", 100.0 * ratio);
        let loss = |than: f64| 100.0 * (1.0 - host.stream_tokens_per_s / than);
        println!(
            "streams beside chats from the host: {:+.1} % of those beside chats on the device, \
             {:+.1} % of those alone",
            -loss(device.stream_tokens_per_s),
            -loss(alone.stream_tokens_per_s)
        );
    }
}
