//! Arguments, the model and the machine to a frozen configuration: no `auto`, no `None`.

use std::fs;
use std::num::NonZeroUsize;

use anyhow::{Context, Result, ensure};
use inflight_backend::{CpuConfig, Dtype, SimdLevel, WeightPrecision};
use inflight_engine::EngineConfig;
use inflight_model::{ModelConfig, kv_bytes_per_token};

use crate::args::{EngineArgs, KvDtype, Switch, WeightDtype};

/// What is assumed where the system does not tell.
const UNKNOWN_MEMORY_BYTES: u64 = 8 << 30;
/// The KV cache gets this share of the memory, unless told otherwise.
const KV_CACHE_SHARE: u64 = 4;

/// What the machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Machine {
    pub(crate) num_cores: usize,
    pub(crate) memory_bytes: u64,
}

/// What a command needs of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Workload {
    /// Sequences in a batch, unless told otherwise.
    pub(crate) usual_num_seqs: usize,
    /// Requests that may wait beside those that run.
    pub(crate) max_queue: usize,
}

impl Workload {
    /// One request after the other.
    pub(crate) const ALONE: Self = Self { usual_num_seqs: 1, max_queue: 0 };

    /// Many clients.
    pub(crate) fn serving(max_queue: usize) -> Self {
        Self { usual_num_seqs: 64, max_queue }
    }
}

/// Everything that is fixed when the engine starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Resolved {
    pub(crate) cpu: CpuConfig,
    pub(crate) engine: EngineConfig,
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

/// Resolves `args` for a command, a model and a machine.
pub(crate) fn resolve(
    args: &EngineArgs,
    workload: Workload,
    model: &ModelConfig,
    machine: Machine,
) -> Result<Resolved> {
    let kv_dtype = match args.kv_cache_dtype {
        KvDtype::Auto | KvDtype::F16 => Dtype::F16,
        KvDtype::F32 => Dtype::F32,
        KvDtype::Bf16 => Dtype::BF16,
    };
    let weights = match args.dtype {
        WeightDtype::Auto => WeightPrecision::Native,
        WeightDtype::F32 => WeightPrecision::F32,
    };
    let num_threads = args.threads.map_or(machine.num_cores, |threads| threads.get() as usize);
    let max_model_len = resolve_max_model_len(args, model)?;
    let max_num_seqs = args.max_num_seqs.map_or(workload.usual_num_seqs, NonZeroUsize::get);
    let block_size = args.block_size.get();
    let max_num_batched_tokens = args.max_num_batched_tokens.get();
    ensure!(
        max_num_batched_tokens >= max_num_seqs,
        "--max-num-batched-tokens is {max_num_batched_tokens}; it must be at least --max-num-seqs, \
         which is {max_num_seqs}, so that every sequence gets a token in every step"
    );
    let bytes_per_block = kv_bytes_per_token(model, kv_dtype).saturating_mul(block_size);
    let blocks_of = |bytes: u64| usize::try_from(bytes / bytes_per_block.max(1) as u64);
    let num_blocks = match (args.kv_cache_tokens, args.kv_cache_memory) {
        (Some(tokens), _) => tokens.get().div_ceil(block_size),
        (None, Some(gib)) => blocks_of(resolve_gib(gib)?)?,
        (None, None) => {
            let enough = max_model_len.div_ceil(block_size).saturating_mul(max_num_seqs);
            blocks_of(machine.memory_bytes / KV_CACHE_SHARE)?.min(enough)
        }
    };
    ensure!(
        num_blocks > 0,
        "the KV cache has no room for a block of {block_size} tokens, which takes \
         {bytes_per_block} bytes; give it more by --kv-cache-memory"
    );
    let engine = EngineConfig {
        overlap: args.overlap == Switch::On,
        max_num_seqs,
        max_num_batched_tokens,
        max_model_len,
        block_size,
        num_blocks,
        max_outstanding: max_num_seqs.saturating_add(workload.max_queue),
    };
    let cpu = CpuConfig { num_threads, kv_dtype, weights, simd: SimdLevel::detect() };
    Ok(Resolved { cpu, engine })
}

fn resolve_max_model_len(args: &EngineArgs, model: &ModelConfig) -> Result<usize> {
    let made_for = model.max_position;
    let asked = args.max_model_len.map_or(made_for, NonZeroUsize::get);
    ensure!(
        asked <= made_for,
        "--max-model-len is {asked}, but the model was made for {made_for} tokens"
    );
    ensure!(asked >= 2, "--max-model-len is {asked}; a prompt and its answer need at least 2");
    Ok(asked)
}

fn resolve_gib(gib: f64) -> Result<u64> {
    let bytes = gib * f64::from(1 << 30);
    ensure!(gib > 0.0 && bytes < 2_f64.powi(60), "--kv-cache-memory is {gib}; it must be over 0");
    Ok(bytes as u64)
}

impl Resolved {
    /// Tokens that the KV cache holds.
    pub(crate) fn kv_cache_tokens(&self) -> usize {
        self.engine.num_blocks * self.engine.block_size
    }

    /// Bytes that the KV cache takes.
    pub(crate) fn kv_cache_bytes(&self, model: &ModelConfig) -> Result<usize> {
        let bytes = kv_bytes_per_token(model, self.cpu.kv_dtype);
        bytes.checked_mul(self.kv_cache_tokens()).context("the KV cache is larger than any memory")
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

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

    fn resolved(flags: &str) -> Result<Resolved> {
        let arguments = ["inflight", "serve"].into_iter().chain(flags.split_whitespace());
        let Command::Serve(args) = Cli::try_parse_from(arguments)?.command else {
            panic!("another command")
        };
        resolve(&args.engine, Workload::serving(args.max_queue), &model(), MACHINE)
    }

    #[test]
    fn defaults() {
        let Resolved { cpu, engine } = resolved("").unwrap();
        assert_eq!(cpu.num_threads, 6);
        assert_eq!((cpu.kv_dtype, cpu.weights), (Dtype::F16, WeightPrecision::Native));
        let expected = EngineConfig {
            overlap: true,
            max_num_seqs: 64,
            max_num_batched_tokens: 512,
            max_model_len: 4096,
            block_size: 16,
            num_blocks: 4096 / 16 * 64,
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
        let engine = resolve(&args.engine, Workload::ALONE, &model(), MACHINE).unwrap().engine;
        assert_eq!((engine.max_num_seqs, engine.max_outstanding), (1, 1));
        assert_eq!(engine.num_blocks, 4096 / 16);
    }

    #[test]
    fn flags_overrule() {
        let flags = "--overlap off --max-model-len 100 --max-num-seqs 4 \
            --max-num-batched-tokens 32 --block-size 8 \
            --kv-cache-dtype f32 --dtype f32 --threads 2 --max-queue 0";
        let Resolved { cpu, engine } = resolved(flags).unwrap();
        assert_eq!(cpu.num_threads, 2);
        assert_eq!((cpu.kv_dtype, cpu.weights), (Dtype::F32, WeightPrecision::F32));
        let expected = EngineConfig {
            overlap: false,
            max_num_seqs: 4,
            max_num_batched_tokens: 32,
            max_model_len: 100,
            block_size: 8,
            num_blocks: 4 * 13,
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
        check("--max-num-seqs 100000 --max-num-batched-tokens 100000", 1 << 17);
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
    fn memory_as_linux_tells_it() {
        let text = "MemTotal:       24629284 kB\nMemAvailable:    2048 kB\n";
        assert_eq!(parse_memory(text), Some(2 << 20));
        assert_eq!(parse_memory("MemTotal: 1 kB\n"), None);
        assert_eq!(parse_memory("MemAvailable: many kB\n"), None);
    }
}
