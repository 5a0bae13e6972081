//! `inflight bench kernels`: every operator alone.

use std::num::NonZeroUsize;

use anyhow::{Result, bail, ensure};
use inflight_backend::{
    Backend, CpuBackend, CpuConfig, KvDtype,
    cuda::{Numerics, Softmax},
};
use inflight_bench::plot::{Line, Lines, Plot, Sheet};
use inflight_bench::{
    DecodePeer, Judged, KernelReport, KernelWorkload, OperatorTiming, measure_kernels,
};

use super::outputs::Outputs;
use crate::args::{KernelsArgs, KvChoice};
use crate::device::{Chosen, GpuUse, choose};
use crate::progress::is_watched;
use crate::resolve::block_size_on_gpus;
use crate::start::sizes_of;

/// Most of a list's numbers: more is a slip, and takes memory beyond any device's.
const MOST: usize = 1 << 20;

/// Sizes that are measured unless told otherwise, smallest first; the rest is for GPUs.
struct Defaults {
    everywhere: &'static [usize],
    on_gpus: &'static [usize],
}

const ROWS: Defaults = Defaults { everywhere: &[1, 8, 32, 128, 512], on_gpus: &[2048, 8192] };
const BATCHES: Defaults = Defaults { everywhere: &[1, 8, 32], on_gpus: &[256] };
const CONTEXTS: Defaults = Defaults { everywhere: &[512], on_gpus: &[4096] };
const PROMPTS: Defaults = Defaults { everywhere: &[512], on_gpus: &[1024, 2048, 8192] };

pub(super) fn bench_kernels(args: &KernelsArgs) -> Result<()> {
    let gpu_use = |softmax| {
        let numerics = Numerics { kv_dtype: kv_dtype_on_gpus(args), softmax, ..<_>::default() };
        GpuUse { numerics, ..GpuUse::default() }
    };
    let device = choose(args.device, gpu_use(Softmax::Online))?;
    let workload = workload(args, matches!(device, Chosen::Cuda(_)))?;
    let outputs = Outputs::create(&args.files)?;
    let report = match &device {
        Chosen::Cuda(backend) => {
            let Chosen::Cuda(unified) = choose(args.device, gpu_use(Softmax::Unified))? else {
                bail!("the GPU was there a moment ago")
            };
            let peer = DecodePeer { name: "unified softmax", backend: &unified };
            measure(backend, Some(peer), &workload, args)?
        }
        Chosen::Cpu { .. } => {
            let detected = CpuConfig::detect();
            let num_threads = args.threads.map_or(detected.num_threads, NonZeroUsize::get);
            let kv_dtype = kv_dtype_on_cpus(args, detected.kv_dtype);
            let config = CpuConfig { num_threads, kv_dtype, ..detected };
            measure(&CpuBackend::new(config)?, None, &workload, args)?
        }
    };
    print!("{report}");
    let figures = || Ok(serde_json::to_value(&report)?);
    outputs.write(figures, || sheet(&report))
}

fn measure<B: Backend>(
    backend: &B,
    peer: Option<DecodePeer<'_, B>>,
    workload: &KernelWorkload,
    args: &KernelsArgs,
) -> Result<KernelReport> {
    let is_watched = is_watched(args.no_progress);
    measure_kernels(backend, peer, workload, &mut |timing: &OperatorTiming| {
        if is_watched {
            let OperatorTiming { operator, num_rows, us, .. } = timing;
            eprint!("\r\x1b[K{operator}, {num_rows} rows: {us:.1} us");
        }
    })
    .inspect(|_| {
        if is_watched {
            eprint!("\r\x1b[K");
        }
    })
}

/// Each operator's share of what the device could do, and how long it takes.
fn sheet(report: &KernelReport) -> Sheet {
    let mut names: Vec<&str> = Vec::new();
    for judged in &report.operators {
        if !names.contains(&judged.timing.operator.as_str()) {
            names.push(&judged.timing.operator);
        }
    }
    let line = |name: &str, of: &dyn Fn(&Judged) -> f64| Line {
        name: name.to_owned(),
        points: report
            .operators
            .iter()
            .filter(|judged| judged.timing.operator == name)
            .map(|judged| (judged.timing.num_rows as f64, of(judged)))
            .collect(),
    };
    let panel = |title: &str, y_label: &str, names: &[&str], of: &dyn Fn(&Judged) -> f64| {
        Plot::Lines(Lines {
            title: title.to_owned(),
            x_label: "rows, tokens or sequences".to_owned(),
            y_label: y_label.to_owned(),
            is_x_log: true,
            lines: names.iter().map(|name| line(name, of)).collect(),
        })
    };
    let share = |judged: &Judged| 100.0 * judged.roofline_fraction;
    let time = |judged: &Judged| judged.timing.us;
    let parts = names.chunks(4);
    Sheet {
        heading: "Inflight: every operator alone".to_owned(),
        note: report.device.clone(),
        plots: parts
            .flat_map(|names| {
                [
                    panel("Share of the roofline", "%", names, &share),
                    panel("Time", "us", names, &time),
                ]
            })
            .collect(),
    }
}

fn kv_dtype_on_gpus(args: &KernelsArgs) -> KvDtype {
    match args.kv_cache_dtype {
        KvChoice::Fp8 => KvDtype::Fp8,
        KvChoice::Int8 => KvDtype::Int8,
        KvChoice::Auto | KvChoice::F32 | KvChoice::F16 | KvChoice::Bf16 | KvChoice::Int4 => {
            KvDtype::Bf16
        }
    }
}

fn kv_dtype_on_cpus(args: &KernelsArgs, auto: KvDtype) -> KvDtype {
    match args.kv_cache_dtype {
        KvChoice::Auto => auto,
        KvChoice::F32 => KvDtype::F32,
        KvChoice::F16 => KvDtype::F16,
        KvChoice::Bf16 => KvDtype::Bf16,
        KvChoice::Fp8 => KvDtype::Fp8,
        KvChoice::Int8 => KvDtype::Int8,
        KvChoice::Int4 => KvDtype::Int4,
    }
}

fn workload(args: &KernelsArgs, on_gpu: bool) -> Result<KernelWorkload> {
    let list = |flag: &str, given: &[NonZeroUsize], defaults: &Defaults| {
        let more = if on_gpu { defaults.on_gpus } else { &[] };
        let given: Vec<usize> = given.iter().map(|number| number.get()).collect();
        let over = given.iter().find(|number| **number > MOST);
        ensure!(over.is_none(), "{flag}: {MOST} is the most");
        Ok(if given.is_empty() { [defaults.everywhere, more].concat() } else { given })
    };
    let usual_block_size = if on_gpu { block_size_on_gpus(kv_dtype_on_gpus(args)) } else { 16 };
    Ok(KernelWorkload {
        config: sizes_of(args.config, &args.model, args.no_progress)?,
        weights: args.weights,
        block_size: args.block_size.map_or(usual_block_size, NonZeroUsize::get),
        num_rows: list("--rows", &args.rows, &ROWS)?,
        batches: list("--batches", &args.batches, &BATCHES)?,
        contexts: list("--contexts", &args.contexts, &CONTEXTS)?,
        prompts: list("--prompts", &args.prompts, &PROMPTS)?,
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{BenchCommand, Cli, Command};

    fn parse(arguments: &[&str]) -> KernelsArgs {
        let arguments = ["inflight", "bench", "kernels"].iter().chain(arguments);
        let Command::Bench(bench) = Cli::try_parse_from(arguments).unwrap().command else {
            panic!("a bench")
        };
        let BenchCommand::Kernels(args) = bench.command else { panic!("kernels") };
        args
    }

    #[test]
    fn lists_are_those_given_or_suit_the_device() {
        let args = parse(&["--config", "tiny", "--rows", "3,5"]);
        let on_cpu = workload(&args, false).unwrap();
        assert_eq!((on_cpu.num_rows, on_cpu.contexts), (vec![3, 5], vec![512]));
        let on_gpu = workload(&args, true).unwrap();
        assert_eq!((on_gpu.num_rows, on_gpu.contexts), (vec![3, 5], vec![512, 4096]));
        let args = parse(&["--config", "tiny", "--rows", "99999999"]);
        assert!(workload(&args, true).unwrap_err().to_string().starts_with("--rows"));
    }

    #[test]
    fn a_gpu_that_is_not_there_is_refused() {
        let args = parse(&["--config", "tiny", "--device", "cuda:1000000"]);
        let error = format!("{:#}", bench_kernels(&args).unwrap_err());
        assert!(error.starts_with("--device cuda: no CUDA device"), "{error}");
    }

    #[test]
    fn a_tiny_model_is_measured_on_the_cpu_with_every_operator() {
        let folder = std::env::temp_dir().join(format!("inflight-kernels-{}", std::process::id()));
        let path = folder.to_str().expect("temporary folders have plain names");
        let args = parse(&[
            "--config",
            "tiny",
            "--device",
            "cpu",
            "--rows",
            "2",
            "--batches",
            "3",
            "--contexts",
            "20",
            "--prompts",
            "9",
            "--threads",
            "1",
            "--json",
            path,
        ]);
        bench_kernels(&args).unwrap();
        let json: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&folder).unwrap()).unwrap();
        std::fs::remove_file(&folder).unwrap();
        let operators = json["operators"].as_array().unwrap();
        let names: Vec<&str> =
            operators.iter().map(|operator| operator["operator"].as_str().unwrap()).collect();
        let expected = [
            "qkv",
            "attention output",
            "gate and up",
            "down",
            "logits",
            "rms_norm",
            "silu_and_mul",
            "rope_and_cache",
            "decode attention",
            "sample, greedy",
            "prefill attention",
        ];
        assert_eq!(names, expected);
        for operator in operators {
            let number = |key: &str| operator[key].as_f64().unwrap();
            let gb = number("bytes") / number("us") / 1e3;
            assert!((gb / number("gb_per_s") - 1.0).abs() < 1e-6, "{operator}");
            assert!(number("roofline_us") > 0.0 && number("us") > 0.0, "{operator}");
        }
    }
}
