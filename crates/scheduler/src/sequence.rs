//! One sequence: what was asked for, its tokens, and how far it has come.

use std::{cell::Cell, fmt, time::Duration};

use inflight_kv_cache::{
    Attended, BlockHash, GroupTables, HostBlockId, PrefixChain, PrefixKey, Retention,
};

use crate::queue::Rank;
use crate::tenant::AccountId;
use crate::{SchedulerConfig, StateSlot, Tenant};

/// Name of a sequence, given by the engine and never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u64);

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What one sequence is to compute. A request with `n` outputs gives `n` of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceSpec {
    /// Its name.
    pub id: SequenceId,
    /// Tokens to start from; at least one.
    pub prompt: Vec<u32>,
    /// Most tokens to generate; at least one. The model's context may end the sequence earlier.
    pub max_tokens: usize,
    /// Stop tokens do not end the sequence before this many tokens were generated. The caller bans
    /// them when sampling those, so that none appears there.
    pub min_tokens: usize,
    /// Tokens that end the sequence; the model's own end token is among them unless it is to be
    /// ignored.
    pub stop_token_ids: Vec<u32>,
    /// Whose blocks it may use, and who may use its.
    pub prefix_key: PrefixKey,
    /// An earlier sequence with the same prompt, which computes it for both: another output of the
    /// same request.
    pub shares_prompt_of: Option<SequenceId>,
    /// Whether the device counts its tokens, for penalties.
    pub counts_tokens: bool,
    /// Whether something is asked of every token of its prompt: all of them are computed then,
    /// whoever has computed them before, and only so many in a batch
    /// ([`SchedulerConfig::max_probes`]).
    pub probes_prompt: bool,
    /// How it is to be served among others.
    pub service: Service,
    /// Which of its tokens stay in the KV cache.
    pub retention: Retention,
}

/// How a sequence is to be served among others. The default is like everybody else.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Service {
    /// Lower goes first, under [`Order::Priority`](crate::Order::Priority).
    pub priority: i32,
    /// Whose account it is on, under [`Order::Fair`](crate::Order::Fair).
    pub tenant: Tenant,
    /// When its result is of no use any more, on the clock of
    /// [`set_now`](crate::Scheduler::set_now).
    pub deadline: Option<Duration>,
}

impl SequenceSpec {
    /// One token after a prompt, with no ifs and buts: to be adjusted.
    #[must_use]
    pub fn new(id: SequenceId, prompt: Vec<u32>) -> Self {
        Self {
            id,
            prompt,
            max_tokens: 1,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            prefix_key: PrefixKey::default(),
            shares_prompt_of: None,
            counts_tokens: false,
            probes_prompt: false,
            service: Service::default(),
            retention: Retention::All,
        }
    }
}

/// Where a sequence is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// In the queue, new or preempted. Holds no blocks.
    Waiting,
    /// Gets rows; owns its blocks and this state slot.
    Running(StateSlot),
    /// Its last token is launched, only commits are missing. Holds nothing any more.
    Finishing,
}

/// A sequence's record, from `add` until it ends.
#[derive(Debug)]
pub(crate) struct Sequence {
    /// Prompt, then every committed token.
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt_len: usize,
    /// Tokens, prompt included, with which the sequence ends at the latest.
    pub(crate) final_len: usize,
    pub(crate) min_tokens: usize,
    pub(crate) stop_token_ids: Vec<u32>,
    /// Sampled tokens that are launched and not committed; they follow `tokens`.
    pub(crate) num_pending: usize,
    /// Positions launched since the last admission: their keys and values are in `tables`' blocks,
    /// or will be before any later work on the compute stream.
    pub(crate) num_computed: usize,
    /// No row was launched since the state slot was assigned.
    pub(crate) is_fresh: bool,
    pub(crate) phase: Phase,
    /// Empty unless running.
    pub(crate) tables: GroupTables,
    pub(crate) retention: Retention,
    /// Its tables have let go of tokens and no row was launched since: its sinks' keys are to turn.
    pub(crate) turn_is_due: bool,
    /// Hashes of its full blocks.
    pub(crate) chain: PrefixChain,
    /// Its first block that was not found when it was last looked for.
    pub(crate) missing: Cell<Option<BlockHash>>,
    /// What the host has of it, until all of that is back on the device.
    pub(crate) swapped: Option<Swapped>,
    /// Blocks of the tables whose content is on its way from the host and not launched.
    pub(crate) num_loading: usize,
    /// The same, not collected: until then others must not find them.
    pub(crate) num_arriving: usize,
    /// Who computes the prompt for it; `None` once it was admitted.
    pub(crate) shares_prompt_of: Option<SequenceId>,
    pub(crate) counts_tokens: bool,
    pub(crate) probes_prompt: bool,
    /// Prompt tokens that others had computed when it was first admitted.
    pub(crate) num_cached_tokens: Option<usize>,
    /// How often it gave way.
    pub(crate) num_preemptions: u32,
    /// Its place in the order of arrival.
    pub(crate) arrival: u64,
    /// Its place among those that run, or that wait.
    pub(crate) rank: Rank,
    /// The priority that was asked for.
    pub(crate) priority: i32,
    pub(crate) account: AccountId,
    pub(crate) arrived_at: Duration,
    pub(crate) deadline: Option<Duration>,
    /// When it has waited for too long; `None` once it was admitted.
    pub(crate) queue_limit: Option<Duration>,
    /// Whether it was ever admitted.
    pub(crate) has_run: bool,
}

/// What the scheduler adds to a spec.
pub(crate) struct Entry {
    pub(crate) arrival: u64,
    pub(crate) rank: Rank,
    pub(crate) account: AccountId,
    pub(crate) now: Duration,
    pub(crate) queue_limit: Option<Duration>,
}

/// What the host has of a sequence that gave way.
#[derive(Debug)]
pub(crate) struct Swapped {
    /// Blocks of the host, of each layer group, in the order of the sequence's tokens: of those
    /// that the next row sees.
    pub(crate) groups: Vec<Vec<HostBlockId>>,
    /// Positions that they hold.
    pub(crate) num_computed: usize,
    /// Blocks that are still on their way to the host.
    pub(crate) num_leaving: usize,
}

impl Sequence {
    pub(crate) fn new(spec: SequenceSpec, config: &SchedulerConfig, entry: Entry) -> Self {
        let prompt_len = spec.prompt.len();
        let mut chain = PrefixChain::new(spec.prefix_key, config.block_size);
        if config.memory.keeps_cold_prefixes {
            chain = chain.with_names();
        }
        if config.memory.prefix_caching {
            chain.extend(&spec.prompt);
        }
        Self {
            tokens: spec.prompt,
            prompt_len,
            final_len: final_len(prompt_len, spec.max_tokens, config.max_model_len),
            min_tokens: spec.min_tokens,
            stop_token_ids: spec.stop_token_ids,
            num_pending: 0,
            num_computed: 0,
            is_fresh: true,
            phase: Phase::Waiting,
            tables: GroupTables::new(config.block_size, spec.retention, &config.other_windows),
            retention: spec.retention,
            turn_is_due: false,
            chain,
            missing: Cell::new(None),
            swapped: None,
            num_loading: 0,
            num_arriving: 0,
            shares_prompt_of: spec.shares_prompt_of,
            counts_tokens: spec.counts_tokens,
            probes_prompt: spec.probes_prompt,
            num_cached_tokens: None,
            num_preemptions: 0,
            arrival: entry.arrival,
            rank: entry.rank,
            priority: spec.service.priority,
            account: entry.account,
            arrived_at: entry.now,
            deadline: spec.service.deadline,
            queue_limit: entry.queue_limit,
            has_run: false,
        }
    }

    /// Number of tokens, pending ones included.
    pub(crate) fn len(&self) -> usize {
        self.tokens.len() + self.num_pending
    }

    /// Tokens that must still go through the model before the next one can be sampled.
    pub(crate) fn num_uncomputed(&self) -> usize {
        self.len() - self.num_computed
    }

    /// Whether some of its prompt must still go through the model.
    pub(crate) fn is_in_prompt(&self) -> bool {
        self.num_computed < self.prompt_len
    }

    /// Tokens that its next row does not compute and that the device must yet count.
    pub(crate) fn num_uncounted(&self) -> usize {
        if self.is_fresh && self.counts_tokens { self.num_computed } else { 0 }
    }

    /// Tokens of the next `len` that may be probed.
    pub(crate) fn num_probes(&self, len: usize) -> usize {
        if self.probes_prompt && self.is_in_prompt() { len } else { 0 }
    }

    /// The cut that its prompt gets with a row that ends here.
    pub(crate) fn cut_at(&self, context_len: usize) -> Option<Attended> {
        self.retention.cut().filter(|cut| context_len == cut.prompt_len())
    }

    /// Tokens that its next row may have if it could have `len`: all that decide over a cut, or
    /// none of them.
    pub(crate) fn row_len(&self, len: usize) -> usize {
        let cut = self.retention.cut();
        cut.map_or(len, |cut| cut.row_len(self.num_computed, len))
    }

    /// Tokens of its next row, if all that decide over a cut are in it and nothing else.
    pub(crate) fn undivided_len(&self) -> Option<usize> {
        let cut = self.retention.cut()?;
        let is_next = self.num_computed + cut.num_observed() == cut.prompt_len();
        is_next.then_some(cut.num_observed())
    }

    /// Tokens for which there is room in the tables.
    pub(crate) fn room(&self) -> usize {
        self.tables.capacity().saturating_sub(self.num_computed)
    }

    /// Whether the tables are ready for the next row: have let go of what they should and have
    /// room.
    pub(crate) fn has_room(&self) -> bool {
        !self.tables.is_behind(self.num_computed) && self.room() > 0
    }

    /// Whether the last token it may have is launched or committed.
    pub(crate) fn is_complete(&self) -> bool {
        self.len() >= self.final_len
    }
}

impl Swapped {
    /// Every block of the host.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = HostBlockId> {
        self.groups.iter().flatten().copied()
    }
}

/// Length, prompt included, at which a sequence ends when no stop token does it.
pub(crate) fn final_len(prompt_len: usize, max_tokens: usize, max_model_len: usize) -> usize {
    prompt_len.saturating_add(max_tokens).min(max_model_len)
}
