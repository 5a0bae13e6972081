//! How models are loaded and run: what all commands share.

use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use inflight_backend::SimdLevel;

use super::memory::MemoryArgs;

/// How the model is loaded and run. Flags that mean what vLLM's mean bear vLLM's names.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Engine")]
pub(crate) struct EngineArgs {
    /// What computes: auto is a GPU if there is one that can be used, otherwise the CPU; cuda fails
    /// if there is none; cuda:1 is the second GPU
    #[arg(long, default_value = "auto", value_name = "auto|cpu|cuda")]
    pub(crate) device: DeviceChoice,

    /// Most tokens of a request, prompt and answer together [default: what the model was made for]
    #[arg(long, value_name = "TOKENS")]
    pub(crate) max_model_len: Option<NonZeroUsize>,

    /// Most sequences in a batch; more serve more clients at once, each of them slower [default:
    /// for many requests 64 on CPUs and 256 on GPUs, otherwise 1]
    #[arg(long, value_name = "SEQUENCES")]
    pub(crate) max_num_seqs: Option<NonZeroUsize>,

    /// Most tokens in a batch; more make long prompts quicker and the others' next token slower
    /// [default: 128 on CPUs; 8192 on GPUs, less where memory is short]
    #[arg(long, value_name = "TOKENS")]
    pub(crate) max_num_batched_tokens: Option<NonZeroUsize>,

    /// Tokens of a block, the unit in which the KV cache is given out [default: 16; on
    /// GPUs 32 where its numbers have 8 bits]
    #[arg(long, value_name = "TOKENS")]
    pub(crate) block_size: Option<NonZeroUsize>,

    /// Size of the KV cache in tokens [default: on CPUs a quarter of the memory, on GPUs what
    /// weights and steps leave, or less if that is enough for --max-num-seqs sequences of
    /// --max-model-len tokens]
    #[arg(long, value_name = "TOKENS", conflicts_with = "kv_cache_memory")]
    pub(crate) kv_cache_tokens: Option<NonZeroUsize>,

    /// Size of the KV cache in GiB, instead of in tokens
    #[arg(long, value_name = "GIB")]
    pub(crate) kv_cache_memory: Option<f64>,

    #[command(flatten)]
    pub(crate) memory: MemoryArgs,

    /// Fraction of a GPU's memory that may be used in all, by weights, steps and KV cache [default:
    /// 0.9]
    #[arg(long, value_name = "FRACTION")]
    pub(crate) gpu_memory_utilization: Option<f64>,

    /// Type of the KV cache's numbers: auto is f16 on CPUs and bf16 on GPUs; fp8 (e4m3) and int8,
    /// with a scale for each token and head, hold twice as many tokens; int4, with a factor for
    /// every 32 numbers, more than three times as many, at a price in accuracy; f32 and f16 on CPUs
    /// only
    #[arg(long, alias = "kv-dtype", value_enum, default_value_t = KvChoice::Auto)]
    pub(crate) kv_cache_dtype: KvChoice,

    /// How decode attention weighs what it sees, on GPUs only: online keeps up with the greatest
    /// score so far; unified relates all scores to a number fixed before and computes rows again
    /// where that was too far off [default: online]
    #[arg(long, value_enum)]
    pub(crate) softmax: Option<SoftmaxChoice>,

    /// On GPUs, whether decode attention reads a prefix that many rows share once for all of them:
    /// auto does where that saves enough; never with --batch-invariant [default: auto]
    #[arg(long, value_enum)]
    pub(crate) cascade_attention: Option<CascadeChoice>,

    /// Compute every request's tokens to the same bits whatever runs beside it and however its
    /// prompt is cut; slower on GPUs, always so on CPUs
    #[arg(long)]
    pub(crate) batch_invariant: bool,

    /// Type of the weights: auto computes with them as they are stored on CPUs and in bf16 on GPUs;
    /// f32, on CPUs only, expands them, which is exact, larger and slower
    #[arg(long, value_enum, default_value_t = WeightDtype::Auto)]
    pub(crate) dtype: WeightDtype,

    /// Round the linear layers' weights when they are loaded, or also the output matrix's: fp8 has
    /// half the bytes of bf16, one scale for each row, and leaves embeddings as they are. Models
    /// whose layers are stored in fp8 need no flag for these
    #[arg(long, short = 'q', value_enum, value_name = "METHOD")]
    pub(crate) quantization: Option<Quantization>,

    /// Threads that compute, on CPUs only [default: all cores]
    #[arg(long, value_name = "THREADS")]
    pub(crate) threads: Option<NonZeroU32>,

    /// The widest vector instructions to compute with, on CPUs only [default: the widest there are]
    #[arg(long, value_enum, value_name = "LEVEL")]
    pub(crate) simd: Option<SimdChoice>,

    /// Launch each operator by itself instead of replaying CUDA graphs: starts sooner, steps take
    /// the host longer; on GPUs only
    #[arg(long)]
    pub(crate) enforce_eager: bool,

    /// How the host waits for a GPU: spin wakes some microseconds earlier and keeps a core busy
    /// [default: sleep]
    #[arg(long, value_enum)]
    pub(crate) device_wait: Option<DeviceWait>,

    /// Where weights come from: auto reads MODEL's, dummy makes up random ones for MODEL's
    /// config.json, to measure speed without a download
    #[arg(long, value_enum, default_value_t = LoadFormat::Auto)]
    pub(crate) load_format: LoadFormat,

    /// Seed of dummy weights, and of the draws of run, chat and bench
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,

    /// Show no progress bars
    #[arg(long)]
    pub(crate) no_progress: bool,
}

/// How steps follow each other, where one engine runs to the end.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Engine")]
pub(crate) struct StepArgs {
    /// Plan and launch the next batch while the current one computes; off gives the same tokens
    #[arg(long, value_enum, default_value_t = Switch::On)]
    pub(crate) overlap: Switch,

    /// File for a timeline of every step, to open in https://ui.perfetto.dev or chrome://tracing
    #[arg(long, value_name = "FILE")]
    pub(crate) trace_file: Option<PathBuf>,
}

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceChoice {
    Auto,
    Cpu,
    /// A GPU by its number, as the driver counts.
    Cuda(usize),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "auto" => Ok(Self::Auto),
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "cuda" => Ok(Self::Cuda(0)),
            Some(("cuda", number)) => {
                let number = number.parse();
                number.map(Self::Cuda).map_err(|_| "cuda: needs a GPU's number".to_owned())
            }
            _ => Err("it is none of auto, cpu, cuda and cuda:NUMBER".to_owned()),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceWait {
    Sleep,
    Spin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvChoice {
    Auto,
    F32,
    F16,
    Bf16,
    #[value(alias = "fp8_e4m3")]
    Fp8,
    Int8,
    Int4,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SoftmaxChoice {
    Online,
    Unified,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CascadeChoice {
    Auto,
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum WeightDtype {
    Auto,
    F32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Quantization {
    /// The layers' weights
    Fp8,
    /// The output matrix's as well
    Fp8All,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LoadFormat {
    Auto,
    Dummy,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices() {
        let check = |text: &str, expected| assert_eq!(text.parse().ok(), expected, "{text}");
        check("auto", Some(DeviceChoice::Auto));
        check("cpu", Some(DeviceChoice::Cpu));
        check("cuda", Some(DeviceChoice::Cuda(0)));
        check("cuda:3", Some(DeviceChoice::Cuda(3)));
        for wrong in ["", "gpu", "cuda:", "cuda:-1", "cpu:0", "cuda0"] {
            check(wrong, None);
        }
    }
}

/// The names of [`SimdLevel`]s.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SimdChoice {
    /// None beyond what every processor of the kind has.
    Plain,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512, with VNNI and bf16 where the processor has them.
    Avx512,
    /// AMX's tiles, for weights in bf16.
    Amx,
}

impl From<SimdChoice> for SimdLevel {
    fn from(choice: SimdChoice) -> Self {
        match choice {
            SimdChoice::Plain => Self::Plain,
            SimdChoice::Avx2 => Self::Avx2,
            SimdChoice::Avx512 => Self::Avx512,
            SimdChoice::Amx => Self::Amx,
        }
    }
}
