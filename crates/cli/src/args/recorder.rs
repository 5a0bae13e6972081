//! What recording costs: what users write.

use std::num::NonZeroUsize;

use clap::Args;

use super::EngineArgs;
use super::bench::{FigureFiles, MeasuredModel};

pub(super) const RECORDER_EXAMPLES: &str = "\
Examples:
  inflight bench recorder                           the default model
  inflight bench recorder --config llama-3.1-8b --num-prompts 32 --output-len 512
  inflight bench recorder --num-prompts 1 --repeats 9 --json recorder.json

Runs take turns, with the recorder of a server and with nobody who is told of steps: then the \
engine reads no event's time and writes nothing down.";

#[derive(Args, Debug)]
pub(crate) struct RecorderArgs {
    #[command(flatten)]
    pub(crate) measured: MeasuredModel,

    /// Requests, all of them there from the start
    #[arg(long, default_value = "32", value_name = "REQUESTS")]
    pub(crate) num_prompts: NonZeroUsize,

    /// Tokens of each prompt, drawn at random
    #[arg(long, default_value = "32", value_name = "TOKENS")]
    pub(crate) input_len: NonZeroUsize,

    /// Tokens to generate for each prompt
    #[arg(long, default_value = "128", value_name = "TOKENS")]
    pub(crate) output_len: NonZeroUsize,

    /// Runs with the recorder, and as many without
    #[arg(long, default_value = "5", value_name = "RUNS")]
    pub(crate) repeats: NonZeroUsize,

    #[command(flatten)]
    pub(crate) files: FigureFiles,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}
