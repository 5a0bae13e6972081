//! `inflight simulate`: a model on a GPU under a load, in virtual time.

use std::io::Write;
use std::num::NonZeroUsize;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use inflight_backend::{Dtype, KvDtype};
use inflight_engine::{EngineConfig, KvKeep, MemoryConfig};
use inflight_model::{ModelConfig, ModelFiles, kv_bytes_per_block};
use inflight_sim::plan::{
    Aims, Fleet, Lengths, PlanReport, Planned, Workload, gpus_needed, simulate,
};
use inflight_sim::{CostModel, Gpu, SimBackend, SimConfig};
use serde_json::{Value, json};

use crate::args::{
    LoadArgs, Quantization, SimulateArgs, SimulatedDeviceArgs, SimulatedKv, SpreadChoice, Switch,
};
use crate::bench::outputs::create;
use crate::models::ModelArgument;
use crate::policy::resolve_policy;
use crate::swap::{give_host_memory, resolve_host_bytes};

/// Operators take up to this share longer than they should.
const NOISE: f64 = 0.02;
/// Bytes of host memory of a machine that has such a GPU.
const HOST_BYTES: u64 = 256 << 30;

pub(crate) fn simulate_load(args: &SimulateArgs) -> Result<()> {
    let json = args.json.as_deref().map(|path| create("--json", path)).transpose()?;
    let (name, files) = open(args)?;
    let cost = cost_model(args, &files.config)?;
    let workload = workload(&args.load)?;
    let engine = engine(args, &files, &cost, &workload)?;
    let policy = resolve_policy(&args.policy, engine.max_num_seqs)?;
    let aims = Aims { ttft_ms: args.policy.target_ttft_ms, itl_ms: args.policy.target_itl_ms };
    let planned = Planned {
        model: &files.config,
        weights: &files.weights,
        cost,
        policy,
        noise: NOISE,
        seed: args.load.seed,
        engine: engine.clone(),
    };
    let kv_tokens = engine.num_blocks * engine.block_size;
    eprintln!("{name} on a simulated {}: a KV cache of {kv_tokens} tokens", cost.gpu.name);
    let (report, _) = simulate(&planned, &workload.arrivals(engine.max_model_len))?;
    print!("{report}");
    let has_aims = aims.ttft_ms.is_some() || aims.itl_ms.is_some();
    let fleet = match workload.rate {
        Some(_) if has_aims => needed(&planned, &workload, aims)?,
        _ => None,
    };
    if let Some(mut file) = json {
        let engine = engine_json(&engine);
        let figures = json!({
            "version": env!("CARGO_PKG_VERSION"), "model": name, "gpu": cost.gpu.name,
            "bandwidth_gb_per_s": cost.gpu.bytes_per_s / 1e9,
            "tflop_per_s": cost.gpu.flop_per_s / 1e12,
            "engine": engine, "rate": workload.rate, "seed": workload.seed,
            "one_gpu": report, "gpus_needed": fleet,
        });
        writeln!(file, "{figures:#}").and_then(|()| file.flush()).context("--json")?;
    }
    Ok(())
}

/// Says how many GPUs keep to the targets.
fn needed(planned: &Planned<'_>, workload: &Workload, aims: Aims) -> Result<Option<Fleet>> {
    println!("\nGPUs   requests/s each   TTFT p99 ms   ITL p99 ms   enough");
    let rate = workload.rate.unwrap_or_default();
    let mut show = |num_gpus: usize, report: &PlanReport, is_enough: bool| {
        let each = rate / num_gpus as f64;
        let (ttft, itl) = (report.ttft_ms.p99, report.itl_ms.p99);
        let enough = if is_enough { "yes" } else { "no" };
        println!("{num_gpus:>4}{each:>18.3}{ttft:>14.1}{itl:>13.1}   {enough}");
    };
    let fleet = gpus_needed(planned, workload, aims, &mut show)?;
    match &fleet {
        Some(fleet) => println!("GPUs needed: {}", fleet.num_gpus),
        None => println!("no number of GPUs keeps to the targets"),
    }
    Ok(fleet)
}

/// A model of which only sizes matter.
fn open(args: &SimulateArgs) -> Result<(String, ModelFiles)> {
    let (name, mut files) = match args.config {
        Some(config) => (config.name().to_owned(), config.dummy(0)?),
        None => {
            let model = ModelArgument::parse(&args.model)?.fetch(false)?;
            let is_config = |path: &Path| {
                path.extension().is_some_and(|e| e == "json") || path.join("config.json").exists()
            };
            let files = match is_config(&model.path) {
                true => ModelFiles::dummy(&model.path, 0)?,
                false => ModelFiles::open(&model.path)?,
            };
            (model.name, files)
        }
    };
    if let Some(quantization) = args.engine.quantization {
        files.round_to_fp8(quantization == Quantization::Fp8All);
    }
    Ok((name, files))
}

fn cost_model(args: &SimulateArgs, model: &ModelConfig) -> Result<CostModel> {
    let SimulatedDeviceArgs { gpu, bandwidth, flops, gpu_memory, .. } = &args.device;
    let positive = [("--bandwidth", bandwidth), ("--flops", flops), ("--gpu-memory", gpu_memory)];
    for (flag, value) in positive {
        let is_sound = value.is_none_or(|value| value.is_finite() && value > 0.0);
        ensure!(is_sound, "{flag} must be over 0");
    }
    let mut device = match (gpu.as_str(), bandwidth, flops) {
        ("cpu", Some(bandwidth), Some(flops)) => Gpu::cpu(bandwidth * 1e9, flops * 1e12),
        ("cpu", ..) => bail!("--gpu cpu needs --bandwidth and --flops"),
        (name, ..) => Gpu::named(name).with_context(|| {
            format!("--gpu {name}: known are cpu and {}", Gpu::NAMES.join(", "))
        })?,
    };
    if let Some(bandwidth) = bandwidth {
        device.bytes_per_s = bandwidth * 1e9;
    }
    if let Some(flops) = flops {
        let fp8_gain = device.fp8_flop_per_s / device.flop_per_s;
        device.flop_per_s = flops * 1e12;
        device.fp8_flop_per_s = fp8_gain * device.flop_per_s;
    }
    if let Some(memory) = gpu_memory {
        device.memory_bytes = memory * 1e9;
    }
    let mut cost = CostModel::new(device);
    if args.engine.kv_cache_dtype == SimulatedKv::Fp8 {
        // A scale for each token and head.
        cost.kv_bytes = 1.0 + 4.0 / model.head_dim as f64;
    }
    Ok(cost)
}

fn workload(args: &LoadArgs) -> Result<Workload> {
    let (input, output) = (args.input_len.get(), args.output_len.get());
    let lengths = match (&args.lengths, args.spread) {
        (Some(path), _) => Lengths::Pairs(read_pairs(path)?),
        (None, SpreadChoice::Fixed) => Lengths::Fixed { input, output },
        (None, SpreadChoice::Uniform) => Lengths::Uniform { input, output },
        (None, SpreadChoice::Exponential) => Lengths::Exponential { input, output },
    };
    let is_rate = args.rate.is_none_or(|rate| rate.is_finite() && rate > 0.0);
    ensure!(is_rate, "--rate must be over 0");
    let (num_requests, rate, seed) = (args.num_prompts.get(), args.rate, args.seed);
    Ok(Workload { lengths, num_requests, rate, seed })
}

fn read_pairs(path: &Path) -> Result<Vec<(usize, usize)>> {
    let named = || format!("--lengths {}", path.display());
    let text = std::fs::read_to_string(path).with_context(named)?;
    let pairs: Vec<(usize, usize)> = serde_json::from_str(&text).with_context(named)?;
    let is_sound = |(input, output): &(usize, usize)| {
        (1..=1 << 24).contains(input) && (1..=1 << 24).contains(output)
    };
    let wrong = pairs.iter().position(|pair| !is_sound(pair));
    ensure!(wrong.is_none(), "{}: pair {} has no lengths", named(), wrong.unwrap_or(0));
    ensure!(!pairs.is_empty(), "{}: there are no pairs", named());
    Ok(pairs)
}

fn engine(
    args: &SimulateArgs,
    files: &ModelFiles,
    cost: &CostModel,
    workload: &Workload,
) -> Result<EngineConfig> {
    let asked = &args.engine;
    let model = &files.config;
    let longest = workload.lengths.longest().clamp(2, model.max_position);
    let max_model_len = asked.max_model_len.map_or(longest, NonZeroUsize::get);
    let mut engine = EngineConfig {
        overlap: asked.overlap == Switch::On,
        max_num_seqs: asked.max_num_seqs.get(),
        max_num_batched_tokens: asked.max_num_batched_tokens.get().max(asked.max_num_seqs.get()),
        max_model_len,
        block_size: asked.block_size.get(),
        num_blocks: 1,
        memory: MemoryConfig {
            prefix_caching: args.memory.prefix_caching(),
            preemption: args.memory.preemption(),
            ..MemoryConfig::default()
        },
        kv_keep: args.memory.kv_keep(),
        max_outstanding: workload.num_requests + 1,
    };
    let keeps_all = engine.kv_keep == KvKeep::All;
    ensure!(
        keeps_all,
        "--kv-window and --kv-budget cannot be simulated: there are no keys to keep"
    );
    let kv_dtype = match asked.kv_cache_dtype {
        SimulatedKv::Bf16 => KvDtype::Bf16,
        SimulatedKv::Fp8 => KvDtype::Fp8,
    };
    let block_bytes = kv_bytes_per_block(model, kv_dtype, engine.block_size).max(1);
    let usable = cost.gpu.memory_bytes * args.device.gpu_memory_utilization;
    let steps = engine.working_bytes(model, Dtype::BF16) as f64;
    let left = usable - weights_bytes(files, cost)? - steps;
    let room = (left / block_bytes as f64).max(0.0) as usize;
    let terms = engine.kv_terms(model);
    let enough = engine.blocks_per_sequence(model).saturating_mul(engine.max_num_seqs);
    engine.num_blocks = match asked.kv_cache_tokens {
        Some(tokens) => terms.num_blocks(tokens.get(), max_model_len),
        None => room.min(enough),
    };
    ensure!(
        (1..=room).contains(&engine.num_blocks),
        "weights, steps and KV cache do not fit {:.0} GB: {} blocks of {} have room",
        usable / 1e9,
        room,
        engine.num_blocks
    );
    let host_bytes = resolve_host_bytes(&args.memory, HOST_BYTES)?;
    give_host_memory(&mut engine, model, host_bytes, block_bytes);
    Ok(engine)
}

/// Bytes that the model's weights take.
fn weights_bytes(files: &ModelFiles, cost: &CostModel) -> Result<f64> {
    let backend = SimBackend::new(SimConfig::quiet(*cost));
    let decoder =
        inflight_model::Decoder::load(&backend, &files.config, &files.weights, 16, &mut |_| {})?;
    let config = &files.config;
    let embedding = if config.tie_word_embeddings { 0 } else { config.vocab_size };
    Ok((decoder.matrix_bytes(&backend) + 2 * embedding * config.hidden_size) as f64)
}

fn engine_json(engine: &EngineConfig) -> Value {
    json!({
        "overlap": engine.overlap,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_model_len": engine.max_model_len,
        "block_size": engine.block_size,
        "kv_cache_tokens": engine.num_blocks * engine.block_size,
        "num_swap_blocks": engine.memory.num_swap_blocks,
    })
}
