//! `inflight bench recorder`: what it costs that every step is written down.

use std::num::NonZeroUsize;
use std::time::Duration;

use anyhow::{Result, ensure};
use inflight_backend::Backend;
use inflight_bench::plot::{Bar, Bars, Plot, Sheet};
use inflight_bench::{OfflineWorkload, RequestLengths, Watch, run_watched};
use inflight_engine::SamplingParams;
use serde_json::{Value, json};

use super::open_measured;
use super::outputs::Outputs;
use crate::args::RecorderArgs;
use crate::assembly::{Assembled, Model, UseEngine, with_engine};
use crate::device::choose;
use crate::progress::TokenBar;
use crate::resolve::{Workload, resolve_gpu_use};

pub(super) fn bench_recorder(args: &RecorderArgs) -> Result<()> {
    let outputs = Outputs::create(&args.files)?;
    let (name, files) = open_measured(&args.measured, &args.engine)?;
    let mut engine_args = args.engine.clone();
    engine_args.memory = engine_args.memory.measured();
    let (input, output) = (args.input_len.get(), args.output_len.get());
    let longest = input.saturating_add(output);
    let most = files.config.max_position;
    ensure!(longest <= most, "{longest} tokens a request; {name} was made for {most}");
    engine_args.max_model_len = NonZeroUsize::new(longest);
    let num_requests = args.num_prompts.get();
    let workload = OfflineWorkload {
        lengths: vec![RequestLengths { input, output }; num_requests],
        shared_prefix: 0,
        sampling: vec![SamplingParams { temperature: 0.0, ..SamplingParams::default() }],
        grammar: None,
        warm_up: true,
    };
    let device = choose(engine_args.device, resolve_gpu_use(&engine_args))?;
    let model = Model { name: &name, path: None, files: &files };
    let room =
        Workload { num_requests: Some(num_requests), max_queue: num_requests + 1, overlap: true };
    let no_progress = engine_args.no_progress;
    let mut pairs = Vec::new();
    for repeat in 0..args.repeats.get() {
        let run = |watch| {
            let measure = Measure { workload: &workload, watch, no_progress };
            with_engine(&device, &model, &engine_args, room, measure)
        };
        // Whoever goes first may find a cooler machine, so they take turns in that as well.
        let pair = if repeat % 2 == 0 {
            let recorded = run(Watch::Recorder)?;
            Pair { recorded, alone: run(Watch::Nobody)? }
        } else {
            let alone = run(Watch::Nobody)?;
            Pair { recorded: run(Watch::Recorder)?, alone }
        };
        ensure!(pair.recorded.tokens == pair.alone.tokens, "the recorder changed a token");
        pairs.push(pair);
    }
    let report = Report { name, pairs };
    report.print();
    outputs.write(|| Ok(report.as_json(args)), || report.sheet())
}

struct Measure<'a> {
    workload: &'a OfflineWorkload,
    watch: Watch,
    no_progress: bool,
}

/// What a run gave.
struct Speed {
    wall: Duration,
    num_steps: u64,
    tokens: Vec<Vec<u32>>,
    device: String,
}

impl UseEngine for Measure<'_> {
    type Output = Speed;

    fn use_engine<B: Backend>(self, assembled: Assembled<B>) -> Result<Speed> {
        let Assembled { engine, handle, device, .. } = assembled;
        let bar = TokenBar::new(self.workload.num_output_tokens() as u64, self.no_progress);
        let show = &mut |done| bar.show(done);
        let run = run_watched(engine, handle, self.workload, self.watch, show)?;
        bar.finish();
        let num_steps = run.num_lost_steps + run.steps.len() as u64;
        Ok(Speed { wall: run.wall, num_steps, tokens: run.tokens, device })
    }
}

impl Speed {
    fn tokens_per_s(&self) -> f64 {
        self.tokens.iter().map(Vec::len).sum::<usize>() as f64 / self.wall.as_secs_f64()
    }

    fn us_per_step(&self) -> f64 {
        1e6 * self.wall.as_secs_f64() / self.num_steps.max(1) as f64
    }
}

/// The same work both ways, one after the other.
struct Pair {
    recorded: Speed,
    alone: Speed,
}

impl Pair {
    /// How many times as long it took with the recorder.
    fn ratio(&self) -> f64 {
        self.recorded.wall.as_secs_f64() / self.alone.wall.as_secs_f64()
    }
}

struct Report {
    name: String,
    /// At least one.
    pairs: Vec<Pair>,
}

impl Report {
    fn median(&self, of: impl Fn(&Pair) -> f64) -> f64 {
        let mut all: Vec<f64> = self.pairs.iter().map(of).collect();
        all.sort_unstable_by(f64::total_cmp);
        let middle = all.len() / 2;
        if all.len() % 2 == 1 { all[middle] } else { (all[middle - 1] + all[middle]) / 2.0 }
    }

    /// Microseconds a step that the recorder adds: the median of the pairs' differences.
    fn added_us(&self) -> f64 {
        self.median(|pair| pair.recorded.us_per_step() - pair.alone.us_per_step())
    }

    fn print(&self) {
        let percent = |ratio: f64| 100.0 * (ratio - 1.0);
        println!("{:12} {:>12} {:>12} {:>12}", "", "recorded", "alone", "ratio");
        let row = |name: &str, recorded: f64, alone: f64| {
            println!("{name:12} {recorded:12.1} {alone:12.1} {:12.4}", recorded / alone);
        };
        for Pair { recorded, alone } in &self.pairs {
            row("tokens/s", recorded.tokens_per_s(), alone.tokens_per_s());
        }
        let recorded = self.median(|pair| pair.recorded.tokens_per_s());
        row("median", recorded, self.median(|pair| pair.alone.tokens_per_s()));
        let steps = self.median(|pair| pair.recorded.us_per_step());
        row("us a step", steps, self.median(|pair| pair.alone.us_per_step()));
        println!(
            "recording adds {:+.1} us to a step, {:+.2} % (median of the pairs; they lie between \
             {:+.1} and {:+.1} %)",
            self.added_us(),
            percent(self.median(Pair::ratio)),
            percent(self.pairs.iter().map(Pair::ratio).fold(f64::INFINITY, f64::min)),
            percent(self.pairs.iter().map(Pair::ratio).fold(0.0, f64::max))
        );
    }

    fn as_json(&self, args: &RecorderArgs) -> Value {
        let speed = |speed: &Speed| {
            json!({
                "wall_s": speed.wall.as_secs_f64(),
                "num_steps": speed.num_steps,
                "tokens_per_s": speed.tokens_per_s(),
            })
        };
        let run =
            |pair: &Pair| json!({"recorded": speed(&pair.recorded), "alone": speed(&pair.alone)});
        json!({
            "bench": "recorder",
            "version": env!("CARGO_PKG_VERSION"),
            "model": self.name,
            "device": self.pairs.first().map(|pair| &pair.alone.device),
            "num_prompts": args.num_prompts,
            "input_len": args.input_len,
            "output_len": args.output_len,
            "runs": self.pairs.iter().map(run).collect::<Vec<_>>(),
            "added_us_per_step": self.added_us(),
            "wall_ratio_median": self.median(Pair::ratio),
        })
    }

    fn sheet(&self) -> Sheet {
        let bar = |(i, pair): (usize, &Pair)| Bar {
            label: format!("pair {}", i + 1),
            values: vec![pair.recorded.tokens_per_s(), pair.alone.tokens_per_s()],
        };
        let device = self.pairs.first().map_or("", |pair| &pair.alone.device);
        Sheet {
            heading: format!("Inflight: the recorder's cost, {}", self.name),
            note: format!("inflight bench recorder, on {device}"),
            plots: vec![Plot::Bars(Bars {
                title: "Output".to_owned(),
                unit: "tok/s".to_owned(),
                names: vec!["recorded".to_owned(), "alone".to_owned()],
                bars: self.pairs.iter().enumerate().map(bar).collect(),
            })],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_added_is_the_median_of_the_differences() {
        let speed = |ms| Speed {
            wall: Duration::from_millis(ms),
            num_steps: 100,
            tokens: vec![vec![1; 50]; 4],
            device: String::new(),
        };
        let pair = |recorded, alone| Pair { recorded: speed(recorded), alone: speed(alone) };
        let pairs = vec![pair(1010, 1000), pair(990, 1000), pair(1030, 1000)];
        let report = Report { name: "m".into(), pairs };
        // 10.1 against 10 ms a step; 200 tokens in 1.01 s.
        assert!((report.added_us() - 100.0).abs() < 1e-6);
        assert!((report.median(Pair::ratio) - 1.01).abs() < 1e-9);
        assert!((report.pairs[0].recorded.tokens_per_s() - 200.0 / 1.01).abs() < 1e-9);
        let even = Report { pairs: vec![pair(1020, 1000), pair(1000, 1000)], ..report };
        assert!((even.median(Pair::ratio) - 1.01).abs() < 1e-9);
    }
}
