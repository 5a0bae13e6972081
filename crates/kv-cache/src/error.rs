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

    /// A block is held and free, or cached and held, in ways that do not go together.
    #[error("block {block} has {ref_count} references, which its state does not allow")]
    WrongState {
        /// The block in question.
        block: BlockId,
        /// How many references the pool counts for it.
        ref_count: u32,
    },

    /// A cached block follows one that is not cached.
    #[error("cached block {block} follows a block that is not cached")]
    OrphanBlock {
        /// The block in question.
        block: BlockId,
    },

    /// A cached block is not where its hash says, or miscounts what follows it.
    #[error("cached block {block} cannot be found, or miscounts the blocks after it")]
    LostPrefix {
        /// The block in question.
        block: BlockId,
    },
}
