//! A device, a model and a configuration to an engine.

use std::path::Path;

use anyhow::{Result, ensure};
use inflight_backend::{Backend, CpuBackend, KvDtype, WeightPrecision};
use inflight_engine::{CacheFileOptions, Engine, EngineConfig, EngineHandle};
use inflight_model::{Decoder, Fp8Weights, ModelFiles};
use inflight_server::KvCapacity;

use crate::args::EngineArgs;
use crate::cache_file::resolve_cache_file;
use crate::device::Chosen;
use crate::kv_capacity::kv_capacities;
use crate::memory::{self, Fitted};
use crate::progress::{LoadingBar, Waiting};
use crate::resolve::{Machine, Workload, resolve_on_cpu, resolve_on_gpu};
use crate::summary::{Parts, Summary};

/// A model, still in its files.
pub(crate) struct Model<'a> {
    pub(crate) name: &'a str,
    /// Where they lie; `None` for experiments, which may have none.
    pub(crate) path: Option<&'a Path>,
    pub(crate) files: &'a ModelFiles,
}

/// An engine that can run.
pub(crate) struct Assembled<B: Backend> {
    pub(crate) engine: Engine<B>,
    pub(crate) handle: EngineHandle,
    pub(crate) config: EngineConfig,
    /// What computes, for people.
    pub(crate) device: String,
    pub(crate) summary: Summary,
    pub(crate) kv_capacities: Vec<KvCapacity>,
}

/// Whatever is done with an engine, the same on every device.
pub(crate) trait UseEngine {
    type Output;

    fn use_engine<B: Backend>(self, assembled: Assembled<B>) -> Result<Self::Output>;
}

/// Resolves `args` for `device`, loads the model there, makes an engine and hands it to `user`.
pub(crate) fn with_engine<U: UseEngine>(
    device: &Chosen,
    model: &Model<'_>,
    args: &EngineArgs,
    workload: Workload,
    user: U,
) -> Result<U::Output> {
    let config = &model.files.config;
    let no_progress = args.no_progress;
    match device {
        Chosen::Cpu { .. } => {
            let machine = Machine::detect();
            let resolved = resolve_on_cpu(args, workload, config, machine)?;
            let (engine, kv_dtype) = (resolved.engine, resolved.cpu.kv_dtype);
            let weights = match (resolved.cpu.weights, config.fp8_weights) {
                (WeightPrecision::Native, None) => "as stored",
                (WeightPrecision::Native, Some(_)) => "those of layers in fp8 as bf16",
                (WeightPrecision::F32, _) => "expanded to f32",
            };
            let cache_file = resolve_cache_file(args, model, &resolved.cpu, &engine)?;
            let backend = CpuBackend::new(resolved.cpu)?;
            let available = usize::try_from(machine.memory_bytes).unwrap_or(usize::MAX);
            let (max_model_len, kv_dtypes) = (engine.max_model_len, KV_DTYPES_ON_CPUS);
            let checks_blocks = args.memory.kv_checksums;
            let plan =
                Plan { weights, max_model_len, kv_dtypes, cache_file, checks_blocks, no_progress };
            let fit = |backend: &CpuBackend, decoder: &Decoder<CpuBackend>| {
                let bytes = (decoder.matrix_bytes(backend), available);
                Ok(memory::on_cpu(engine, config, kv_dtype, bytes))
            };
            user.use_engine(assemble(&backend, model, &plan, fit)?)
        }
        Chosen::Cuda(backend) => {
            ensure!(args.memory.cache_file.is_none(), "--cache-file is for CPUs (see --device)");
            ensure!(!args.memory.kv_checksums, "--kv-checksums is for CPUs (see --device)");
            let resolved = resolve_on_gpu(args, workload, config)?;
            let max_model_len = resolved.engine.max_model_len;
            let weights = match config.fp8_weights {
                None => "as bf16",
                Some(Fp8Weights::AllAtLoad) => "as fp8",
                Some(Fp8Weights::AtLoad | Fp8Weights::Stored) => {
                    "those of layers as fp8, others as bf16"
                }
            };
            let kv_dtypes = KV_DTYPES_ON_GPUS;
            let (cache_file, checks_blocks) = (None, false);
            let plan =
                Plan { weights, max_model_len, kv_dtypes, cache_file, checks_blocks, no_progress };
            let fit = |backend: &_, _: &_| memory::on_gpu(backend, config, &resolved);
            user.use_engine(assemble(backend, model, &plan, fit)?)
        }
    }
}

/// How a model is loaded.
struct Plan {
    /// What becomes of the weights, for people.
    weights: &'static str,
    max_model_len: usize,
    /// Types that the KV cache's numbers may have.
    kv_dtypes: &'static [KvDtype],
    /// Where cold prefixes are kept, too.
    cache_file: Option<CacheFileOptions>,
    /// Whether full blocks have checksums.
    checks_blocks: bool,
    no_progress: bool,
}

const KV_DTYPES_ON_CPUS: &[KvDtype] =
    &[KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Fp8, KvDtype::Int8, KvDtype::Int4];
const KV_DTYPES_ON_GPUS: &[KvDtype] = &[KvDtype::Bf16, KvDtype::Fp8, KvDtype::Int8, KvDtype::Int4];

/// Loads the model; `fit` then says what the engine will be.
fn assemble<B: Backend>(
    backend: &B,
    model: &Model<'_>,
    plan: &Plan,
    fit: impl FnOnce(&B, &Decoder<B>) -> Result<Fitted>,
) -> Result<Assembled<B>> {
    let ModelFiles { config, weights, .. } = model.files;
    let bar = LoadingBar::new(plan.no_progress);
    let mut show = |progress| bar.show(progress);
    let decoder = Decoder::load(backend, config, weights, plan.max_model_len, &mut show)?;
    bar.finish();
    let (engine_config, memory) = fit(backend, &decoder)?;
    let device = backend.description();
    let kv_dtype = backend.kv_dtype();
    let kv_capacities = kv_capacities(&engine_config, config, kv_dtype, plan.kv_dtypes);
    let summary = Summary::new(&Parts {
        name: model.name,
        model: config,
        weights: plan.weights,
        device: &device,
        kv_dtype,
        kv_capacities: &kv_capacities,
        engine: &engine_config,
        memory,
    });
    let waiting = Waiting::new("allocating memory", plan.no_progress);
    let (mut engine, handle) = Engine::new(backend.clone(), decoder, engine_config.clone())?;
    waiting.finish();
    if let Some(options) = &plan.cache_file {
        engine.keep_in_file(options)?;
    }
    if plan.checks_blocks {
        engine.check_blocks()?;
    }
    Ok(Assembled { engine, handle, config: engine_config, device, summary, kv_capacities })
}
