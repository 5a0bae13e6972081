//! `inflight simulate`: what users write.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use inflight_bench::BuiltInConfig;

use super::bench::built_in;
use super::{MODEL_HELP, MemoryArgs, PolicyArgs, Quantization, Switch};

pub(crate) const SIMULATE_EXAMPLES: &str = "\
Examples:
  inflight simulate --config llama-3.1-8b --gpu h200 --input-len 512 --output-len 128
  inflight simulate --config llama-3.1-8b --gpu h100 --lengths pairs.json --rate 40 \\
    --target-ttft-ms 500 --target-itl-ms 50
  inflight simulate ./my-model --bandwidth 900 --flops 150 --gpu-memory 24 --rate 2 --json out.json

The real engine serves the load in virtual time, on a device of which only a cost model exists: an \
operator takes as long as its bytes or its operations, whichever is longer, and what it takes to \
begin. docs/BENCHMARKS.md says how far it is off. With --rate and a target it also says how many \
GPUs are needed; each holds the whole model.";

/// A model on a GPU under a load, without either: throughput, latencies, GPUs needed.
#[derive(Args, Debug)]
pub(crate) struct SimulateArgs {
    #[arg(help = MODEL_HELP, default_value = "default", hide_default_value = true)]
    pub(crate) model: String,

    /// Shapes of a well-known model instead of MODEL's
    #[arg(long, value_parser = built_in(), value_name = "NAME", conflicts_with = "model")]
    pub(crate) config: Option<BuiltInConfig>,

    #[command(flatten)]
    pub(crate) device: SimulatedDeviceArgs,

    #[command(flatten)]
    pub(crate) load: LoadArgs,

    #[command(flatten)]
    pub(crate) engine: SimulatedEngineArgs,

    #[command(flatten)]
    pub(crate) memory: MemoryArgs,

    #[command(flatten)]
    pub(crate) policy: PolicyArgs,

    /// File for all figures, as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// What computes.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Device")]
pub(crate) struct SimulatedDeviceArgs {
    /// A GPU: h200, h100, h100-pcie, a100, b200, l40s, l4 or rtx4090; cpu needs the next two flags
    #[arg(long, default_value = "h200", value_name = "NAME")]
    pub(crate) gpu: String,

    /// GB/s that large copies reach [default: the GPU's]
    #[arg(long, value_name = "GB/S")]
    pub(crate) bandwidth: Option<f64>,

    /// TFLOP/s that large products reach [default: the GPU's]
    #[arg(long, value_name = "TFLOP/S")]
    pub(crate) flops: Option<f64>,

    /// GB of its memory [default: the GPU's]
    #[arg(long, value_name = "GB")]
    pub(crate) gpu_memory: Option<f64>,

    /// Fraction of it that may be used
    #[arg(long, default_value_t = 0.9, value_name = "FRACTION")]
    pub(crate) gpu_memory_utilization: f64,
}

/// Who asks for what and when.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Load")]
pub(crate) struct LoadArgs {
    /// File of lengths, a JSON list of [prompt tokens, output tokens], which are used in turn
    #[arg(long, value_name = "FILE", conflicts_with_all = ["input_len", "output_len", "spread"])]
    pub(crate) lengths: Option<PathBuf>,

    /// Tokens of a prompt
    #[arg(long, default_value = "512", value_name = "TOKENS")]
    pub(crate) input_len: NonZeroUsize,

    /// Tokens of an output
    #[arg(long, default_value = "128", value_name = "TOKENS")]
    pub(crate) output_len: NonZeroUsize,

    /// How lengths spread: all alike, or with those as means, evenly or most of them short
    #[arg(long, value_enum, default_value_t = SpreadChoice::Fixed)]
    pub(crate) spread: SpreadChoice,

    /// Requests
    #[arg(long, default_value = "512", value_name = "REQUESTS")]
    pub(crate) num_prompts: NonZeroUsize,

    /// Requests a second, at random times [default: all at once]
    #[arg(long, value_name = "REQUESTS/S")]
    pub(crate) rate: Option<f64>,

    /// Keys lengths and times
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SpreadChoice {
    Fixed,
    Uniform,
    Exponential,
}

/// The engine; flags mean what they mean for `serve`.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Engine")]
pub(crate) struct SimulatedEngineArgs {
    /// Most tokens of a request [default: what the longest of the load has]
    #[arg(long, value_name = "TOKENS")]
    pub(crate) max_model_len: Option<NonZeroUsize>,

    /// Most sequences in a batch
    #[arg(long, default_value = "256", value_name = "SEQUENCES")]
    pub(crate) max_num_seqs: NonZeroUsize,

    /// Most tokens in a batch
    #[arg(long, default_value = "8192", value_name = "TOKENS")]
    pub(crate) max_num_batched_tokens: NonZeroUsize,

    /// Tokens of a block of the KV cache
    #[arg(long, default_value = "16", value_name = "TOKENS")]
    pub(crate) block_size: NonZeroUsize,

    /// Size of the KV cache in tokens [default: what weights and steps leave]
    #[arg(long, value_name = "TOKENS")]
    pub(crate) kv_cache_tokens: Option<NonZeroUsize>,

    /// Type of the KV cache's numbers
    #[arg(long, value_enum, default_value_t = SimulatedKv::Bf16)]
    pub(crate) kv_cache_dtype: SimulatedKv,

    /// Round the linear layers' weights: half the bytes of bf16
    #[arg(long, short = 'q', value_enum, value_name = "METHOD")]
    pub(crate) quantization: Option<Quantization>,

    /// Plan and launch the next batch while the current one computes
    #[arg(long, value_enum, default_value_t = Switch::On)]
    pub(crate) overlap: Switch,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SimulatedKv {
    Bf16,
    Fp8,
}
