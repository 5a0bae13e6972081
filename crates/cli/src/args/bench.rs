//! Experiments: what users write.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand, ValueEnum};
use inflight_backend::Dtype;
use inflight_bench::BuiltInConfig;

use super::batching::{BATCHING_EXAMPLES, BatchingArgs};
use super::bench_serve::{SERVE_LOAD_EXAMPLES, ServeLoadArgs};
use super::chats::{CHATS_EXAMPLES, ChatsArgs};
use super::recall::{RECALL_EXAMPLES, RecallArgs};
use super::recorder::{RECORDER_EXAMPLES, RecorderArgs};
use super::text::{TEXT_EXAMPLES, TextArgs};
use super::{DeviceChoice, EngineArgs, KvChoice, MODEL_HELP, PolicyArgs};

const OFFLINE_EXAMPLES: &str = "\
Examples:
  inflight bench offline --config llama-3.1-8b --input-len 256 --output-len 8192 --overlap both
  inflight bench offline model.gguf --num-prompts 8 --temperature 0.8 --top-p 0.95
  inflight bench offline ./Qwen3-8B --load-format dummy --json figures.json --trace steps.json

Device busy: the union of the batches' compute intervals, each from an event on the compute stream \
before the batch's first operation to one after its last, divided by the time from the first \
interval's start to the last one's end.

With --overlap both the runs must give the same tokens; if they do not, the exit code is 1.";

const KERNELS_EXAMPLES: &str = "\
Examples:
  inflight bench kernels --config llama-3.1-8b --json kernels.json
  inflight bench kernels --config llama-3.1-8b --rows 1,32,8192 --batches 32 --contexts 4096
  inflight bench kernels model.gguf --device cpu --weights q4_1

Roofline: the time that moving every input and output once or all multiplications and additions \
would take at the rates the device was first measured to have, whichever is longer, over the time \
taken. Weights, keys and values come from memory each time, not from a cache; what was just \
computed (norms, activations) may come from one. Beside: the same products by cuBLASLt alone, \
decode attention with the softmax of --softmax unified.";

const ASYNC_EXAMPLES: &str = "\
Examples:
  inflight bench async                              the default model; on a CPU 256 tokens each
  inflight bench async --config llama-3.1-8b --picture steps.html --plot async.svg
  inflight bench async --num-prompts 8 --output-len 64 --repeats 3 --json async.json

As in Hugging Face's \"Unlocking asynchronicity in continuous batching\": 32 prompts of 256 \
tokens, 8192 tokens of output each on a GPU. Overlap on and off take turns; both must give the \
same tokens, otherwise the exit code is 1.";

#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) command: BenchCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Many requests at once, without a server: token ids in and out, ended by length alone
    #[command(after_help = OFFLINE_EXAMPLES)]
    Offline(Box<OfflineArgs>),

    /// What batching at every step gains over batches that run to their end, as Anyscale measured
    /// it, and what latency costs under load
    #[command(after_help = BATCHING_EXAMPLES)]
    Batching(Box<BatchingArgs>),

    /// Chats that come back beside running streams: what it gains to keep on the host what the KV
    /// cache has no room for
    #[command(after_help = CHATS_EXAMPLES)]
    Chats(Box<ChatsArgs>),

    /// How well the model predicts a text, and in how much memory: what settings of the KV cache
    /// cost
    #[command(after_help = TEXT_EXAMPLES)]
    Text(Box<TextArgs>),

    /// What the model finds again in a long prompt: what settings of the KV cache cost
    #[command(after_help = RECALL_EXAMPLES)]
    Recall(Box<RecallArgs>),

    /// Every operator alone at a model's sizes: time, rates, share of what the device could do
    #[command(after_help = KERNELS_EXAMPLES)]
    Kernels(KernelsArgs),

    /// The reference experiment: the same work with overlap on and off, and what the device did
    #[command(after_help = ASYNC_EXAMPLES)]
    Async(Box<AsyncArgs>),

    /// What it costs that every step is written down: the same work with the recorder and without
    #[command(after_help = RECORDER_EXAMPLES)]
    Recorder(Box<RecorderArgs>),

    /// Two files of figures side by side, of any of these experiments
    Compare(CompareArgs),

    /// Any server that speaks OpenAI's API, under load: times as its clients see them
    #[command(after_help = SERVE_LOAD_EXAMPLES)]
    Serve(Box<ServeLoadArgs>),
}

#[derive(Args, Debug)]
pub(crate) struct KernelsArgs {
    #[arg(help = MODEL_HELP, default_value = "default", hide_default_value = true)]
    pub(crate) model: String,

    /// Shapes of a well-known model instead of MODEL's
    #[arg(long, value_parser = built_in(), value_name = "NAME", conflicts_with = "model")]
    pub(crate) config: Option<BuiltInConfig>,

    /// Rows of matrix products, and tokens of what goes token by token [default: 1,8,32,128,512 and
    /// on GPUs 2048,8192]
    #[arg(long, value_delimiter = ',', value_name = "ROWS")]
    pub(crate) rows: Vec<NonZeroUsize>,

    /// Sequences of decode attention and of sampling [default: 1,8,32, on GPUs 256 as well]
    #[arg(long, value_delimiter = ',', value_name = "SEQUENCES")]
    pub(crate) batches: Vec<NonZeroUsize>,

    /// Tokens of each of those sequences [default: 512 and on GPUs 4096]
    #[arg(long, value_delimiter = ',', value_name = "TOKENS")]
    pub(crate) contexts: Vec<NonZeroUsize>,

    /// Tokens of a prompt, for prefill attention [default: 512 and on GPUs 1024,2048,8192]
    #[arg(long, value_delimiter = ',', value_name = "TOKENS")]
    pub(crate) prompts: Vec<NonZeroUsize>,

    /// How CPUs store weights: a type of GGUF files; GPUs hold bf16
    #[arg(long, value_parser = weight_type, default_value = "bf16", value_name = "TYPE")]
    pub(crate) weights: Dtype,

    #[command(flatten)]
    pub(crate) files: FigureFiles,

    /// What computes: auto is a GPU if there is one that can be used, otherwise the CPU; cuda fails
    /// if there is none; cuda:1 is the second GPU
    #[arg(long, default_value = "auto", value_name = "auto|cpu|cuda")]
    pub(crate) device: DeviceChoice,

    /// Tokens of a block of the KV cache [default: 16; on GPUs 32 where its numbers have 8
    /// bits or 4]
    #[arg(long, value_name = "TOKENS")]
    pub(crate) block_size: Option<NonZeroUsize>,

    /// Type of the KV cache's numbers: auto is f16 on CPUs and bf16 on GPUs, which besides have
    /// fp8, int8 and int4
    #[arg(long, alias = "kv-dtype", value_enum, default_value_t = KvChoice::Auto)]
    pub(crate) kv_cache_dtype: KvChoice,

    /// Threads of a CPU [default: all cores]
    #[arg(long, value_name = "THREADS")]
    pub(crate) threads: Option<NonZeroUsize>,

    /// No progress on the terminal
    #[arg(long)]
    pub(crate) no_progress: bool,
}

#[derive(Args, Debug)]
pub(crate) struct AsyncArgs {
    #[command(flatten)]
    pub(crate) measured: MeasuredModel,

    /// Requests, all of them there from the start
    #[arg(long, default_value = "32", value_name = "REQUESTS")]
    pub(crate) num_prompts: NonZeroUsize,

    /// Tokens of each prompt, drawn at random
    #[arg(long, default_value = "256", value_name = "TOKENS")]
    pub(crate) input_len: NonZeroUsize,

    /// Tokens to generate for each prompt [default: 8192 on GPUs, as published, and 256 on CPUs]
    #[arg(long, value_name = "TOKENS")]
    pub(crate) output_len: Option<NonZeroUsize>,

    /// Runs with overlap, and as many without
    #[arg(long, default_value = "1", value_name = "RUNS")]
    pub(crate) repeats: NonZeroUsize,

    /// Measure from the first step on; otherwise the same prompts go through the engine before
    #[arg(long)]
    pub(crate) no_warm_up: bool,

    #[command(flatten)]
    pub(crate) files: FigureFiles,

    /// File for a timeline of every step of the last two runs, to open in https://ui.perfetto.dev:
    /// `on` and `off` are put before its extension
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,

    /// Write a page that shows the steps as a picture, overlap on beside off: host, copies, device,
    /// and why the device was idle
    #[arg(long, value_name = "FILE")]
    pub(crate) picture: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) draws: DrawArgs,

    #[command(flatten)]
    pub(crate) policy: PolicyArgs,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

/// Where figures go besides the terminal.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct FigureFiles {
    /// File for all figures, as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,

    /// File for a plot, as SVG
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct CompareArgs {
    /// Figures that an experiment wrote by --json
    pub(crate) a: PathBuf,

    /// Others of the same experiment
    pub(crate) b: PathBuf,

    /// Show what is neither better nor worse, too: counts, sizes
    #[arg(long)]
    pub(crate) all: bool,

    #[command(flatten)]
    pub(crate) files: FigureFiles,
}

#[derive(Args, Debug)]
pub(crate) struct OfflineArgs {
    #[command(flatten)]
    pub(crate) measured: MeasuredModel,

    /// Requests, all of them there from the start
    #[arg(long, default_value = "32", value_name = "REQUESTS")]
    pub(crate) num_prompts: NonZeroUsize,

    /// Tokens of each prompt, drawn at random
    #[arg(long, default_value = "256", value_name = "TOKENS")]
    pub(crate) input_len: NonZeroUsize,

    /// Tokens at the begin of all prompts that are the same; with --enable-prefix-caching they are
    /// computed once
    #[arg(long, default_value_t = 0, value_name = "TOKENS")]
    pub(crate) shared_prefix: usize,

    /// Tokens to generate for each prompt
    #[arg(long, default_value = "256", value_name = "TOKENS")]
    pub(crate) output_len: NonZeroUsize,

    /// File with the requests' lengths, a JSON list of pairs [tokens in, tokens out], instead
    #[arg(long, value_name = "FILE")]
    #[arg(conflicts_with_all = ["num_prompts", "input_len", "output_len"])]
    pub(crate) lengths: Option<PathBuf>,

    /// Plan and launch the next batch while the current one computes; both measures with and
    /// without, and compares their tokens
    #[arg(long, value_enum, default_value_t = OverlapChoice::On)]
    pub(crate) overlap: OverlapChoice,

    /// Measure from the first step on; otherwise the same prompts go through the engine before
    #[arg(long)]
    pub(crate) no_warm_up: bool,

    #[command(flatten)]
    pub(crate) files: FigureFiles,

    /// File for a timeline of every step with its bubbles and their causes, to open in
    /// https://ui.perfetto.dev; with --overlap both, `on` and `off` are put before its extension
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,

    /// Hold every output to a grammar: JSON without end, of objects with texts, numbers and words
    #[arg(long, value_enum)]
    pub(crate) constraint: Option<ConstraintChoice>,

    /// Model or folder whose tokenizer --constraint takes, if MODEL has none
    #[arg(long, value_name = "MODEL", requires = "constraint")]
    pub(crate) tokenizer: Option<String>,

    /// Write a page that shows the steps as a picture, overlap on beside off: host, copies, device,
    /// and why the device was idle
    #[arg(long, value_name = "FILE")]
    pub(crate) picture: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) draws: DrawArgs,

    #[command(flatten)]
    pub(crate) policy: PolicyArgs,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

/// How tokens are drawn: greedily, unless told otherwise.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct DrawArgs {
    /// Randomness: 0 always takes the likeliest token, 1 follows the model's probabilities
    #[arg(long, default_value_t = 0.0)]
    pub(crate) temperature: f32,

    /// Draw from the likeliest tokens that reach this probability together; 1 keeps all
    #[arg(long, default_value_t = 1.0)]
    pub(crate) top_p: f32,

    /// Draw from this many of the likeliest tokens; 0 keeps all
    #[arg(long, default_value_t = 0)]
    pub(crate) top_k: u32,

    /// Keep tokens at least this fraction as likely as the likeliest; 0 keeps all
    #[arg(long, default_value_t = 0.0)]
    pub(crate) min_p: f32,

    /// Over 1 discourages tokens that were there before
    #[arg(long, default_value_t = 1.0)]
    pub(crate) repetition_penalty: f32,

    /// Over 0 discourages tokens that the output has
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) presence_penalty: f32,

    /// Over 0 discourages tokens by how often the output has them
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) frequency_penalty: f32,

    /// Log-probabilities of each token, and of so many of the likeliest
    #[arg(long, value_name = "TOKENS")]
    pub(crate) logprobs: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ConstraintChoice {
    Json,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OverlapChoice {
    On,
    Off,
    Both,
}

/// The model that an experiment runs.
#[derive(Args, Clone, Debug)]
pub(crate) struct MeasuredModel {
    #[arg(help = MODEL_HELP, default_value = "default", hide_default_value = true)]
    pub(crate) model: String,

    /// Shapes of a well-known model, with random weights, instead of MODEL
    #[arg(long, value_parser = built_in(), value_name = "NAME", conflicts_with = "model")]
    pub(crate) config: Option<BuiltInConfig>,
}

/// Built-in configurations by their names.
pub(super) fn built_in() -> impl TypedValueParser<Value = BuiltInConfig> {
    let find = |name: String| BuiltInConfig::ALL.into_iter().find(|c| c.name() == name);
    let names = PossibleValuesParser::new(BuiltInConfig::ALL.map(BuiltInConfig::name));
    names.map(move |name| find(name).expect("the parser lets only their names through"))
}

/// Types of weights by their names.
fn weight_type(name: &str) -> Result<Dtype, String> {
    use Dtype::{BF16, F16, F32, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
    const ALL: [Dtype; 11] = [F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4K, Q5K, Q6K];
    let found = ALL.into_iter().find(|dtype| dtype.name().eq_ignore_ascii_case(name));
    found.ok_or_else(|| format!("none of {}", ALL.map(Dtype::name).join(", ").to_lowercase()))
}
