//! The sequences that wait, and who of them is next.

use std::collections::BTreeMap;

use crate::SequenceId;
use crate::sequence::Sequence;

/// A waiting sequence's place: the lowest is next.
///
/// Arrival decides. As running sequences arrived before waiting ones, a preempted one comes back
/// to the front.
type Rank = u64;

/// The queue.
#[derive(Debug, Default)]
pub(crate) struct WaitingQueue {
    by_rank: BTreeMap<Rank, SequenceId>,
}

impl WaitingQueue {
    /// Adds a sequence, new or preempted, at its place.
    pub(crate) fn insert(&mut self, id: SequenceId, sequence: &Sequence) {
        self.by_rank.insert(sequence.arrival, id);
    }

    /// Takes a sequence out, because it was admitted or has ended.
    pub(crate) fn remove(&mut self, sequence: &Sequence) {
        self.by_rank.remove(&sequence.arrival);
    }

    /// All, the next one first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = SequenceId> {
        self.by_rank.values().copied()
    }

    pub(crate) fn len(&self) -> usize {
        self.by_rank.len()
    }
}
