//! How the KV cache's memory is used.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use inflight_engine::Preemption;

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
