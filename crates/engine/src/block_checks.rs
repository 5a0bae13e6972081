//! Which blocks of the KV cache a batch uses again, and which it writes: for checksums.

use std::collections::HashSet;

use inflight_backend::{Backend, BackendError, BlockSums};
use inflight_kv_cache::BlockId;
use inflight_scheduler::{Batch, Scheduler};

use crate::{Engine, EngineError};

/// Checksums of blocks, and what the batch that is launched next does with blocks.
pub(crate) struct BlockChecks {
    pub(crate) sums: BlockSums,
    /// They hold what they did when they were full: those that rows begin with and did not compute,
    /// and those whose keys are to turn.
    pub(crate) used_again: Vec<u32>,
    /// Written, and full afterwards.
    pub(crate) full: Vec<u32>,
    /// Written, and to be written again.
    pub(crate) partial: Vec<u32>,
}

impl BlockChecks {
    pub(crate) fn new(num_blocks: usize, num_swap_blocks: usize) -> Self {
        Self {
            sums: BlockSums::new(num_blocks, num_swap_blocks),
            used_again: Vec::new(),
            full: Vec::new(),
            partial: Vec::new(),
        }
    }

    /// Looks at a batch that is about to be launched.
    pub(crate) fn look_at(&mut self, batch: &Batch, scheduler: &Scheduler) {
        let Self { used_again, full, partial, .. } = self;
        [&mut *used_again, full, partial].into_iter().for_each(Vec::clear);
        let turned: HashSet<BlockId> = batch.turns.iter().map(|turn| turn.copy.to).collect();
        used_again.extend(batch.turns.iter().map(|turn| turn.copy.from.0));
        for row in &batch.rows {
            for table in scheduler.block_tables(row.id).iter() {
                let (blocks, block_size) = (table.blocks(), table.block_size());
                let [start, end] =
                    [row.start, row.context_len].map(|position| position - table.num_dropped());
                let written = start / block_size..end.div_ceil(block_size);
                if row.fresh {
                    let before = blocks[..written.start].iter();
                    used_again.extend(before.filter(|id| !turned.contains(id)).map(|id| id.0));
                }
                for (i, block) in written.clone().zip(&blocks[written]) {
                    let is_full = (i + 1) * block_size <= end;
                    if is_full { &mut *full } else { &mut *partial }.push(block.0);
                }
            }
        }
        full.extend(turned.iter().map(|block| block.0));
        let kept = batch.cuts.iter().flat_map(|cut| &cut.blocks);
        full.extend(kept.map(|block| block.0));
    }
}

impl<B: Backend> Engine<B> {
    /// For debugging: from now on full blocks of the KV cache have checksums, which are verified
    /// when a block is used again, leaves or comes back. A block that has changed is a lost device,
    /// by a message that names it. Each block is read once more at these times.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] on a device that cannot.
    pub fn check_blocks(&mut self) -> Result<(), EngineError> {
        if !self.backend.checks_blocks() {
            let device = self.backend.description();
            let reason = format!("{device}: no checksums of the KV cache's blocks");
            return Err(BackendError::Unsupported(reason).into());
        }
        let config = self.scheduler().config();
        let checks = BlockChecks::new(config.num_blocks, config.memory.num_swap_blocks);
        self.mover.checks = Some(checks);
        Ok(())
    }
}
