//! What can go wrong without anyone being at fault, and the damage an integrity check can find.

use thiserror::Error;

use crate::BlockId;

/// Errors of the KV cache's book-keeping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum KvCacheError {
    /// Too few blocks are free. Nothing was allocated.
    #[error("{needed} more KV cache blocks needed, {free} are free")]
    OutOfBlocks {
        /// Blocks that the call had to allocate.
        needed: usize,
        /// Blocks that were free.
        free: usize,
    },

    /// The free list names a block that the pool does not have.
    #[error("free list holds block {block}, the pool has only {num_total}")]
    UnknownFreeBlock {
        /// The block in question.
        block: BlockId,
        /// Size of the pool.
        num_total: usize,
    },

    /// The free list names a block that somebody holds, or names it twice.
    #[error("free list holds block {block} which has {ref_count} references or is listed twice")]
    FreeBlockInUse {
        /// The block in question.
        block: BlockId,
        /// How many references the pool counts for it.
        ref_count: u32,
    },

    /// A block has no holder and is not in the free list: nobody will ever use it again.
    #[error("block {block} is neither free nor held")]
    LeakedBlock {
        /// The block in question.
        block: BlockId,
    },
}
