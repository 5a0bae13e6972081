//! How batches are composed and who goes first.

use clap::{Args, ValueEnum};
use std::num::NonZeroUsize;

/// What decides who runs when. Flags that mean what vLLM's or text-generation-inference's mean
/// bear their names.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Scheduling")]
pub(crate) struct PolicyArgs {
    /// When requests may join those that run: at every step, or, for comparison, when the last one
    /// of the batch has ended
    #[arg(long, value_enum, default_value_t)]
    pub(crate) batching: BatchingChoice,

    /// Most requests of a static batch [default: --max-num-seqs]
    #[arg(long, value_name = "SEQUENCES")]
    pub(crate) static_batch_size: Option<NonZeroUsize>,

    /// Who shares a batch: prompts in chunks beside the running requests; or each apart, prompts
    /// first, or running requests first until enough prompts wait or have waited for long enough
    #[arg(long, value_enum, default_value_t)]
    pub(crate) mixing: MixingChoice,

    /// Prompts wait until there are this many for each running request [default: 0, they do not
    /// wait; with --mixing decode-first 0.3]
    #[arg(long, value_name = "RATIO")]
    pub(crate) waiting_served_ratio: Option<f64>,

    /// Prompts wait for so many steps at most; 0: as many as it takes [default: 20]
    #[arg(long, value_name = "STEPS")]
    pub(crate) max_waiting_tokens: Option<u64>,

    /// Most tokens of prompts in a batch [default: what --max-num-batched-tokens leaves]
    #[arg(long, value_name = "TOKENS")]
    pub(crate) max_batch_prefill_tokens: Option<NonZeroUsize>,

    /// Most tokens that running requests may come to have together, prompts and all they may
    /// generate: then none ever gives way to another, and fewer run [default: no limit]
    #[arg(long, value_name = "TOKENS")]
    pub(crate) max_batch_total_tokens: Option<NonZeroUsize>,

    /// Keep 99 of 100 times between two tokens of a request within this, by fewer prompt tokens in
    /// a batch and fewer requests at once [default: none, most tokens a second]
    #[arg(long, value_name = "MS")]
    pub(crate) target_itl_ms: Option<f64>,

    /// Give each prompt what it needs for its first token to come within this, instead of one
    /// prompt after the other; --target-itl-ms comes first [default: none]
    #[arg(long, value_name = "MS")]
    pub(crate) target_ttft_ms: Option<f64>,

    /// Who goes first: whoever came first; the lowest `priority` of the requests; or the `user`
    /// that had the fewest tokens
    #[arg(long, value_enum, default_value_t)]
    pub(crate) scheduling_policy: OrderChoice,

    /// Longest time that a request may wait for its place in the batch; then it is refused with
    /// status 503 [default: no limit]
    #[arg(long, value_name = "MS")]
    pub(crate) max_queue_time_ms: Option<f64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum BatchingChoice {
    #[default]
    Continuous,
    Static,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum MixingChoice {
    #[default]
    Chunked,
    PrefillFirst,
    DecodeFirst,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum OrderChoice {
    #[default]
    Fcfs,
    Priority,
    Fair,
}
