//! The blocks of one sequence, in the order of its tokens.

use crate::{BlockId, BlockPool, KvCacheError, blocks_for};

/// The list of blocks that hold one sequence's keys and values.
///
/// A table owns one reference to each of its blocks. It is not `Clone`, since a copy would own
/// nothing: [`fork`](Self::fork) makes a second owner. Before a table is dropped it must be
/// [released](Self::release), or its blocks stay held for ever (integrity checks report that).
#[derive(Debug)]
pub struct BlockTable {
    blocks: Vec<BlockId>,
    block_size: usize,
}

impl BlockTable {
    /// An empty table over blocks of `block_size` tokens.
    ///
    /// # Panics
    /// When `block_size` is zero.
    #[must_use]
    pub fn new(block_size: usize) -> Self {
        assert!(block_size > 0, "a block holds at least one token");
        Self { blocks: Vec::new(), block_size }
    }

    /// The blocks, first tokens first.
    ///
    /// # Shapes
    /// `[num_blocks]`; entry `i` holds positions `i * block_size .. (i + 1) * block_size`.
    #[must_use]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Tokens in one block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Number of tokens for which there is room.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.blocks.len() * self.block_size
    }

    /// Place of the token at `position` in the KV cache, counted in tokens from its start.
    ///
    /// # Panics
    /// When the table has not grown to `position`, or when the place does not fit 32 bits.
    #[must_use]
    pub fn slot(&self, position: usize) -> u32 {
        let block = self.blocks[position / self.block_size];
        let slot = block.index() * self.block_size + position % self.block_size;
        u32::try_from(slot).expect("a KV cache has fewer than 2^32 token places")
    }

    /// Allocates blocks until `num_tokens` tokens have room; does nothing when they already have.
    ///
    /// # Errors
    /// [`KvCacheError::OutOfBlocks`] when too few blocks are free; then nothing was allocated.
    pub fn grow_to(&mut self, num_tokens: usize, pool: &mut BlockPool) -> Result<(), KvCacheError> {
        let needed = blocks_for(num_tokens, self.block_size).saturating_sub(self.blocks.len());
        let free = pool.num_free();
        if needed > free {
            return Err(KvCacheError::OutOfBlocks { needed, free });
        }
        self.blocks.extend((0..needed).map_while(|_| pool.allocate()));
        Ok(())
    }

    /// Gives all blocks back; the table is empty afterwards and can be used again.
    ///
    /// The last block goes first, so that a pool that hands out the latest freed block first gives
    /// them out again in the order of their tokens.
    pub fn release(&mut self, pool: &mut BlockPool) {
        for block in self.blocks.drain(..).rev() {
            pool.free(block);
        }
    }

    /// A new table that shares the full blocks of this one's first `num_tokens` tokens.
    ///
    /// The new table has room for `num_tokens` rounded down to whole blocks. The tokens after that
    /// lie in a block that may still be written: the new owner computes or copies them into blocks
    /// of its own. So no block ever has two writers.
    ///
    /// # Panics
    /// When the table holds fewer than `num_tokens` tokens.
    #[must_use]
    pub fn fork(&self, num_tokens: usize, pool: &mut BlockPool) -> Self {
        assert!(num_tokens <= self.capacity(), "a table shares only tokens that it holds");
        let shared = &self.blocks[..num_tokens / self.block_size];
        for &block in shared {
            pool.retain(block);
        }
        Self { blocks: shared.to_vec(), block_size: self.block_size }
    }
}

#[cfg(test)]
mod tests {
    use super::BlockTable;
    use crate::{BlockId, BlockPool, KvCacheError};

    #[test]
    fn slots_follow_the_blocks() {
        let mut pool = BlockPool::new(8);
        let (mut a, mut b) = (BlockTable::new(4), BlockTable::new(4));
        a.grow_to(1, &mut pool).unwrap();
        b.grow_to(1, &mut pool).unwrap();
        a.grow_to(6, &mut pool).unwrap();
        assert_eq!(a.blocks(), [BlockId(0), BlockId(2)]);
        let slots: Vec<u32> = (0..8).map(|position| a.slot(position)).collect();
        assert_eq!(slots, [0, 1, 2, 3, 8, 9, 10, 11]);
        assert_eq!(b.slot(3), 7);
    }

    #[test]
    fn growing_is_all_or_nothing() {
        let mut pool = BlockPool::new(3);
        let mut table = BlockTable::new(16);
        table.grow_to(16, &mut pool).unwrap();
        let error = table.grow_to(16 * 4, &mut pool).unwrap_err();
        assert_eq!(error, KvCacheError::OutOfBlocks { needed: 3, free: 2 });
        assert_eq!(error.to_string(), "3 more KV cache blocks needed, 2 are free");
        assert_eq!((table.blocks().len(), pool.num_free()), (1, 2));
        table.grow_to(16 * 3, &mut pool).unwrap();
        table.grow_to(1, &mut pool).unwrap();
        assert_eq!((table.capacity(), pool.num_free()), (48, 0));
    }

    #[test]
    fn released_blocks_are_reused_in_token_order() {
        let mut pool = BlockPool::new(4);
        let mut table = BlockTable::new(1);
        table.grow_to(3, &mut pool).unwrap();
        table.release(&mut pool);
        table.release(&mut pool);
        assert_eq!((table.capacity(), pool.num_free()), (0, 4));
        table.grow_to(3, &mut pool).unwrap();
        assert_eq!(table.blocks(), [BlockId(0), BlockId(1), BlockId(2)]);
    }

    #[test]
    fn a_fork_shares_full_blocks_only() {
        let mut pool = BlockPool::new(4);
        let mut parent = BlockTable::new(4);
        parent.grow_to(10, &mut pool).unwrap();
        let mut child = parent.fork(9, &mut pool);
        assert_eq!(child.blocks(), &parent.blocks()[..2]);
        child.grow_to(9, &mut pool).unwrap();
        assert_ne!(child.blocks()[2], parent.blocks()[2]);
        parent.release(&mut pool);
        assert_eq!(pool.num_free(), 1);
        child.release(&mut pool);
        assert_eq!((pool.num_free(), pool.check_integrity()), (4, Ok(())));
    }

    #[test]
    #[should_panic(expected = "shares only tokens that it holds")]
    fn a_fork_beyond_the_table_panics() {
        let mut pool = BlockPool::new(1);
        let _ = BlockTable::new(4).fork(1, &mut pool);
    }
}
