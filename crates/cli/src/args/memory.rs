//! How the KV cache's memory is used.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use inflight_engine::{KvKeep, KvWindow, Preemption};

/// What is kept in the KV cache, and what becomes of requests when it is full.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Memory")]
pub(crate) struct MemoryArgs {
    /// Keep the KV cache of what was computed, while there is room, for requests that begin with
    /// the same tokens [default]
    #[arg(long, overrides_with = "no_enable_prefix_caching")]
    enable_prefix_caching: bool,

    /// Compute every prompt from its start
    #[arg(long)]
    no_enable_prefix_caching: bool,

    /// What a request does that gives way because the KV cache is full: compute its tokens again,
    /// have them moved to the host and back, or whichever was measured to be faster
    #[arg(long, value_enum, default_value_t = PreemptionChoice::Auto)]
    preemption: PreemptionChoice,

    /// Host memory in GiB for requests that gave way, pinned where a GPU computes [default: 4, or
    /// an eighth of the memory on small machines; none where all requests fit the KV cache]
    #[arg(long, value_name = "GIB")]
    pub(crate) swap_space: Option<f64>,

    /// Host memory in GiB for what the KV cache kept for later requests and has no room for any
    /// more; it comes back when a request begins with it. Requests that gave way may use it, too,
    /// as what is left of --swap-space serves this [default: 0, none is kept]
    #[arg(long, value_name = "GIB", allow_negative_numbers = true)]
    pub(crate) host_cache: Option<f64>,

    /// File for what the host keeps, so that it survives restarts; on CPUs only, needs
    /// --host-cache. Bad blocks are dropped; nothing is synced before the server ends in order
    #[arg(long, value_name = "FILE")]
    pub(crate) cache_file: Option<PathBuf>,

    /// Most GiB of --cache-file; the least recently used goes first
    #[arg(long, default_value_t = 4.0, value_name = "GIB", allow_negative_numbers = true)]
    pub(crate) cache_file_size: f64,

    /// Keep only the latest so many tokens of a request in the KV cache, and its first ones: a
    /// request may then have any number of tokens in constant memory, and --max-model-len be more
    /// than the model was made for. Requests may say otherwise by `kv_cache` [default: keep all]
    #[arg(long, value_name = "TOKENS")]
    kv_window: Option<NonZeroUsize>,

    /// First tokens of a request that stay with --kv-window [default: 4]
    #[arg(long, value_name = "TOKENS", requires = "kv_window")]
    kv_sinks: Option<usize>,

    /// Keep of a request's prompt only so many tokens in the KV cache, those that its end attends
    /// to most, each head its own, and all that is generated. Requests may say otherwise by
    /// `kv_cache` [default: keep all]
    #[arg(long, value_name = "TOKENS", conflicts_with = "kv_window")]
    kv_budget: Option<NonZeroUsize>,

    /// Debugging: full blocks of the KV cache have checksums, which are verified when a block is
    /// used again or comes back from the host; a block that has changed ends the server with its
    /// name; on CPUs only
    #[arg(long)]
    pub(crate) kv_checksums: bool,
}

impl MemoryArgs {
    pub(crate) fn prefix_caching(&self) -> bool {
        self.enable_prefix_caching || !self.no_enable_prefix_caching
    }

    /// For measurements that send the same prompts more than once: unless it was asked for, they
    /// are not to be found in the KV cache.
    pub(crate) fn measured(mut self) -> Self {
        self.no_enable_prefix_caching = !self.enable_prefix_caching;
        self
    }

    /// What requests keep that do not say.
    pub(crate) fn kv_keep(&self) -> KvKeep {
        match (self.kv_window, self.kv_budget) {
            (None, None) => KvKeep::All,
            (None, Some(budget)) => KvKeep::Attended(budget.get()),
            (Some(window), _) => KvKeep::Latest(KvWindow {
                num_sinks: self.kv_sinks.unwrap_or(KvWindow::USUAL_SINKS),
                window: window.get(),
            }),
        }
    }

    pub(crate) fn preemption(&self) -> Preemption {
        match self.preemption {
            PreemptionChoice::Auto => Preemption::Auto,
            PreemptionChoice::Recompute => Preemption::Recompute,
            PreemptionChoice::Swap => Preemption::Swap,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PreemptionChoice {
    Auto,
    Recompute,
    Swap,
}
