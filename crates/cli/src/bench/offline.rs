//! `inflight bench offline`: many requests at once through an engine in this process.

use std::fs;
use std::io::{self, Write};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use inflight_backend::Backend;
use inflight_bench::{
    DEVICE_BUSY_DEFINITION, OfflineRun, OfflineWorkload, Report, RequestLengths, WAITS_DEFINITION,
    run_offline,
};
use inflight_engine::{EngineConfig, SamplingParams};
use inflight_model::ModelFiles;
use inflight_observe::{Panel, TimelineWriter, write_picture};
use serde_json::{Value, json};

use super::outputs::{Outputs, create};
use super::{constraint, engine_json, open_measured, run_plots};
use crate::args::{EngineArgs, OfflineArgs, OverlapChoice, PolicyArgs};
use crate::assembly::{Assembled, Model, UseEngine, with_engine};
use crate::device::{Chosen, choose};
use crate::policy::resolve_policy;
use crate::progress::TokenBar;
use crate::resolve::{Workload, resolve_gpu_use};
use crate::summary::Summary;

/// What is measured, once for every kind of overlap.
pub(super) struct Experiment<'a> {
    args: &'a OfflineArgs,
    engine_args: EngineArgs,
    name: String,
    files: ModelFiles,
    workload: OfflineWorkload,
    device: Chosen,
}

pub(super) fn bench_offline(args: &OfflineArgs) -> Result<()> {
    let experiment = Experiment::new(args)?;
    let overlaps: &[bool] = match args.overlap {
        OverlapChoice::On => &[true],
        OverlapChoice::Off => &[false],
        OverlapChoice::Both => &[true, false],
    };
    let outputs = Outputs::create(&args.files)?;
    let trace = |&overlap: &bool| {
        let path = args.trace.as_deref()?;
        Some(create("--trace", &trace_path(path, overlap, overlaps.len() > 1)))
    };
    let picture = args.picture.as_deref().map(|path| create("--picture", path)).transpose()?;
    let traces = overlaps.iter().map(trace).map(Option::transpose).collect::<Result<Vec<_>>>()?;
    let mut runs = Vec::new();
    for (&overlap, trace) in overlaps.iter().zip(traces) {
        let measured = experiment.run(overlap)?;
        if runs.is_empty() {
            eprintln!("{}", measured.summary);
        }
        println!("{}\n", measured.report);
        if let Some(file) = trace {
            write_timeline(file, &measured.run).context("--trace")?;
        }
        runs.push(measured);
    }
    if let Some(file) = picture {
        draw(file, &experiment.name, &runs).context("--picture")?;
    }
    let same_tokens = match &runs[..] {
        [on, off] => Some(on.run.tokens == off.run.tokens),
        _ => None,
    };
    let figures = || experiment.as_json(&runs, same_tokens);
    outputs.write(figures, || run_plots::sheet(&experiment.name, &runs))?;
    compare(&runs, same_tokens)
}

/// Says whether overlap changed a token, and what it gained.
fn compare(runs: &[Measured], same_tokens: Option<bool>) -> Result<()> {
    let (Some(same), [on, off]) = (same_tokens, runs) else { return Ok(()) };
    let (on, off) = (&on.report, &off.report);
    println!("overlap on is {:.3} times as fast as off", off.wall_s / on.wall_s);
    let sums = (&on.tokens_checksum, &off.tokens_checksum);
    ensure!(same, "overlap on and off gave different tokens: checksums {} and {}", sums.0, sums.1);
    println!("overlap on and off gave the same tokens: checksum {}", sums.0);
    Ok(())
}

impl<'a> Experiment<'a> {
    pub(super) fn new(args: &'a OfflineArgs) -> Result<Self> {
        let (name, files) = open_measured(&args.measured, &args.engine)?;
        let mut engine_args = args.engine.clone();
        engine_args.memory = engine_args.memory.measured();
        let lengths = request_lengths(args)?;
        if engine_args.max_model_len.is_none() {
            engine_args.max_model_len = Some(longest(&lengths, &name, files.config.max_position)?);
        }
        let workload = OfflineWorkload {
            lengths,
            shared_prefix: args.shared_prefix,
            sampling: vec![sampling(args)],
            grammar: constraint::grammar(args, &files)?,
            warm_up: !args.no_warm_up,
        };
        let device = choose(engine_args.device, resolve_gpu_use(&engine_args))?;
        Ok(Self { args, engine_args, name, files, workload, device })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Measures once.
    pub(super) fn run(&self, overlap: bool) -> Result<Measured> {
        let num_requests = self.workload.lengths.len();
        // One request more holds the others back until all are there.
        let workload =
            Workload { num_requests: Some(num_requests), max_queue: num_requests + 1, overlap };
        let model = Model { name: &self.name, path: None, files: &self.files };
        let no_progress = self.engine_args.no_progress;
        let policy = &self.args.policy;
        let measure = Measure { workload: &self.workload, policy, no_progress };
        with_engine(&self.device, &model, &self.engine_args, workload, measure)
    }

    pub(super) fn as_json(&self, runs: &[Measured], same_tokens: Option<bool>) -> Result<Value> {
        let draws = &self.args.draws;
        let run = |measured: &Measured| {
            let mut figures = serde_json::to_value(&measured.report)?;
            figures["engine"] = engine_json(&measured.config);
            Ok(figures)
        };
        Ok(json!({
            "bench": "offline",
            "version": env!("CARGO_PKG_VERSION"),
            "model": self.name,
            "device": runs.first().map(|measured| &measured.device),
            "workload": {
                "num_prompts": self.workload.lengths.len(),
                "num_input_tokens": self.workload.num_input_tokens(),
                "num_output_tokens": self.workload.num_output_tokens(),
                "lengths": self.args.lengths,
                "shared_prefix": self.workload.shared_prefix,
                "warm_up": self.workload.warm_up,
                "constraint": self.args.constraint.map(|_| "json"),
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
            "runs": runs.iter().map(run).collect::<Result<Vec<_>>>()?,
            "same_tokens": same_tokens,
        }))
    }
}

/// Runs a workload on an engine.
struct Measure<'a> {
    workload: &'a OfflineWorkload,
    policy: &'a PolicyArgs,
    no_progress: bool,
}

/// What a run gave, and on what.
pub(super) struct Measured {
    pub(super) run: OfflineRun,
    pub(super) report: Report,
    pub(super) config: EngineConfig,
    pub(super) device: String,
    pub(super) summary: Summary,
}

impl UseEngine for Measure<'_> {
    type Output = Measured;

    fn use_engine<B: Backend>(self, assembled: Assembled<B>) -> Result<Measured> {
        let Assembled { mut engine, handle, config, device, summary, .. } = assembled;
        engine.set_policy(resolve_policy(self.policy, config.max_num_seqs)?)?;
        let bar = TokenBar::new(self.workload.num_output_tokens() as u64, self.no_progress);
        let run = run_offline(engine, handle, self.workload, &mut |done| bar.show(done))?;
        bar.finish();
        let report = Report::new(&run, config.overlap, self.workload.num_input_tokens());
        Ok(Measured { run, report, config, device, summary })
    }
}

/// How long every request is.
fn request_lengths(args: &OfflineArgs) -> Result<Vec<RequestLengths>> {
    let Some(path) = &args.lengths else {
        let (input, output) = (args.input_len.get(), args.output_len.get());
        return Ok(vec![RequestLengths { input, output }; args.num_prompts.get()]);
    };
    let text = fs::read_to_string(path).with_context(|| format!("--lengths {}", path.display()))?;
    let pairs: Vec<[NonZeroUsize; 2]> = serde_json::from_str(&text)
        .with_context(|| format!("--lengths {}: no list of pairs [in, out]", path.display()))?;
    ensure!(!pairs.is_empty(), "--lengths {}: an empty list", path.display());
    let of_pair = |[input, output]: [NonZeroUsize; 2]| RequestLengths {
        input: input.get(),
        output: output.get(),
    };
    Ok(pairs.into_iter().map(of_pair).collect())
}

/// The most tokens that a request has, which are at most `most`.
fn longest(lengths: &[RequestLengths], model: &str, most: usize) -> Result<NonZeroUsize> {
    let tokens = lengths.iter().map(|lengths| lengths.input.saturating_add(lengths.output));
    let len = tokens.max().and_then(NonZeroUsize::new).context("no requests")?;
    ensure!(
        len.get() <= most,
        "--input-len and --output-len, or --lengths: {len} tokens together; {model} was made for \
         {most}"
    );
    Ok(len)
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
        seed: args.engine.seed,
        top_logprobs: draws.logprobs,
        ..SamplingParams::default()
    }
}

pub(super) fn write_timeline(file: impl Write, run: &OfflineRun) -> io::Result<()> {
    let mut writer = TimelineWriter::new(file)?;
    run.steps.iter().try_for_each(|step| writer.add(step))?;
    writer.finish().map(|_| ())
}

/// Draws the runs one below the other, at the same scale.
pub(super) fn draw(mut file: impl Write, name: &str, runs: &[Measured]) -> io::Result<()> {
    let panels: Vec<_> = runs
        .iter()
        .map(|Measured { run, config, .. }| Panel {
            title: if config.overlap { "overlap on" } else { "overlap off" },
            steps: &run.steps,
        })
        .collect();
    write_picture(&mut file, &format!("Inflight: {name}"), &panels)?;
    file.flush()
}

/// `steps.json`, or of two runs `steps.on.json` and `steps.off.json`.
pub(super) fn trace_path(path: &Path, overlap: bool, is_one_of_two: bool) -> PathBuf {
    if !is_one_of_two {
        return path.to_owned();
    }
    let overlap = if overlap { "on" } else { "off" };
    let extension = path.extension().map(|extension| extension.to_string_lossy());
    path.with_extension(extension.map_or(overlap.to_owned(), |old| format!("{overlap}.{old}")))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{BenchCommand, Cli, Command};

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

    #[test]
    fn requests_that_differ_in_length() {
        let path = std::env::temp_dir().join(format!("lengths-{}.json", std::process::id()));
        let read = |text: &str| {
            fs::write(&path, text).unwrap();
            let file = path.to_str().unwrap();
            let arguments = ["inflight", "bench", "offline", "--lengths", file];
            let Command::Bench(args) = Cli::try_parse_from(arguments).unwrap().command else {
                panic!("another command")
            };
            let BenchCommand::Offline(args) = args.command else { panic!("another experiment") };
            request_lengths(&args)
        };
        let lengths = read("[[151, 368], [117, 1]]").unwrap();
        let expected =
            [(151, 368), (117, 1)].map(|(input, output)| RequestLengths { input, output });
        assert_eq!(lengths, expected);
        assert_eq!(longest(&lengths, "m", 519).unwrap().get(), 519);
        assert!(longest(&lengths, "m", 518).unwrap_err().to_string().contains("519"));
        for wrong in ["[]", "[[1, 0]]", "[[1]]", "{}", "[[1, 2"] {
            assert!(read(wrong).unwrap_err().to_string().contains("--lengths"), "{wrong}");
        }
        fs::remove_file(path).unwrap();
    }
}
