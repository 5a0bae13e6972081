//! Who gives way when blocks run out, and what becomes of its keys and values.
//!
//! Recomputing frees blocks at once. Moving them to the host takes until the batch that carries the
//! moves was collected, so it begins [`LOOKAHEAD`] steps before the blocks are missed, and nobody
//! waits for it:
//!
//! ```text
//!   plan      N+1: too few blocks     N+2                    N+3: the blocks are free
//!             for the next steps
//!   compute   ------- N -------|------- N+1 -------|------- N+2 -------|
//!   d2h                         [victim's blocks]
//! ```

use inflight_kv_cache::{BlockId, BlockTable, KvCacheError, blocks_for};

use crate::batch::Batch;
use crate::moves::{BlockMove, MoveOwner};
use crate::scheduler::Scheduler;
use crate::sequence::{Phase, Sequence, Swapped};
use crate::{Preemption, SequenceId};

/// Tokens of every running sequence for which blocks must be there or on their way: those of the
/// next step and of the two before whose plan the blocks of a batch launched now come free.
pub(crate) const LOOKAHEAD: usize = 3;

impl Scheduler {
    /// Gives a running sequence the block that its next token needs, if need be at the cost of
    /// those behind it. False when it is the last itself and had to give way, or when blocks are on
    /// their way that it is to wait for.
    pub(crate) fn make_room(&mut self, id: SequenceId) -> bool {
        loop {
            if self.try_room(id).is_ok() {
                return true;
            }
            if !self.moves.is_empty() {
                return false;
            }
            assert!(self.running.len() > 1, "sequence {id} was admitted but does not fit alone");
            let newest = *self.running.last().expect("one of them asks for a block");
            self.preempt(newest);
            if newest == id {
                return false;
            }
        }
    }

    /// Has a running sequence give way, whichever way is better for it.
    pub(crate) fn preempt(&mut self, id: SequenceId) {
        if self.is_better_swapped(self.sequence(id)) {
            self.swap_out(id);
        } else {
            self.recompute(id);
        }
    }

    /// Has a running sequence let go of tokens that its next row does not see any more, and take
    /// blocks for those that the row computes.
    fn try_room(&mut self, id: SequenceId) -> Result<(), KvCacheError> {
        let most = self.config.max_num_batched_tokens;
        let sequence = self.sequences.get_mut(&id).expect("running sequences have a record");
        let (start, len) = (sequence.num_computed, sequence.len());
        sequence.turn_is_due |= sequence.tables.slide(start, &mut self.cache)?;
        sequence.tables.grow(start, (len, most), &mut self.cache)
    }

    /// Gives room to the prompts whose tables do not reach to their end. Before any row is planned,
    /// since others may have to give way.
    pub(crate) fn plan_slides(&mut self) {
        // The list shrinks from its end while victims give way.
        let mut i = 0;
        while let Some(&id) = self.running.get(i) {
            let sequence = self.sequence(id);
            if sequence.num_uncomputed() > 1 && !sequence.has_room() {
                self.make_room(id);
            }
            i += 1;
        }
    }

    /// Begins to move the newest sequences to the host if blocks will run out in the next steps.
    pub(crate) fn plan_swaps(&mut self) {
        if self.swap.num_total() == 0 {
            return;
        }
        let wanted = self.running.iter().map(|&id| self.growth_soon(self.sequence(id)));
        let mut wanted: usize = wanted.sum();
        while wanted > self.cache.num_available() + self.moves.num_leaving()
            && self.running.len() > 1
            && let Some(&newest) = self.running.last()
            && self.is_better_swapped(self.sequence(newest))
        {
            wanted -= self.growth_soon(self.sequence(newest));
            self.swap_out(newest);
        }
    }

    /// Blocks that a running sequence needs for its next [`LOOKAHEAD`] tokens.
    fn growth_soon(&self, sequence: &Sequence) -> usize {
        let num_places = (sequence.num_computed + LOOKAHEAD).min(sequence.final_len - 1);
        let growth = |table: &BlockTable| {
            let num_kept = num_places.saturating_sub(table.num_dropped());
            let num_blocks = blocks_for(num_kept, self.config.block_size);
            num_blocks.saturating_sub(table.blocks().len())
        };
        let growth: usize = sequence.tables.iter().map(growth).sum();
        let most = self.most_blocks(sequence, num_places);
        growth.min(most.saturating_sub(sequence.tables.held().count()))
    }

    /// Whether a running sequence that has to give way should keep its keys and values on the host.
    fn is_better_swapped(&self, sequence: &Sequence) -> bool {
        let num_blocks = sequence.tables.seen_from(sequence.num_computed).flatten().count();
        // What is left of a sequence that dropped tokens from all groups is no prefix.
        let may_swap = sequence.num_arriving == 0
            && sequence.retention.num_dropped(sequence.num_computed, self.config.block_size) == 0
            && sequence.retention.cut().is_none()
            && (1..=self.swap.num_available()).contains(&num_blocks);
        may_swap
            && match self.config.memory.preemption {
                Preemption::Recompute => false,
                Preemption::Swap => true,
                Preemption::Auto => self
                    .costs
                    .is_some_and(|costs| costs.swap_is_faster(num_blocks, sequence.num_computed)),
            }
    }

    /// Takes all blocks from a running sequence and returns it to the queue, to its rank there. It
    /// keeps its tokens, and computes their keys and values again when it comes back, unless the
    /// prefix cache still has them.
    ///
    /// It does not come back in the same plan: it needs as many blocks as it gave, or one more if
    /// it gave way to itself, and no others are free, or nobody would have had to give way.
    fn recompute(&mut self, id: SequenceId) {
        self.release(id, Phase::Waiting);
        let sequence = self.sequence_mut(id);
        sequence.num_computed = 0;
        sequence.num_preemptions += 1;
        self.waiting.insert(id, &self.sequences[&id], &mut self.accounts);
        self.num_preemptions += 1;
    }

    /// As [`recompute`](Self::recompute), but has the keys and values moved to the host first. The
    /// moves hold the blocks until they are done.
    fn swap_out(&mut self, id: SequenceId) {
        let sequence = self.sequence(id);
        let num_computed = sequence.num_computed;
        let seen = sequence.tables.seen_from(num_computed);
        let on_device: Vec<Vec<BlockId>> = seen.map(<[_]>::to_vec).collect();
        let mut groups = Vec::new();
        for blocks in &on_device {
            let on_host = self.swap.allocate(blocks.len()).expect("only called if there is room");
            for (&device, &host) in blocks.iter().zip(&on_host).rev() {
                let block = BlockMove { owner: MoveOwner::Sequence(id), device, host };
                self.moves.swap_out(block, (&mut self.cache, &mut self.swap));
            }
            groups.push(on_host);
        }
        self.recompute(id);
        let num_leaving = on_device.iter().map(Vec::len).sum();
        let swapped = Swapped { groups, num_computed, num_leaving };
        self.sequence_mut(id).swapped = Some(swapped);
        self.num_swaps += 1;
    }

    /// Notes that a batch's moves were launched.
    pub(crate) fn launch_moves(&mut self, batch: &Batch) {
        self.moves.launch(batch.number, &batch.moves, &mut self.cache);
        for block in &batch.moves.swap_in {
            let owner = block.sequence().and_then(|id| self.sequences.get_mut(&id));
            if let Some(sequence) = owner {
                sequence.num_loading -= 1;
            }
        }
    }

    /// Notes that a batch was collected: what it moved is moved. To be called once for every
    /// launched batch, in order.
    pub fn collect(&mut self, batch: &Batch) {
        let memory = (&mut self.cache, &mut self.swap);
        let moves = self.moves.collect(batch.number, memory);
        for block in moves.swap_out {
            if block.sequence().is_none() {
                self.write_later(block.host);
            }
            let sequence = block.sequence().and_then(|id| self.sequences.get_mut(&id));
            if let Some(swapped) = sequence.and_then(|sequence| sequence.swapped.as_mut()) {
                swapped.num_leaving -= 1;
            }
        }
        for block in moves.swap_in {
            let owner = block.sequence().and_then(|id| self.sequences.get_mut(&id));
            if let Some(sequence) = owner {
                sequence.num_arriving -= 1;
            }
        }
    }
}
