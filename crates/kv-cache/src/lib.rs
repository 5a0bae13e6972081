//! Book-keeping of the paged KV cache: which block belongs to which sequence.
//!
//! The memory itself is a device buffer that the engine owns; here are only ids and counts. A block
//! is room for `block_size` tokens, a sequence owns a list of blocks, and a token's place is found
//! from its position:
//!
//! ```text
//!   position           0 .. 15   16 .. 31   32 .. 47
//!   block table of A  [   7    ,    2     ,    9    ]      slot(20) = 2 * 16 + 4 = 36
//!   block table of B  [   7    ,    4               ]      forked from A: both refer to 7
//!   free list         [ 0, 1, 3, 5, 6, 8, .. ]
//! ```
//!
//! In reading order: [`BlockPool`] hands blocks out and counts references, [`PrefixKey`] and
//! [`PrefixChain`] name what a full block holds, [`KvCache`] is the pool and the cache of prefixes
//! over it, [`BlockTable`] is one sequence's list of blocks, [`Retention`] says which tokens stay
//! in it ([`SinkWindow`], [`Attended`]), [`GroupTables`] are the tables of a sequence whose model
//! has layers that look back differently far, [`SwapSpace`] are blocks of the host's memory:
//! sequences that gave way, and cold prefixes.
//!
//! Invariant: pure and deterministic. No device, clock, thread, log or randomness; the same calls
//! give the same block ids.
//!
//! Invariant: a block is in the free list exactly when its reference count is zero.
//!
//! Invariant: free + owned + cached blocks are all blocks. Cached means that only the prefix cache
//! holds it: it may be found, and is evicted when no block is free.
//!
//! Invariant: a block has at most one writer. A table writes only to blocks that it alone holds:
//! full ones are never written again, and of a partly filled one that is shared it takes a copy.
//!
//! Invariant: a block can be found only while all that come before it can. Tables that keep all
//! their tokens hold those, too; where one that does not holds a block, it may cease to be found.
//!
//! Invariant: freeing a block that nobody holds is our own bug and panics, also in release builds.
//!
//! # Source
//! Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
//! 2023, sections 4.3 and 4.4; vLLM's `vllm/v1/core/block_pool.py` for eviction in the order of
//! release.

mod attended;
mod cache;
mod error;
mod groups;
mod lru;
mod pool;
mod prefix_cache;
mod prefix_key;
mod retention;
mod swap_space;
mod table;

pub use attended::Attended;
pub use cache::KvCache;
pub use error::KvCacheError;
pub use groups::GroupTables;
pub use pool::{BlockId, BlockPool};
pub use prefix_key::{AdapterId, BlockHash, BlockName, ModelId, PrefixChain, PrefixKey};
pub use retention::{Retention, SinkWindow};
pub use swap_space::{HostBlockId, OnHost, SwapSpace};
pub use table::{BlockCopy, BlockTable, TableStart};

/// Tokens in one block unless the configuration says otherwise.
///
/// Smaller blocks waste less at the end of a sequence, larger ones make block tables shorter.
pub const DEFAULT_BLOCK_SIZE: usize = 16;

/// Number of blocks that `num_tokens` tokens need.
///
/// # Panics
/// When `block_size` is zero.
#[must_use]
pub fn blocks_for(num_tokens: usize, block_size: usize) -> usize {
    num_tokens.div_ceil(block_size)
}

#[cfg(test)]
mod tests {
    use super::blocks_for;

    #[test]
    fn blocks_for_rounds_up() {
        for (num_tokens, block_size, expected) in [
            (0, 16, 0),
            (1, 16, 1),
            (16, 16, 1),
            (17, 16, 2),
            (5, 1, 5),
            (usize::MAX, 1, usize::MAX),
        ] {
            assert_eq!(blocks_for(num_tokens, block_size), expected, "{num_tokens}/{block_size}");
        }
    }
}
