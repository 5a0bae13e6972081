//! Who joins the running sequences, and the blocks that it gets for that.
//!
//! Admission takes blocks for all tokens that a sequence has, so that only decodes ever ask for
//! more, at most one block each, and a prefill once begun is never stuck half way.

use inflight_kv_cache::blocks_for;

use crate::batch::Batch;
use crate::scheduler::Scheduler;
use crate::sequence::Phase;
use crate::{SequenceId, StateSlot};

impl Scheduler {
    /// First chunks for sequences from the front of the queue, while slots, blocks and budget last.
    /// Nobody overtakes: if the first cannot be admitted, the others wait behind it.
    pub(crate) fn plan_admissions(&mut self, batch: &mut Batch) {
        if self.waiting.is_empty() || self.budget_left(batch) == 0 {
            return;
        }
        let mut num_growing = self.running.iter().filter(|&&id| self.can_grow(id)).count();
        while let Some(id) = self.waiting.first()
            && self.budget_left(batch) > 0
            && self.has_room_for(id, num_growing)
            && let Some(slot) = self.state_slots.allocate()
        {
            self.admit(id, slot);
            num_growing += usize::from(self.can_grow(id));
            let len = self.sequence(id).num_uncomputed().min(self.budget_left(batch));
            self.push_row(id, len, batch);
        }
    }

    /// Whether a waiting sequence can be admitted beside running ones of which `num_growing` may
    /// still need another block.
    ///
    /// There must be blocks for all tokens that it has, and then one for each that may need one,
    /// itself included. Without that margin the next decode in need of a block would throw the
    /// newcomer out again. A lone sequence always passes, since its margin is part of what
    /// [`check_fits`](Self::check_fits) found to fit.
    fn has_room_for(&self, id: SequenceId, num_growing: usize) -> bool {
        let sequence = self.sequence(id);
        let num_blocks = blocks_for(sequence.len(), self.config.block_size);
        let own_margin = sequence.outgrows(num_blocks * self.config.block_size);
        let needed = num_blocks + num_growing + usize::from(own_margin);
        // While a token of it is in flight, its input is not known to the host.
        sequence.num_pending == 0 && needed <= self.cache.num_available()
    }

    /// Whether a running sequence may still need another block.
    fn can_grow(&self, id: SequenceId) -> bool {
        let sequence = self.sequence(id);
        sequence.outgrows(sequence.table.capacity())
    }

    /// Moves a waiting sequence to the running ones and reserves blocks for its tokens.
    fn admit(&mut self, id: SequenceId, slot: StateSlot) {
        let sequence = self.sequences.get_mut(&id).expect("waiting sequences have a record");
        self.waiting.remove(sequence);
        self.running.push(id);
        sequence.phase = Phase::Running(slot);
        sequence.is_fresh = true;
        let num_tokens = sequence.len();
        let grown = sequence.table.grow_to(num_tokens, &mut self.cache);
        grown.expect("admission checked that the blocks are free");
    }
}
