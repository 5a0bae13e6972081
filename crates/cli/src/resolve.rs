//! Arguments, the model and the machine to a frozen configuration: no `auto`, no `None`.

use std::fs;
use std::num::NonZeroUsize;

use anyhow::{Result, bail, ensure};
use inflight_backend::{
    CpuConfig, KvDtype, SimdLevel, WeightPrecision,
    cuda::{Numerics, Softmax},
};
use inflight_engine::{EngineConfig, KvKeep, MemoryConfig};
use inflight_model::{ModelConfig, kv_bytes_per_block};

use crate::args::{CascadeChoice, DeviceWait, EngineArgs, KvChoice, SoftmaxChoice, WeightDtype};
use crate::device::GpuUse;
use crate::swap::{HostBytes, give_host_memory, resolve_host_bytes};

/// What is assumed where the system does not tell.
const UNKNOWN_MEMORY_BYTES: u64 = 8 << 30;
/// On CPUs the KV cache gets this share of the memory, unless told otherwise.
const KV_CACHE_SHARE: u64 = 4;
/// Most tokens of a request that keeps only the latest: the rotary table has a row for each.
const MAX_STREAM_LEN: usize = 1 << 20;
/// Share of a GPU's memory that is used, unless told otherwise.
const GPU_MEMORY_UTILIZATION: f64 = 0.9;

/// What the machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Machine {
    pub(crate) num_cores: usize,
    pub(crate) memory_bytes: u64,
}

/// What a command needs of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Workload {
    /// Requests at the same time; `None`: as many as come.
    pub(crate) num_requests: Option<usize>,
    /// Requests that may wait beside those that run.
    pub(crate) max_queue: usize,
    /// Whether the host plans ahead.
    pub(crate) overlap: bool,
}

impl Workload {
    /// One request after the other.
    pub(crate) fn alone(overlap: bool) -> Self {
        Self { num_requests: Some(1), max_queue: 0, overlap }
    }

    /// Many clients.
    pub(crate) fn serving(max_queue: usize, overlap: bool) -> Self {
        Self { num_requests: None, max_queue, overlap }
    }
}

/// What kinds of devices do well, unless told otherwise.
#[derive(Clone, Copy, Debug)]
struct Usual {
    num_seqs: usize,
    num_batched_tokens: usize,
    kv_dtype: KvDtype,
    block_size: usize,
}

const USUAL_ON_CPUS: Usual =
    Usual { num_seqs: 64, num_batched_tokens: 128, kv_dtype: KvDtype::F16, block_size: 16 };
const USUAL_ON_GPUS: Usual =
    Usual { num_seqs: 256, num_batched_tokens: 8192, kv_dtype: KvDtype::Bf16, block_size: 16 };

/// Everything that is fixed when an engine starts on a CPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OnCpu {
    pub(crate) cpu: CpuConfig,
    pub(crate) engine: EngineConfig,
}

/// Everything that is fixed when an engine starts on a GPU, but what its memory decides once the
/// weights are loaded.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct OnGpu {
    /// `num_blocks` is what was asked for, or the most that are of use.
    pub(crate) engine: EngineConfig,
    pub(crate) gpu_memory_utilization: f64,
    /// Whether the user chose the size of the KV cache.
    pub(crate) is_kv_cache_fixed: bool,
    /// Whether the user chose the most tokens of a batch.
    pub(crate) is_budget_fixed: bool,
    /// Host memory that the engine may take.
    pub(crate) host_bytes: HostBytes,
}

impl Machine {
    pub(crate) fn detect() -> Self {
        let num_cores = std::thread::available_parallelism().map_or(1, usize::from);
        let memory = fs::read_to_string("/proc/meminfo").ok();
        let memory_bytes = memory.and_then(|text| parse_memory(&text));
        Self { num_cores, memory_bytes: memory_bytes.unwrap_or(UNKNOWN_MEMORY_BYTES) }
    }
}

/// Memory that could be had now, as Linux tells it.
fn parse_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// How a GPU is to be used, if it comes to that.
pub(crate) fn resolve_gpu_use(args: &EngineArgs) -> GpuUse {
    GpuUse {
        graphs: !args.enforce_eager,
        blocking_waits: args.device_wait != Some(DeviceWait::Spin),
        numerics: Numerics {
            kv_dtype: kv_dtype_on_gpus(args),
            softmax: match args.softmax {
                Some(SoftmaxChoice::Unified) => Softmax::Unified,
                Some(SoftmaxChoice::Online) | None => Softmax::Online,
            },
            batch_invariant: args.batch_invariant,
            cascade: args.cascade_attention != Some(CascadeChoice::Off),
        },
        keeps_fastest: true,
    }
}

/// What else was asked for is refused once it is known that a GPU computes.
fn kv_dtype_on_gpus(args: &EngineArgs) -> KvDtype {
    match args.kv_cache_dtype {
        KvChoice::Fp8 => KvDtype::Fp8,
        KvChoice::Int8 => KvDtype::Int8,
        KvChoice::Int4 => KvDtype::Int4,
        KvChoice::Auto | KvChoice::F32 | KvChoice::F16 | KvChoice::Bf16 => KvDtype::Bf16,
    }
}

/// Resolves `args` for a command, a model and the CPU of a machine.
pub(crate) fn resolve_on_cpu(
    args: &EngineArgs,
    workload: Workload,
    model: &ModelConfig,
    machine: Machine,
) -> Result<OnCpu> {
    for (is_given, flag) in [
        (args.gpu_memory_utilization.is_some(), "--gpu-memory-utilization"),
        (args.enforce_eager, "--enforce-eager"),
        (args.device_wait.is_some(), "--device-wait"),
        (args.softmax.is_some(), "--softmax"),
        (args.cascade_attention.is_some(), "--cascade-attention"),
    ] {
        ensure!(!is_given, "{flag} is for GPUs, but the CPU computes (see --device)");
    }
    let kv_dtype = match args.kv_cache_dtype {
        KvChoice::Auto => USUAL_ON_CPUS.kv_dtype,
        KvChoice::F16 => KvDtype::F16,
        KvChoice::F32 => KvDtype::F32,
        KvChoice::Bf16 => KvDtype::Bf16,
        KvChoice::Fp8 => KvDtype::Fp8,
        KvChoice::Int8 => KvDtype::Int8,
        KvChoice::Int4 => KvDtype::Int4,
    };
    let weights = match args.dtype {
        WeightDtype::Auto => WeightPrecision::Native,
        WeightDtype::F32 => WeightPrecision::F32,
    };
    let usual = Usual { kv_dtype, ..USUAL_ON_CPUS };
    let (mut engine, is_kv_cache_fixed) = resolve_engine(args, workload, model, usual)?;
    if !is_kv_cache_fixed {
        let share = machine.memory_bytes / KV_CACHE_SHARE;
        let room = usize::try_from(share)? / bytes_per_block(&engine, model, kv_dtype);
        engine.num_blocks = engine.num_blocks.min(room);
    }
    check_blocks(&engine, model, kv_dtype)?;
    let host_bytes = resolve_host_bytes(&args.memory, machine.memory_bytes)?;
    let block_bytes = bytes_per_block(&engine, model, kv_dtype);
    give_host_memory(&mut engine, model, host_bytes, block_bytes);
    let num_threads = args.threads.map_or(machine.num_cores, |threads| threads.get() as usize);
    let simd = resolve_simd(args)?;
    Ok(OnCpu { cpu: CpuConfig { num_threads, kv_dtype, weights, simd }, engine })
}

fn resolve_simd(args: &EngineArgs) -> Result<SimdLevel> {
    let Some(choice) = args.simd else { return Ok(SimdLevel::detect()) };
    let level = SimdLevel::from(choice);
    let most = SimdLevel::detect();
    ensure!(
        level.is_available(),
        "--simd: this processor has not got what {level:?} needs; it has {most:?}"
    );
    Ok(level)
}

/// Resolves `args` for a command, a model and a GPU.
pub(crate) fn resolve_on_gpu(
    args: &EngineArgs,
    workload: Workload,
    model: &ModelConfig,
) -> Result<OnGpu> {
    ensure!(args.threads.is_none(), "--threads is for CPUs, but a GPU computes (see --device)");
    ensure!(args.simd.is_none(), "--simd is for CPUs, but a GPU computes (see --device)");
    ensure!(
        args.dtype == WeightDtype::Auto,
        "--dtype f32 is for CPUs; GPUs compute with bf16 weights (see --device)"
    );
    ensure!(
        !matches!(args.kv_cache_dtype, KvChoice::F16 | KvChoice::F32),
        "--kv-cache-dtype: on GPUs the KV cache is of bf16, fp8, int8 or int4"
    );
    let kv_dtype = kv_dtype_on_gpus(args);
    let usual = Usual { kv_dtype, block_size: block_size_on_gpus(kv_dtype), ..USUAL_ON_GPUS };
    let gpu_memory_utilization = args.gpu_memory_utilization.unwrap_or(GPU_MEMORY_UTILIZATION);
    ensure!(
        gpu_memory_utilization > 0.0 && gpu_memory_utilization <= 1.0,
        "--gpu-memory-utilization is {gpu_memory_utilization}; it must be over 0 and at most 1"
    );
    let (engine, is_kv_cache_fixed) = resolve_engine(args, workload, model, usual)?;
    check_blocks(&engine, model, usual.kv_dtype)?;
    let is_budget_fixed = args.max_num_batched_tokens.is_some();
    let host_bytes = resolve_host_bytes(&args.memory, Machine::detect().memory_bytes)?;
    Ok(OnGpu { engine, gpu_memory_utilization, is_kv_cache_fixed, is_budget_fixed, host_bytes })
}

/// The engine's configuration, with as many blocks as were asked for or as could be of use, and
/// whether they were asked for.
fn resolve_engine(
    args: &EngineArgs,
    workload: Workload,
    model: &ModelConfig,
    usual: Usual,
) -> Result<(EngineConfig, bool)> {
    let max_model_len = resolve_max_model_len(args, model)?;
    let num_requests = workload.num_requests.unwrap_or(usize::MAX);
    let max_num_seqs =
        args.max_num_seqs.map_or(num_requests.min(usual.num_seqs), NonZeroUsize::get);
    let most_of_use = max_num_seqs.saturating_mul(max_model_len);
    let usual_budget = usual.num_batched_tokens.min(most_of_use).max(max_num_seqs);
    let max_num_batched_tokens =
        args.max_num_batched_tokens.map_or(usual_budget, NonZeroUsize::get);
    ensure!(
        max_num_batched_tokens >= max_num_seqs,
        "--max-num-batched-tokens is {max_num_batched_tokens}; it must be at least --max-num-seqs, \
         which is {max_num_seqs}, so that every sequence gets a token in every step"
    );
    let block_size = args.block_size.map_or(usual.block_size, NonZeroUsize::get);
    let mut engine = EngineConfig {
        overlap: workload.overlap,
        max_num_seqs,
        max_num_batched_tokens,
        max_model_len,
        block_size,
        num_blocks: 0,
        memory: MemoryConfig {
            prefix_caching: args.memory.prefix_caching(),
            preemption: args.memory.preemption(),
            ..MemoryConfig::default()
        },
        kv_keep: args.memory.kv_keep(),
        max_outstanding: max_num_seqs.saturating_add(workload.max_queue),
    };
    engine.num_blocks = engine.blocks_per_sequence(model).saturating_mul(max_num_seqs);
    let asked = match (args.kv_cache_tokens, args.kv_cache_memory) {
        (Some(tokens), _) => Some(engine.kv_terms(model).num_blocks(tokens.get(), max_model_len)),
        (None, Some(gib)) => {
            Some(resolve_gib(gib)? / bytes_per_block(&engine, model, usual.kv_dtype))
        }
        (None, None) => None,
    };
    engine.num_blocks = asked.unwrap_or(engine.num_blocks);
    Ok((engine, asked.is_some()))
}

/// Memory is read faster in runs of 4 KiB, so blocks have as many bytes whatever their numbers are;
/// but of four bits, which more tokens in a block make no faster.
pub(crate) fn block_size_on_gpus(kv_dtype: KvDtype) -> usize {
    match kv_dtype {
        KvDtype::Fp8 | KvDtype::Int8 | KvDtype::Int4 => 32,
        KvDtype::F32 | KvDtype::F16 | KvDtype::Bf16 => 16,
    }
}

fn resolve_max_model_len(args: &EngineArgs, model: &ModelConfig) -> Result<usize> {
    let made_for = model.max_position;
    let asked = args.max_model_len.map_or(made_for, NonZeroUsize::get);
    let is_stream = matches!(args.memory.kv_keep(), KvKeep::Latest(_));
    ensure!(
        asked <= made_for || is_stream,
        "--max-model-len is {asked}, but the model was made for {made_for} tokens; --kv-window \
         lets requests go on beyond that"
    );
    ensure!(
        asked <= MAX_STREAM_LEN,
        "--max-model-len is {asked}; it must be at most {MAX_STREAM_LEN}"
    );
    ensure!(asked >= 2, "--max-model-len is {asked}; a prompt and its answer need at least 2");
    Ok(asked)
}

fn resolve_gib(gib: f64) -> Result<usize> {
    let bytes = gib * f64::from(1 << 30);
    ensure!(gib > 0.0 && bytes < 2_f64.powi(60), "--kv-cache-memory is {gib}; it must be over 0");
    Ok(bytes as usize)
}

fn check_blocks(engine: &EngineConfig, model: &ModelConfig, kv_dtype: KvDtype) -> Result<()> {
    let (block_size, bytes) = (engine.block_size, bytes_per_block(engine, model, kv_dtype));
    ensure!(
        engine.num_blocks > 0,
        "the KV cache has no room for a block of {block_size} tokens, which takes {bytes} bytes; \
         give it more by --kv-cache-memory"
    );
    let kv_cache_tokens = engine.num_blocks.saturating_mul(block_size);
    if let Err(reason) = engine.kv_terms(model).check(engine.kv_keep, kv_cache_tokens) {
        let flag = match engine.kv_keep {
            KvKeep::Attended(_) => "--kv-budget",
            KvKeep::All | KvKeep::Latest(_) => "--kv-window",
        };
        bail!("{flag} {reason}");
    }
    let whole = engine.num_blocks.checked_mul(bytes);
    ensure!(whole.is_some(), "the KV cache is larger than any memory; see --kv-cache-tokens");
    Ok(())
}

/// Bytes of the KV cache's unit.
pub(crate) fn bytes_per_block(
    engine: &EngineConfig,
    model: &ModelConfig,
    kv_dtype: KvDtype,
) -> usize {
    kv_bytes_per_block(model, kv_dtype, engine.block_size).max(1)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command, Switch};

    const MACHINE: Machine = Machine { num_cores: 6, memory_bytes: 1 << 30 };

    /// 2 layers, 2 KV heads of 8: 128 bytes of a token in f16. Made for 4096 tokens.
    fn model() -> ModelConfig {
        let json = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama",
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "tie_word_embeddings": true, "hidden_act": "silu"}"#;
        ModelConfig::from_json("config.json", json).unwrap()
    }

    fn parsed(flags: &str) -> Result<(EngineArgs, Workload)> {
        let arguments = ["inflight", "serve"].into_iter().chain(flags.split_whitespace());
        let Command::Serve(args) = Cli::try_parse_from(arguments)?.command else {
            panic!("another command")
        };
        let workload = Workload::serving(args.max_queue, args.steps.overlap == Switch::On);
        Ok((args.engine, workload))
    }

    fn resolved(flags: &str) -> Result<OnCpu> {
        let (args, workload) = parsed(flags)?;
        resolve_on_cpu(&args, workload, &model(), MACHINE)
    }

    fn on_gpu(flags: &str) -> Result<OnGpu> {
        let (args, workload) = parsed(flags)?;
        resolve_on_gpu(&args, workload, &model())
    }

    #[test]
    fn defaults() {
        let OnCpu { cpu, engine } = resolved("").unwrap();
        assert_eq!(cpu.num_threads, 6);
        assert_eq!((cpu.kv_dtype, cpu.weights), (KvDtype::F16, WeightPrecision::Native));
        let expected = EngineConfig {
            overlap: true,
            max_num_seqs: 64,
            max_num_batched_tokens: 128,
            max_model_len: 4096,
            block_size: 16,
            num_blocks: 4096 / 16 * 64,
            memory: MemoryConfig { max_moved_blocks: 32768, ..MemoryConfig::default() },
            kv_keep: KvKeep::All,
            max_outstanding: 64 + 1024,
        };
        assert_eq!(engine, expected, "64 full sequences take 32 MiB of the quarter of 1 GiB");
    }

    #[test]
    fn one_request_needs_one_sequence() {
        let arguments = ["inflight", "run", "model.gguf", "Hi"];
        let Command::Run(args) = Cli::try_parse_from(arguments).unwrap().command else {
            panic!("another command")
        };
        let engine = resolve_on_cpu(&args.engine, Workload::alone(true), &model(), MACHINE);
        let engine = engine.unwrap().engine;
        assert_eq!((engine.max_num_seqs, engine.max_outstanding), (1, 1));
        assert_eq!(engine.num_blocks, 4096 / 16);
    }

    #[test]
    fn flags_overrule() {
        let flags = "--overlap off --max-model-len 100 --max-num-seqs 4 \
            --max-num-batched-tokens 32 --block-size 8 \
            --kv-cache-dtype f32 --dtype f32 --threads 2 --simd plain --max-queue 0";
        let OnCpu { cpu, engine } = resolved(flags).unwrap();
        assert_eq!((cpu.num_threads, cpu.simd), (2, SimdLevel::Plain));
        assert_eq!((cpu.kv_dtype, cpu.weights), (KvDtype::F32, WeightPrecision::F32));
        let expected = EngineConfig {
            overlap: false,
            max_num_seqs: 4,
            max_num_batched_tokens: 32,
            max_model_len: 100,
            block_size: 8,
            num_blocks: 4 * 13,
            memory: MemoryConfig { max_moved_blocks: 32768, ..MemoryConfig::default() },
            kv_keep: KvKeep::All,
            max_outstanding: 4,
        };
        assert_eq!(engine, expected);
    }

    #[test]
    fn the_kv_cache() {
        let check = |flags: &str, num_blocks: usize| {
            assert_eq!(resolved(flags).unwrap().engine.num_blocks, num_blocks, "{flags}");
        };
        check("--kv-cache-tokens 1", 1);
        check("--kv-cache-tokens 17", 2);
        // A block of 16 tokens takes 2 KiB in f16, 4 KiB in f32.
        check("--kv-cache-memory 0.5", 1 << 18);
        check("--kv-cache-memory 0.5 --kv-cache-dtype f32", 1 << 17);
        check("--kv-cache-memory 0.5 --kv-cache-dtype bf16", 1 << 18);
        // Heads of 8 take 8 bytes and a scale of 4.
        check("--kv-cache-memory 0.5 --kv-cache-dtype int8", (1 << 29) / 1536);
        check("--kv-cache-memory 0.5 --kv-dtype fp8", (1 << 29) / 1536);
        check("--max-num-seqs 100000 --max-num-batched-tokens 100000", 1 << 17);
    }

    #[test]
    fn swap_space() {
        let check = |flags: &str, num_swap_blocks: usize| {
            let memory = resolved(flags).unwrap().engine.memory;
            assert_eq!(memory.num_swap_blocks, num_swap_blocks, "{flags}");
        };
        check("", 0);
        // Blocks of 2 KiB; an eighth of the machine's memory, but no more than 64 sequences take.
        check("--kv-cache-tokens 4096", 64 * 256);
        check(
            "--kv-cache-tokens 4096 --max-num-seqs 100000 --max-num-batched-tokens 100000",
            65536,
        );
        check("--kv-cache-tokens 4096 --swap-space 0.001", 524);
        check("--kv-cache-tokens 4096 --swap-space 0", 0);
        check("--kv-cache-tokens 4096 --preemption recompute", 0);
        assert!(resolved("--swap-space -1").is_err());
        assert_eq!(on_gpu("--swap-space 0.5").unwrap().host_bytes.swap, 512 << 20);
    }

    #[test]
    fn host_cache() {
        let check = |flags: &str, expected: (usize, bool)| {
            let memory = resolved(flags).unwrap().engine.memory;
            assert_eq!((memory.num_swap_blocks, memory.keeps_cold_prefixes), expected, "{flags}");
        };
        // Blocks of 2 KiB, beside those for requests that give way.
        check("--host-cache 0.5", (1 << 18, true));
        check(
            "--kv-cache-tokens 4096 --swap-space 0.001 --host-cache 0.5",
            (524 + (1 << 18), true),
        );
        check("--kv-cache-tokens 4096 --swap-space 0.001 --host-cache 0", (524, false));
        let refused = |flags: &str| resolved(flags).unwrap_err().to_string();
        assert!(refused("--host-cache -1").contains("--host-cache is -1"));
        assert!(refused("--host-cache 2").contains("2.0 GiB, but 1.0 GiB"));
        assert!(refused("--host-cache 0.1 --no-enable-prefix-caching").contains("switched off"));
    }

    #[test]
    fn what_is_kept() {
        let blocks = |flags| resolved(flags).unwrap().engine.num_blocks;
        // A window of 1008, sinks of 16 and those as they were computed; all for one sequence.
        let one = "--max-num-seqs 1 --max-model-len 65536 --kv-window 1000";
        assert_eq!(blocks(one), (1008 + 2 * 16) / 16);
        assert_eq!(blocks(&format!("{one} --kv-sinks 0")), 1008 / 16);
        let check = |flags: &str, expected: &str| {
            let error = resolved(flags).unwrap_err().to_string();
            assert!(error.contains(expected), "{flags}: {error}");
        };
        check("--max-model-len 5000", "made for 4096 tokens; --kv-window");
        check("--kv-window 5000", "--kv-window is too large");
        check("--kv-window 1000 --kv-cache-tokens 1024", "take 1040 places");
        check("--kv-budget 20", "--kv-budget has a budget of 20 tokens; it must be at least 48");
        check("--kv-window 99 --max-model-len 2000000", "it must be at most 1048576");
        assert!(on_gpu("--kv-budget 1000").is_ok());
        assert!(on_gpu("--kv-cache-dtype int4").is_ok());
        assert!(on_gpu("--kv-cache-dtype f16").is_err());
        assert_eq!(on_gpu(one).unwrap().engine.num_blocks, (1008 + 2 * 16) / 16);
    }

    #[test]
    fn prefix_caching() {
        let check = |flags: &str, expected| {
            assert_eq!(resolved(flags).unwrap().engine.memory.prefix_caching, expected, "{flags}");
        };
        check("", true);
        check("--enable-prefix-caching", true);
        check("--no-enable-prefix-caching", false);
        check("--no-enable-prefix-caching --enable-prefix-caching", true);
    }

    #[test]
    fn what_cannot_be_is_named() {
        let check = |flags: &str, named: &str| {
            let error = resolved(flags).unwrap_err().to_string();
            assert!(error.contains(named), "{flags}: {error}");
        };
        check("--max-model-len 4097", "--max-model-len");
        check("--max-model-len 1", "--max-model-len");
        check("--max-num-batched-tokens 63", "--max-num-batched-tokens");
        check("--kv-cache-memory 0", "--kv-cache-memory");
        check("--kv-cache-memory nan", "--kv-cache-memory");
        check("--kv-cache-memory 0.000001", "--kv-cache-memory");
    }

    #[test]
    fn on_gpus() {
        let resolved = on_gpu("").unwrap();
        let expected = EngineConfig {
            overlap: true,
            max_num_seqs: 256,
            max_num_batched_tokens: 8192,
            max_model_len: 4096,
            block_size: 16,
            num_blocks: 4096 / 16 * 256,
            memory: MemoryConfig::default(),
            kv_keep: KvKeep::All,
            max_outstanding: 256 + 1024,
        };
        assert_eq!(resolved.engine, expected);
        assert_eq!(resolved.gpu_memory_utilization, 0.9);
        assert!(!resolved.is_kv_cache_fixed && !resolved.is_budget_fixed);

        let flags = "--kv-cache-memory 0.5 --gpu-memory-utilization 0.5 --kv-cache-dtype bf16 \
            --max-num-batched-tokens 2048 --overlap off";
        let resolved = on_gpu(flags).unwrap();
        assert_eq!(resolved.engine.num_blocks, 1 << 18, "blocks of 2 KiB");
        assert_eq!(resolved.gpu_memory_utilization, 0.5);
        assert!(resolved.is_kv_cache_fixed && resolved.is_budget_fixed);
        assert!(!resolved.engine.overlap);
    }

    #[test]
    fn budgets_are_no_larger_than_batches_can_be() {
        let budget = |flags: &str| on_gpu(flags).unwrap().engine.max_num_batched_tokens;
        assert_eq!(budget("--max-num-seqs 1"), 4096);
        assert_eq!(budget("--max-num-seqs 10000"), 10000, "a token for each sequence");
        assert_eq!(budget("--max-num-seqs 4 --max-model-len 100"), 400);
    }

    #[test]
    fn what_is_of_the_other_kind_of_device_is_refused_by_name() {
        let check = |error: Option<anyhow::Error>, flag: &str| {
            let error = error.expect(flag).to_string();
            assert!(error.contains(flag), "{error}");
        };
        check(on_gpu("--threads 2").err(), "--threads");
        check(on_gpu("--simd plain").err(), "--simd");
        check(on_gpu("--dtype f32").err(), "--dtype");
        check(on_gpu("--kv-cache-dtype f16").err(), "--kv-cache-dtype");
        for utilization in ["0", "1.01", "nan"] {
            let flags = format!("--gpu-memory-utilization {utilization}");
            check(on_gpu(&flags).err(), "--gpu-memory-utilization");
        }
        check(resolved("--gpu-memory-utilization 0.5").err(), "--gpu-memory-utilization");
        check(resolved("--enforce-eager").err(), "--enforce-eager");
        check(resolved("--device-wait spin").err(), "--device-wait");
        check(resolved("--softmax unified").err(), "--softmax");
        check(resolved("--cascade-attention auto").err(), "--cascade-attention");
    }

    #[test]
    fn memory_as_linux_tells_it() {
        let text = "MemTotal:       24629284 kB\nMemAvailable:    2048 kB\n";
        assert_eq!(parse_memory(text), Some(2 << 20));
        assert_eq!(parse_memory("MemTotal: 1 kB\n"), None);
        assert_eq!(parse_memory("MemAvailable: many kB\n"), None);
    }
}
