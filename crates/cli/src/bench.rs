//! `inflight bench`: measure an engine in this process.

use std::fs::{self, File};
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use inflight_backend::Backend;
use inflight_bench::{
    DEVICE_BUSY_DEFINITION, OfflineRun, OfflineWorkload, Report, TimelineWriter, WAITS_DEFINITION,
    run_offline,
};
use inflight_engine::SamplingParams;
use inflight_model::ModelFiles;
use serde_json::{Value, json};

use crate::args::{BenchCommand, EngineArgs, OfflineArgs, OverlapChoice};
use crate::assembly::{Assembled, Model, UseEngine, with_engine};
use crate::device::{Chosen, choose};
use crate::models::ModelArgument;
use crate::progress::{TokenBar, is_watched};
use crate::resolve::{Workload, resolve_gpu_use};
use crate::start::open;

pub(crate) fn bench(command: &BenchCommand) -> Result<()> {
    match command {
        BenchCommand::Offline(args) => offline(args),
    }
}

/// What is measured, once for every kind of overlap.
struct Experiment<'a> {
    args: &'a OfflineArgs,
    engine_args: EngineArgs,
    name: String,
    files: ModelFiles,
    workload: OfflineWorkload,
    device: Chosen,
}

fn offline(args: &OfflineArgs) -> Result<()> {
    let experiment = Experiment::new(args)?;
    let overlaps: &[bool] = match args.overlap {
        OverlapChoice::On => &[true],
        OverlapChoice::Off => &[false],
        OverlapChoice::Both => &[true, false],
    };
    let mut runs: Vec<(OfflineRun, Report, String)> = Vec::new();
    for &overlap in overlaps {
        let (run, summary) = experiment.run(overlap)?;
        if runs.is_empty() {
            eprintln!("{summary}");
        }
        let num_input_tokens = args.num_prompts.get() * args.input_len.get();
        let report = Report::new(&run, overlap, num_input_tokens);
        println!("{report}\n");
        if let Some(path) = &args.trace {
            write_timeline(&trace_path(path, overlap, overlaps.len() > 1), &run)?;
        }
        runs.push((run, report, summary));
    }
    let same_tokens = match &runs[..] {
        [on, off] => Some(on.0.tokens == off.0.tokens),
        _ => None,
    };
    if let Some(path) = &args.json {
        let reports: Vec<_> = runs.iter().map(|(_, report, _)| report).collect();
        write_json(path, &experiment.as_json(&reports, same_tokens)?)?;
    }
    compare(&runs, same_tokens)
}

/// Says whether overlap changed a token, and what it gained.
fn compare(runs: &[(OfflineRun, Report, String)], same_tokens: Option<bool>) -> Result<()> {
    let (Some(same), [(_, on, _), (_, off, _)]) = (same_tokens, runs) else { return Ok(()) };
    println!("overlap on is {:.3} times as fast as off", off.wall_s / on.wall_s);
    let sums = (&on.tokens_checksum, &off.tokens_checksum);
    ensure!(same, "overlap on and off gave different tokens: checksums {} and {}", sums.0, sums.1);
    println!("overlap on and off gave the same tokens: checksum {}", sums.0);
    Ok(())
}

impl<'a> Experiment<'a> {
    fn new(args: &'a OfflineArgs) -> Result<Self> {
        let (name, files) = match args.config {
            Some(config) => (config.name().to_owned(), config.dummy(args.engine.seed)?),
            None => {
                let show_progress = is_watched(args.engine.no_progress);
                let model = ModelArgument::parse(&args.model)?.fetch(show_progress)?;
                (model.name.clone(), open(&model, &args.engine)?)
            }
        };
        let mut engine_args = args.engine.clone();
        if engine_args.max_model_len.is_none() {
            let len = args.input_len.saturating_add(args.output_len.get());
            let most = files.config.max_position;
            ensure!(
                len.get() <= most,
                "--input-len and --output-len are {len} tokens together; {name} was made for {most}"
            );
            engine_args.max_model_len = Some(len);
        }
        let workload = OfflineWorkload {
            num_prompts: args.num_prompts.get(),
            input_len: args.input_len.get(),
            output_len: args.output_len.get(),
            sampling: vec![sampling(args)],
            warm_up: !args.no_warm_up,
        };
        let device = choose(engine_args.device, resolve_gpu_use(&engine_args))?;
        Ok(Self { args, engine_args, name, files, workload, device })
    }

    /// Measures once; also what the engine was, for people.
    fn run(&self, overlap: bool) -> Result<(OfflineRun, String)> {
        let num_requests = self.workload.num_prompts;
        // One request more holds the others back until all are there.
        let workload =
            Workload { num_requests: Some(num_requests), max_queue: num_requests + 1, overlap };
        let model = Model { name: &self.name, files: &self.files };
        let no_progress = self.engine_args.no_progress;
        let measure = Measure { workload: &self.workload, no_progress };
        with_engine(&self.device, &model, &self.engine_args, workload, measure)
    }

    fn as_json(&self, reports: &[&Report], same_tokens: Option<bool>) -> Result<Value> {
        let draws = &self.args.draws;
        Ok(json!({
            "version": env!("CARGO_PKG_VERSION"),
            "model": self.name,
            "device": match &self.device {
                Chosen::Cpu { .. } => "cpu".to_owned(),
                Chosen::Cuda(backend) => backend.description(),
            },
            "workload": {
                "num_prompts": self.workload.num_prompts,
                "input_len": self.workload.input_len,
                "output_len": self.workload.output_len,
                "warm_up": self.workload.warm_up,
                "temperature": draws.temperature,
                "top_p": draws.top_p,
                "top_k": draws.top_k,
                "min_p": draws.min_p,
                "repetition_penalty": draws.repetition_penalty,
                "presence_penalty": draws.presence_penalty,
                "frequency_penalty": draws.frequency_penalty,
                "logprobs": draws.logprobs,
                "seed": self.args.engine.seed,
            },
            "definitions": {
                "device_busy_fraction": DEVICE_BUSY_DEFINITION,
                "num_waits_before_launch": WAITS_DEFINITION,
            },
            "runs": serde_json::to_value(reports)?,
            "same_tokens": same_tokens,
        }))
    }
}

/// Runs a workload on an engine.
struct Measure<'a> {
    workload: &'a OfflineWorkload,
    no_progress: bool,
}

impl UseEngine for Measure<'_> {
    type Output = (OfflineRun, String);

    fn use_engine<B: Backend>(self, assembled: Assembled<B>) -> Result<Self::Output> {
        let Assembled { engine, handle, summary } = assembled;
        let num_tokens = self.workload.num_prompts.saturating_mul(self.workload.output_len);
        let bar = TokenBar::new(num_tokens as u64, self.no_progress);
        let run = run_offline(engine, handle, self.workload, &mut |done| bar.show(done))?;
        bar.finish();
        Ok((run, summary.to_string()))
    }
}

fn sampling(args: &OfflineArgs) -> SamplingParams {
    let draws = &args.draws;
    SamplingParams {
        temperature: draws.temperature,
        top_k: draws.top_k,
        top_p: draws.top_p,
        min_p: draws.min_p,
        repetition_penalty: draws.repetition_penalty,
        presence_penalty: draws.presence_penalty,
        frequency_penalty: draws.frequency_penalty,
        logit_bias: Vec::new(),
        seed: args.engine.seed,
        top_logprobs: draws.logprobs,
    }
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(value)?;
    fs::write(path, text + "\n").with_context(|| format!("--json {}", path.display()))
}

fn write_timeline(path: &Path, run: &OfflineRun) -> Result<()> {
    let write = || {
        let mut writer = TimelineWriter::new(BufWriter::new(File::create(path)?))?;
        run.steps.iter().try_for_each(|step| writer.add(step))?;
        writer.finish()
    };
    write().map(|_| ()).with_context(|| format!("--trace {}", path.display()))
}

/// `steps.json`, or of two runs `steps.on.json` and `steps.off.json`.
fn trace_path(path: &Path, overlap: bool, is_one_of_two: bool) -> PathBuf {
    if !is_one_of_two {
        return path.to_owned();
    }
    let overlap = if overlap { "on" } else { "off" };
    let extension = path.extension().map(|extension| extension.to_string_lossy());
    path.with_extension(extension.map_or(overlap.to_owned(), |old| format!("{overlap}.{old}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_timelines_have_two_names() {
        let check = |path: &str, overlap, is_one_of_two, expected: &str| {
            assert_eq!(trace_path(Path::new(path), overlap, is_one_of_two), Path::new(expected));
        };
        check("a/steps.json", true, false, "a/steps.json");
        check("a/steps.json", true, true, "a/steps.on.json");
        check("a/steps.json", false, true, "a/steps.off.json");
        check("steps", false, true, "steps.off");
    }
}
