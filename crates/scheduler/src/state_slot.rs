//! Places for the sampling state that running sequences keep on the device.

use std::fmt;

/// Index of a running sequence's sampling state on the device (token counts for penalties and the
/// like), below `max_num_seqs`.
///
/// A sequence owns one from its admission until it is preempted, ends, or has launched its last
/// token. The row marked `fresh` is the first after it got the slot: what the device holds there is
/// somebody else's and must be cleared, on the compute stream, before that row's tokens count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StateSlot(pub u32);

impl StateSlot {
    /// The slot as an index into arrays that have one entry per slot.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for StateSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The slots that no sequence owns; the latest freed one is handed out first.
#[derive(Debug)]
pub(crate) struct StateSlots {
    free: Vec<StateSlot>,
}

impl StateSlots {
    pub(crate) fn new(num_slots: u32) -> Self {
        Self { free: (0..num_slots).rev().map(StateSlot).collect() }
    }

    pub(crate) fn free_slots(&self) -> &[StateSlot] {
        &self.free
    }

    pub(crate) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    pub(crate) fn allocate(&mut self) -> Option<StateSlot> {
        self.free.pop()
    }

    pub(crate) fn free(&mut self, slot: StateSlot) {
        self.free.push(slot);
    }
}
