//! The engine at one moment, for people who look.

use inflight_scheduler::{Scheduler, SequenceView, Tenant};

use crate::RequestId;

/// What runs and waits, and who holds which block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineSnapshot {
    /// Running and waiting requests, in order of arrival.
    pub requests: Vec<RequestSnapshot>,
    /// Tokens of a block.
    pub block_size: usize,
    /// Blocks of the KV cache.
    pub num_blocks: usize,
    /// Blocks that nobody needs, those among them that only the prefix cache holds.
    pub num_free_blocks: usize,
    /// Blocks that only the prefix cache holds.
    pub num_cached_blocks: usize,
}

/// One request at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestSnapshot {
    /// Its name.
    pub id: RequestId,
    /// On whose behalf it came.
    pub tenant: Tenant,
    /// Whether it was admitted; otherwise it waits.
    pub is_running: bool,
    /// Tokens of its prompt.
    pub prompt_len: usize,
    /// Tokens, those in flight included.
    pub len: usize,
    /// Tokens that the device has computed or is computing.
    pub num_computed: usize,
    /// Its blocks, in the order of its tokens.
    pub blocks: Vec<u32>,
}

impl EngineSnapshot {
    pub(crate) fn of(scheduler: &Scheduler) -> Self {
        let config = scheduler.config();
        Self {
            requests: scheduler.view().into_iter().map(RequestSnapshot::from).collect(),
            block_size: config.block_size,
            num_blocks: config.num_blocks,
            num_free_blocks: scheduler.num_free_blocks(),
            num_cached_blocks: scheduler.num_cached_blocks(),
        }
    }
}

impl From<SequenceView> for RequestSnapshot {
    fn from(view: SequenceView) -> Self {
        let SequenceView { id, tenant, is_running, prompt_len, len, num_computed, blocks } = view;
        Self { id: RequestId(id.0), tenant, is_running, prompt_len, len, num_computed, blocks }
    }
}
