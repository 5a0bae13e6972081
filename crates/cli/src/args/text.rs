//! How well a model predicts a text: what users write.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;

use super::bench::FigureFiles;
use super::{EngineArgs, MODEL_HELP};

pub(super) const TEXT_EXAMPLES: &str = "\
Examples:
  inflight bench text book.txt --tokens 8192
  inflight bench text book.txt --tokens 65536 --kv-window 4064 --kv-cache-tokens 4096
  inflight bench text book.txt --kv-cache-dtype int8
  inflight bench text book.txt --tokens 2304 --answer 256 --texts 8 --kv-budget 1024

Perplexity: e to the mean of the negative log-probability of each token, given those before it \
that the KV cache still has.";

#[derive(Args, Debug)]
pub(crate) struct TextArgs {
    /// File with the text, in UTF-8
    pub(crate) file: PathBuf,

    #[arg(long, help = MODEL_HELP, default_value = "default", hide_default_value = true)]
    pub(crate) model: String,

    /// Tokens of it, from the start [default: as many as the model can take]
    #[arg(long, value_name = "TOKENS")]
    pub(crate) tokens: Option<NonZeroUsize>,

    /// So many texts of --tokens tokens each, one behind the other in the file
    #[arg(long, default_value = "1", requires = "tokens", value_name = "TEXTS")]
    pub(crate) texts: NonZeroUsize,

    /// How many of each text's last tokens are computed one by one, as answers are; those before
    /// are the prompt
    #[arg(long, default_value = "1", value_name = "TOKENS")]
    pub(crate) answer: NonZeroUsize,

    /// A line for every so many tokens
    #[arg(long, default_value = "8192", value_name = "TOKENS")]
    pub(crate) every: NonZeroUsize,

    #[command(flatten)]
    pub(crate) files: FigureFiles,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}
