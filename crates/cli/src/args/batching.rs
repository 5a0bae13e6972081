//! `inflight bench batching`: what users write.

use std::num::NonZeroUsize;

use clap::{Args, ValueEnum};

use super::EngineArgs;
use super::bench::{FigureFiles, MeasuredModel, OverlapChoice};

pub(crate) const BATCHING_EXAMPLES: &str = "\
Examples:
  inflight bench batching                                        the default model, minutes on a CPU
  inflight bench batching --config llama-3.1-8b --json out.json  as published, on a GPU
  inflight bench batching --experiments long-prompt --target-itl-ms 100 --chunks 64,256

Lengths are Anyscale's: prompts of 512 tokens, outputs from an exponential distribution of mean \
128, drawn again while over the limit; for rates, prompts of 128 to 384 tokens that come at random \
times. Static batches leave no row behind for a request that has ended, so they are faster here \
than padded ones would be.";

#[derive(Args, Debug)]
pub(crate) struct BatchingArgs {
    #[command(flatten)]
    pub(crate) measured: MeasuredModel,

    /// What to run: burst is all requests at once, rates is latency against requests a second,
    /// long-prompt is a long prompt that enters 32 decodes, tenants is one user beside a flood
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [BatchingExperiment::Burst,
        BatchingExperiment::Rates])]
    pub(crate) experiments: Vec<BatchingExperiment>,

    /// Divide all published lengths by this [default: 8 on CPUs, 1 on GPUs]
    #[arg(long, value_name = "FACTOR")]
    pub(crate) scale: Option<NonZeroUsize>,

    /// Requests of a burst; as published 1000 [default: 64 on CPUs, 1000 on GPUs]
    #[arg(long, value_name = "REQUESTS")]
    pub(crate) num_prompts: Option<NonZeroUsize>,

    /// Static batches of the published sizes 16, 12, 8 and 4: their throughput is steady
    #[arg(long, default_value = "8", value_name = "BATCHES")]
    pub(crate) static_batches: NonZeroUsize,

    /// Published limits on output lengths to run
    #[arg(long, value_delimiter = ',', default_values_t = [32, 128, 512, 1536],
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1536))]
    pub(crate) limits: Vec<usize>,

    /// Plan and launch the next batch while the current one computes; both runs the burst with and
    /// without
    #[arg(long, value_enum, default_value_t = OverlapChoice::On)]
    pub(crate) overlap: OverlapChoice,

    /// Requests a second [default: a quarter, a half, three quarters of what the burst's last
    /// continuous run served, or 1 and 4 without a burst]
    #[arg(long, value_delimiter = ',', value_name = "RATE")]
    pub(crate) rates: Vec<f64>,

    /// Requests at each rate; as published 100 [default: 32 on CPUs, 100 on GPUs]
    #[arg(long, value_name = "REQUESTS")]
    pub(crate) rate_prompts: Option<NonZeroUsize>,

    /// Tokens of the long prompt [default: 32768 divided by --scale]
    #[arg(long, value_name = "TOKENS")]
    pub(crate) long_prompt: Option<NonZeroUsize>,

    /// Targets for the time between two tokens to run the long prompt with
    #[arg(long, value_delimiter = ',', value_name = "MS")]
    pub(crate) target_itl_ms: Vec<f64>,

    /// Fixed chunks to run the long prompt with
    #[arg(long, value_delimiter = ',', value_name = "TOKENS")]
    pub(crate) chunks: Vec<NonZeroUsize>,

    #[command(flatten)]
    pub(crate) files: FigureFiles,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BatchingExperiment {
    Burst,
    Rates,
    LongPrompt,
    Tenants,
}
