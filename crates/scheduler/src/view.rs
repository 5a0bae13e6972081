//! A look at the sequences, for people.

use inflight_kv_cache::BlockTable;

use crate::scheduler::Scheduler;
use crate::sequence::Phase;
use crate::{SequenceId, Tenant};

/// One sequence at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceView {
    /// Its name.
    pub id: SequenceId,
    /// On whose behalf it runs.
    pub tenant: Tenant,
    /// Whether it has blocks and gets rows; otherwise it waits.
    pub is_running: bool,
    /// Tokens of the prompt.
    pub prompt_len: usize,
    /// Tokens, those in flight included.
    pub len: usize,
    /// Tokens that the device has computed, or will have before anything that comes later.
    pub num_computed: usize,
    /// Its blocks, of one layer group after the other, each in the order of its tokens.
    pub blocks: Vec<u32>,
}

impl Scheduler {
    /// All sequences, in order of arrival. Walks them all: not for every step.
    #[must_use]
    pub fn view(&self) -> Vec<SequenceView> {
        let mut sequences: Vec<_> = self.sequences.iter().collect();
        sequences.sort_by_key(|(_, sequence)| sequence.arrival);
        let view = |(id, sequence): (&SequenceId, &crate::sequence::Sequence)| SequenceView {
            id: *id,
            tenant: self.accounts.tenant(sequence.account).clone(),
            is_running: !matches!(sequence.phase, Phase::Waiting),
            prompt_len: sequence.prompt_len,
            len: sequence.len(),
            num_computed: sequence.num_computed,
            blocks: sequence.tables.iter().flat_map(BlockTable::blocks).map(|id| id.0).collect(),
        };
        sequences.into_iter().map(view).collect()
    }
}
