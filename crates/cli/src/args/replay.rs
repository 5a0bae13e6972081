//! `inflight replay`: what users write.

use std::path::PathBuf;

use clap::Args;

pub(crate) const REPLAY_EXAMPLES: &str = "\
Examples:
  curl -s http://127.0.0.1:8000/debug/replay > record.json
  inflight replay record.json            show the first plans, and all that are decided otherwise
  inflight replay record.json --all      show every plan

An engine that fails leaves such a file, whose place is in its log. It has lengths and which \
blocks are alike, no text and no tokens. The scheduler is told again all that it was told; its \
books are checked after every plan. The exit code is 0 only if all was decided again as before.";

/// Does again what an engine's scheduler decided.
#[derive(Args, Debug)]
pub(crate) struct ReplayArgs {
    /// A record: of `GET /debug/replay`, or what an engine left that failed
    pub(crate) file: PathBuf,

    /// Show plans after this many
    #[arg(long, default_value_t = 0, value_name = "PLANS")]
    pub(crate) first: usize,

    /// Show so many plans
    #[arg(long, default_value_t = 20, value_name = "PLANS")]
    pub(crate) num_plans: usize,

    /// Show all plans
    #[arg(long)]
    pub(crate) all: bool,
}
