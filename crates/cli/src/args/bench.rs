//! Experiments: what users write.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand, ValueEnum};
use inflight_bench::BuiltInConfig;

use super::{EngineArgs, MODEL_HELP, PolicyArgs};

const OFFLINE_EXAMPLES: &str = "\
Examples:
  inflight bench offline --config llama-3.1-8b --input-len 256 --output-len 8192 --overlap both
  inflight bench offline model.gguf --num-prompts 8 --temperature 0.8 --top-p 0.95
  inflight bench offline ./Qwen3-8B --load-format dummy --json figures.json --trace steps.json

Device busy: the union of the batches' compute intervals, each from an event on the compute stream \
before the batch's first operation to one after its last, divided by the time from the first \
interval's start to the last one's end.

With --overlap both the runs must give the same tokens; if they do not, the exit code is 1.";

#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) command: BenchCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Many requests at once, without a server: token ids in and out, ended by length alone
    #[command(after_help = OFFLINE_EXAMPLES)]
    Offline(OfflineArgs),
}

#[derive(Args, Debug)]
pub(crate) struct OfflineArgs {
    #[arg(help = MODEL_HELP, default_value = "default", hide_default_value = true)]
    pub(crate) model: String,

    /// Shapes of a well-known model, with random weights, instead of MODEL
    #[arg(long, value_parser = built_in(), value_name = "NAME", conflicts_with = "model")]
    pub(crate) config: Option<BuiltInConfig>,

    /// Requests, all of them there from the start
    #[arg(long, default_value = "32", value_name = "REQUESTS")]
    pub(crate) num_prompts: NonZeroUsize,

    /// Tokens of each prompt, drawn at random
    #[arg(long, default_value = "256", value_name = "TOKENS")]
    pub(crate) input_len: NonZeroUsize,

    /// Tokens to generate for each prompt
    #[arg(long, default_value = "256", value_name = "TOKENS")]
    pub(crate) output_len: NonZeroUsize,

    /// Plan and launch the next batch while the current one computes; both measures with and
    /// without, and compares their tokens
    #[arg(long, value_enum, default_value_t = OverlapChoice::On)]
    pub(crate) overlap: OverlapChoice,

    /// Measure from the first step on; otherwise the same prompts go through the engine before
    #[arg(long)]
    pub(crate) no_warm_up: bool,

    /// File for all figures, as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,

    /// File for a timeline of every step with its bubbles and their causes, to open in
    /// https://ui.perfetto.dev; with --overlap both, `on` and `off` are put before its extension
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,

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
pub(crate) enum OverlapChoice {
    On,
    Off,
    Both,
}

/// Built-in configurations by their names.
fn built_in() -> impl TypedValueParser<Value = BuiltInConfig> {
    let find = |name: String| BuiltInConfig::ALL.into_iter().find(|c| c.name() == name);
    let names = PossibleValuesParser::new(BuiltInConfig::ALL.map(BuiltInConfig::name));
    names.map(move |name| find(name).expect("the parser lets only their names through"))
}
