//! What a model finds again in a long prompt: what users write.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;

use super::bench::FigureFiles;
use super::{EngineArgs, MODEL_HELP};

pub(super) const RECALL_EXAMPLES: &str = "\
Examples:
  inflight bench recall book.txt
  inflight bench recall book.txt --kv-budget 512
  inflight bench recall book.txt --kv-window 512

In each prompt five facts (\"The secret word of the tiger is marble.\") lie at five depths of a \
stretch of the text; its end asks for one of them. A fact counts as recalled if greedy sampling \
gives its word.";

#[derive(Args, Debug)]
pub(crate) struct RecallArgs {
    /// File with the text that facts are put into, in UTF-8
    pub(crate) file: PathBuf,

    #[arg(long, help = MODEL_HELP, default_value = "default", hide_default_value = true)]
    pub(crate) model: String,

    /// Tokens of a prompt, about
    #[arg(long, default_value = "2048", value_name = "TOKENS")]
    pub(crate) tokens: NonZeroUsize,

    /// Stretches of the text; five prompts each
    #[arg(long, default_value = "8", value_name = "TEXTS")]
    pub(crate) texts: NonZeroUsize,

    #[command(flatten)]
    pub(crate) files: FigureFiles,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}
