//! What the latest plan decided, and why: for traces, replays and simulations.

use std::time::Duration;

/// What one plan decided. Costs nothing to keep: a few words, overwritten by the next plan.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Decision {
    /// The batch planned; the same as before when there was nothing to plan.
    pub batch: u64,
    /// Who shares it.
    pub share: Share,
    /// Rows of one token.
    pub num_single: usize,
    /// Rows of several tokens.
    pub num_chunks: usize,
    /// Sequences that joined with this plan.
    pub num_admitted: usize,
    /// Sequences that gave way.
    pub num_preempted: usize,
    /// Most prompt tokens that the batch might have.
    pub prefill_limit: usize,
    /// What set that limit.
    pub limited_by: LimitedBy,
    /// Why the first in the queue did not join; `None`: nobody waits, or there was nothing to ask.
    pub held_back: Option<HeldBack>,
    /// How long the step was expected to take, with its margin, once that could be told.
    pub predicted: Option<Duration>,
}

/// Who shares a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Share {
    /// Decodes first, then prompts.
    #[default]
    Both,
    /// Prompts alone.
    Prompts,
    /// Decodes alone.
    Decodes,
}

/// What set the limit on a batch's prompt tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LimitedBy {
    /// The token budget.
    #[default]
    Budget,
    /// `max_batch_prefill_tokens`.
    PrefillTokens,
    /// The target for the time between tokens.
    ItlTarget,
}

/// Why the first in the queue did not join.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeldBack {
    /// The tokens that the batch may have were given out.
    Tokens,
    /// The batch was one of decodes.
    Share,
    /// A static batch has begun.
    StaticBatch,
    /// The gate is closed: too few wait, and not for long enough.
    Gate,
    /// One sequence more would break the target for the time between tokens.
    ItlTarget,
    /// `max_batch_total_tokens`, or the memory that a static batch reserves.
    TotalTokens,
    /// Everybody who waits begins with what a running sequence is still computing.
    Prefix,
    /// Too few blocks are free, or something of it is still on its way.
    Blocks,
    /// The tokens that it would not compute are more than a batch can count.
    Counting,
    /// As many sequences run as may.
    Slots,
}
