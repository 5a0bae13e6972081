//! The experiment on chats that come back.

use std::num::NonZeroUsize;

use clap::Args;

use super::EngineArgs;
use super::bench::{FigureFiles, MeasuredModel};

pub(super) const CHATS_EXAMPLES: &str = "\
Examples:
  inflight bench chats --config llama-3.1-8b --kv-cache-tokens 32768 --host-cache 24
  inflight bench chats --device cpu --kv-cache-tokens 4096 --host-cache 1 --prefix-len 1024

First all chats are served once. Then streams generate without end, and one turn of a chat begins \
every interval: of chats that are on the device, of more chats than it can hold, so that they come \
from the host, and of the same chats with nothing found.";

#[derive(Args, Debug)]
pub(crate) struct ChatsArgs {
    #[command(flatten)]
    pub(crate) measured: MeasuredModel,

    /// Tokens that a chat sends again with every turn
    #[arg(long, default_value = "4096", value_name = "TOKENS")]
    pub(crate) prefix_len: NonZeroUsize,

    /// New tokens of a turn
    #[arg(long, default_value = "64", value_name = "TOKENS")]
    pub(crate) turn_len: NonZeroUsize,

    /// Tokens generated in a turn
    #[arg(long, default_value = "16", value_name = "TOKENS")]
    pub(crate) output_len: NonZeroUsize,

    /// Chats in turn, as a multiple of the KV cache
    #[arg(long, default_value_t = 4.0, value_name = "TIMES")]
    pub(crate) working_set: f64,

    /// Requests that generate all the while
    #[arg(long, default_value_t = 8, value_name = "REQUESTS")]
    pub(crate) streams: usize,

    /// Milliseconds from one turn's beginning to the next
    #[arg(long, default_value_t = 200, value_name = "MS")]
    pub(crate) interval_ms: u64,

    /// Turns of each phase
    #[arg(long, default_value = "50", value_name = "TURNS")]
    pub(crate) turns: NonZeroUsize,

    #[command(flatten)]
    pub(crate) files: FigureFiles,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}
