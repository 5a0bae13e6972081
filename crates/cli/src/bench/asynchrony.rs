//! `inflight bench async`: the reference experiment, overlap on beside off.
//!
//! # Source
//! Hugging Face, "Unlocking asynchronicity in continuous batching": what is measured and how it is
//! drawn.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::offline::{Experiment, Measured, draw, trace_path, write_timeline};
use super::outputs::{Outputs, create};
use super::run_plots;
use crate::args::{AsyncArgs, OfflineArgs, OverlapChoice};
use crate::device::{Chosen, choose};
use crate::resolve::resolve_gpu_use;

/// Tokens of each output on a GPU, as published, and on a CPU, where that would take hours.
const OUTPUT_LENS: (usize, usize) = (8192, 256);

pub(super) fn bench_async(args: &AsyncArgs) -> Result<()> {
    let outputs = Outputs::create(&args.files)?;
    let picture = args.picture.as_deref().map(|path| create("--picture", path)).transpose()?;
    let trace = |overlap| {
        let path = args.trace.as_deref()?;
        Some(create("--trace", &trace_path(path, overlap, true)))
    };
    let traces = [trace(true).transpose()?, trace(false).transpose()?];
    let offline = offline_args(args)?;
    let experiment = Experiment::new(&offline)?;
    let mut runs = Vec::new();
    for _ in 0..args.repeats.get() {
        for overlap in [true, false] {
            let measured = experiment.run(overlap)?;
            if runs.is_empty() {
                eprintln!("{}", measured.summary);
            }
            let (wall, busy) = (measured.report.wall_s, measured.report.device_busy_fraction);
            eprintln!("overlap {}: {wall:.2} s, busy {:.2} %", on_off(overlap), 100.0 * busy);
            runs.push(measured);
        }
    }
    let same_tokens = runs.iter().all(|run| run.run.tokens == runs[0].run.tokens);
    print_table(&runs);
    let last = &runs[runs.len() - 2..];
    for (file, measured) in traces.into_iter().zip(last) {
        if let Some(file) = file {
            write_timeline(file, &measured.run).context("--trace")?;
        }
    }
    if let Some(file) = picture {
        draw(file, experiment.name(), last).context("--picture")?;
    }
    let figures = || -> Result<Value> {
        let mut figures = experiment.as_json(&runs, Some(same_tokens))?;
        figures["bench"] = json!("async");
        Ok(figures)
    };
    outputs.write(figures, || run_plots::sheet(experiment.name(), last))?;
    ensure!(same_tokens, "overlap on and off gave different tokens");
    println!("the same tokens: checksum {}", runs[0].report.tokens_checksum);
    Ok(())
}

/// The same work, as `bench offline` would do it.
fn offline_args(args: &AsyncArgs) -> Result<OfflineArgs> {
    let output_len = match args.output_len {
        Some(len) => len,
        None => {
            let device = choose(args.engine.device, resolve_gpu_use(&args.engine))?;
            let is_cpu = matches!(device, Chosen::Cpu { .. });
            let len = if is_cpu { OUTPUT_LENS.1 } else { OUTPUT_LENS.0 };
            NonZeroUsize::new(len).expect("neither is 0")
        }
    };
    Ok(OfflineArgs {
        measured: args.measured.clone(),
        num_prompts: args.num_prompts,
        input_len: args.input_len,
        output_len,
        lengths: None,
        shared_prefix: 0,
        overlap: OverlapChoice::Both,
        no_warm_up: args.no_warm_up,
        files: args.files.clone(),
        trace: None,
        constraint: None,
        tokenizer: None,
        picture: None,
        draws: args.draws.clone(),
        policy: args.policy.clone(),
        engine: args.engine.clone(),
    })
}

fn on_off(overlap: bool) -> &'static str {
    if overlap { "on" } else { "off" }
}

/// Medians of all runs of a kind.
fn print_table(runs: &[Measured]) {
    let median = |overlap: bool, of: &dyn Fn(&Measured) -> f64| {
        let of_kind = runs.iter().filter(|run| run.config.overlap == overlap);
        let mut all: Vec<f64> = of_kind.map(of).collect();
        all.sort_unstable_by(f64::total_cmp);
        all[all.len() / 2]
    };
    println!("\n{:42} {:>12} {:>12} {:>9}", "overlap", "on", "off", "off / on");
    let row = |name: &str, of: &dyn Fn(&Measured) -> f64| {
        let (on, off) = (median(true, of), median(false, of));
        let ratio = if on == 0.0 { "-".to_owned() } else { format!("{:.3}", off / on) };
        println!("{name:42} {on:12.3} {off:12.3} {ratio:>9}");
    };
    row("wall, s", &|run| run.report.wall_s);
    row("output, tok/s", &|run| run.report.output_tokens_per_s);
    row("device busy, %", &|run| 100.0 * run.report.device_busy_fraction);
    for quarter in 0..4 {
        row(&format!("quarter {} of the steps, ms a step", quarter + 1), &|run| {
            run.report.quarters.get(quarter).map_or(f64::NAN, |quarter| quarter.ms_per_step)
        });
    }
    row("host waited before so many launches", &|run| run.report.num_waits_before_launch as f64);
    for phase in ["admit", "plan", "stage", "launch", "collect"] {
        row(&format!("host: {phase}, median us a step"), &|run| {
            let time = run.report.host.iter().find(|time| time.phase == phase);
            time.map_or(f64::NAN, |time| time.median_us)
        });
    }
    let causes: BTreeSet<_> = runs.iter().flat_map(|run| run.report.bubbles_s.keys()).collect();
    for cause in causes {
        row(&format!("idle, {}, ms", cause.name()), &|run| {
            1e3 * run.report.bubbles_s.get(cause).copied().unwrap_or(0.0)
        });
    }
}
