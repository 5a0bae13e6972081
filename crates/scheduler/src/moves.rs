//! Blocks whose content is on its way: copies on the device, and moves to the host and back.
//!
//! A move or copy holds a reference to each block that it reads or writes, so that an abort in the
//! middle frees no block that the device still uses:
//!
//! ```text
//!            plan            advance              collect of that batch
//!   pending ──────► in batch ───────► in flight ─────────────────────► done: references dropped
//! ```
//!
//! Copies are on the compute stream, before everything else of their batch, so their sources are
//! free as soon as they are launched.
//!
//! Moves begin with a sequence's last block: what they still hold of it is a prefix at any time, as
//! the prefix cache wants it of every holder.

use std::collections::VecDeque;

use inflight_kv_cache::{BlockCopy, BlockId, HostBlockId, KvCache, SwapSpace};

use crate::SequenceId;

/// What a batch moves besides computing its rows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Moves {
    /// Copied on the device before any row is computed. No block is written by one and read by
    /// another.
    pub copies: Vec<BlockCopy>,
    /// From the device to the host; what batches before have written is to be there. The blocks are
    /// not touched by this batch or a later one until this batch was collected.
    pub swap_out: Vec<BlockMove>,
    /// From the host to the device, once the batches before have computed. Rows of the next batch
    /// may read them.
    pub swap_in: Vec<BlockMove>,
}

/// A block of the device and the one of the host that has, or is to have, the same content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockMove {
    /// Whose content it is.
    pub owner: MoveOwner,
    /// In the KV cache.
    pub device: BlockId,
    /// In the swap space.
    pub host: HostBlockId,
}

/// Whose content a move carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MoveOwner {
    /// A sequence's, which gave way or comes back, or begins with what the host has.
    Sequence(SequenceId),
    /// The prefix cache's: a copy is made of it while it may still be found on the device.
    PrefixCache,
}

impl BlockMove {
    /// The sequence whose content it is.
    pub(crate) fn sequence(&self) -> Option<SequenceId> {
        match self.owner {
            MoveOwner::Sequence(id) => Some(id),
            MoveOwner::PrefixCache => None,
        }
    }
}

impl Moves {
    /// Whether nothing is moved.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.copies.is_empty() && self.swap_out.is_empty() && self.swap_in.is_empty()
    }
}

/// All moves that are not done.
#[derive(Debug, Default)]
pub(crate) struct MoveQueue {
    copies: Vec<(SequenceId, BlockCopy)>,
    swap_out: VecDeque<BlockMove>,
    swap_in: VecDeque<BlockMove>,
    /// Launched and not collected, with the number of their batch; oldest first.
    in_flight: VecDeque<(u64, Moves)>,
}

impl MoveQueue {
    /// Adds a copy for a sequence. It owns a reference to its source.
    pub(crate) fn copy(&mut self, id: SequenceId, copy: BlockCopy) {
        self.copies.push((id, copy));
    }

    /// Drops the copies for a sequence that no longer needs them.
    pub(crate) fn cancel_copies(&mut self, id: SequenceId, cache: &mut KvCache) {
        for (_, copy) in self.copies.extract_if(.., |(owner, _)| *owner == id) {
            cache.free(copy.from);
        }
    }

    pub(crate) fn swap_out(&mut self, block: BlockMove, (cache, swap): Memory<'_>) {
        cache.retain(block.device);
        swap.retain(block.host);
        self.swap_out.push_back(block);
    }

    /// Copies a block of the prefix cache to one of the host that is to keep it.
    pub(crate) fn keep(&mut self, device: BlockId, host: HostBlockId, (cache, swap): Memory<'_>) {
        cache.begin_copy(device);
        swap.retain(host);
        self.swap_out.push_back(BlockMove { owner: MoveOwner::PrefixCache, device, host });
    }

    /// Blocks that are to leave with the next batches.
    pub(crate) fn num_to_leave(&self) -> usize {
        self.swap_out.len()
    }

    pub(crate) fn swap_in(&mut self, block: BlockMove, (cache, swap): Memory<'_>) {
        cache.retain(block.device);
        swap.retain(block.host);
        self.swap_in.push_back(block);
    }

    /// Blocks of the KV cache that will be free, or no longer be copied, without anyone giving way.
    pub(crate) fn num_leaving(&self) -> usize {
        let in_flight = self.in_flight.iter().map(|(_, moves)| moves.swap_out.len());
        self.swap_out.len() + in_flight.sum::<usize>()
    }

    /// Whether everything is done.
    pub(crate) fn is_empty(&self) -> bool {
        self.copies.is_empty()
            && self.swap_out.is_empty()
            && self.swap_in.is_empty()
            && self.in_flight.is_empty()
    }

    /// What the next batch moves: all copies, and of the rest at most so many each way.
    pub(crate) fn next(&self, max_out: usize, max_in: usize) -> Moves {
        Moves {
            copies: self.copies.iter().map(|(_, copy)| *copy).collect(),
            swap_out: self.swap_out.iter().take(max_out).copied().collect(),
            swap_in: self.swap_in.iter().take(max_in).copied().collect(),
        }
    }

    /// Notes that a batch was launched with these moves, the next ones.
    pub(crate) fn launch(&mut self, number: u64, moves: &Moves, cache: &mut KvCache) {
        for (_, copy) in self.copies.extract_if(.., |(_, copy)| moves.copies.contains(copy)) {
            cache.free(copy.from);
        }
        self.swap_out.drain(..moves.swap_out.len());
        self.swap_in.drain(..moves.swap_in.len());
        if !moves.swap_out.is_empty() || !moves.swap_in.is_empty() {
            let in_flight = Moves { copies: Vec::new(), ..moves.clone() };
            self.in_flight.push_back((number, in_flight));
        }
    }

    /// Notes that a batch was collected; gives what it moved.
    pub(crate) fn collect(&mut self, number: u64, (cache, swap): Memory<'_>) -> Moves {
        let is_first = self.in_flight.front().is_some_and(|(launched, _)| *launched == number);
        let collected = self.in_flight.pop_front_if(|_| is_first);
        let moves = collected.map(|(_, moves)| moves).unwrap_or_default();
        for block in moves.swap_out.iter().chain(&moves.swap_in) {
            match block.owner {
                MoveOwner::Sequence(_) => cache.free(block.device),
                MoveOwner::PrefixCache => {
                    cache.end_copy(block.device);
                    swap.fill(block.host);
                }
            }
            swap.free(block.host);
        }
        moves
    }

    /// Number of references that moves hold to blocks of the KV cache, and to blocks of the host.
    pub(crate) fn num_references(&self) -> (usize, usize) {
        let in_flight = self.in_flight.iter().map(|(_, m)| m.swap_out.len() + m.swap_in.len());
        let num_moves = self.swap_out.len() + self.swap_in.len() + in_flight.sum::<usize>();
        (self.copies.len() + num_moves, num_moves)
    }

    /// The oldest batch in flight, if it moves blocks to the host.
    #[cfg(feature = "damage")]
    pub(crate) fn leaving_in_flight(&self) -> Option<u64> {
        let (number, moves) = self.in_flight.front()?;
        (!moves.swap_out.is_empty()).then_some(*number)
    }

    /// Every reference that moves hold to blocks of the KV cache.
    pub(crate) fn held_blocks(&self) -> impl Iterator<Item = BlockId> {
        let copies = self.copies.iter().map(|(_, copy)| copy.from);
        copies.chain(self.all_moves().map(|block| block.device))
    }

    /// Every reference that moves hold to blocks of the host.
    pub(crate) fn held_host_blocks(&self) -> impl Iterator<Item = HostBlockId> {
        self.all_moves().map(|block| block.host)
    }

    fn all_moves(&self) -> impl Iterator<Item = &BlockMove> {
        let in_flight = self.in_flight.iter().map(|(_, moves)| moves);
        let in_flight = in_flight.flat_map(|moves| moves.swap_out.iter().chain(&moves.swap_in));
        self.swap_out.iter().chain(&self.swap_in).chain(in_flight)
    }
}

/// The two places between which blocks move.
pub(crate) type Memory<'a> = (&'a mut KvCache, &'a mut SwapSpace);
