//! The fixed set of blocks, its free list and its reference counts.

use std::fmt;

use crate::KvCacheError;

/// Index of one block in the KV cache, from 0 to the pool's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The id as an index into arrays that have one entry per block.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A fixed number of blocks, each free or held by one or more references.
///
/// The free list is last in, first out: a block freed a moment ago is the one most likely to still
/// be in a cache of the hardware. The first blocks handed out by a new pool are 0, 1, 2, ...
#[derive(Debug, Clone)]
pub struct BlockPool {
    /// Number of references to each block, indexed by block id.
    ref_counts: Vec<u32>,
    /// Blocks without references; the next one to hand out is at the end.
    free_blocks: Vec<BlockId>,
    /// Sum of `ref_counts`.
    num_references: usize,
}

impl BlockPool {
    /// A pool in which all of `num_blocks` blocks are free.
    #[must_use]
    pub fn new(num_blocks: u32) -> Self {
        Self {
            ref_counts: vec![0; num_blocks as usize],
            free_blocks: (0..num_blocks).rev().map(BlockId).collect(),
            num_references: 0,
        }
    }

    /// Number of blocks, free or not.
    #[must_use]
    pub fn num_total(&self) -> usize {
        self.ref_counts.len()
    }

    /// Number of blocks that [`allocate`](Self::allocate) can still give.
    #[must_use]
    pub fn num_free(&self) -> usize {
        self.free_blocks.len()
    }

    /// Number of references to `block`; 0 when it is free.
    ///
    /// # Panics
    /// When the pool has no such block.
    #[must_use]
    pub fn ref_count(&self, block: BlockId) -> u32 {
        self.ref_counts[block.index()]
    }

    /// Number of references to all blocks together.
    #[must_use]
    pub fn num_references(&self) -> usize {
        self.num_references
    }

    /// Hands out a free block with one reference, or nothing when all are held.
    pub fn allocate(&mut self) -> Option<BlockId> {
        let block = self.free_blocks.pop()?;
        self.ref_counts[block.index()] = 1;
        self.num_references += 1;
        Some(block)
    }

    /// Adds a reference to a block that is already held.
    ///
    /// # Panics
    /// When the block is free: its content may already be somebody else's.
    pub fn retain(&mut self, block: BlockId) {
        let count = &mut self.ref_counts[block.index()];
        assert!(*count > 0, "block {block} retained while it is free");
        *count = count.checked_add(1).expect("fewer than 2^32 tables exist");
        self.num_references += 1;
    }

    /// Drops one reference; the last one returns the block to the free list.
    ///
    /// # Panics
    /// When the block is free already (a double free).
    pub fn free(&mut self, block: BlockId) {
        let count = &mut self.ref_counts[block.index()];
        assert!(*count > 0, "block {block} freed twice");
        *count -= 1;
        self.num_references -= 1;
        if *count == 0 {
            self.free_blocks.push(block);
        }
    }

    /// Checks that the free list is exactly the set of blocks without references.
    ///
    /// Costs a pass over all blocks: for tests and for idle moments.
    ///
    /// # Errors
    /// The first violation found.
    pub fn check_integrity(&self) -> Result<(), KvCacheError> {
        let num_total = self.num_total();
        let mut listed = vec![false; num_total];
        for &block in &self.free_blocks {
            if block.index() >= num_total {
                return Err(KvCacheError::UnknownFreeBlock { block, num_total });
            }
            let ref_count = self.ref_count(block);
            if ref_count > 0 || listed[block.index()] {
                return Err(KvCacheError::FreeBlockInUse { block, ref_count });
            }
            listed[block.index()] = true;
        }
        let unlisted = (0u32..).map(BlockId).zip(listed).filter(|&(_, listed)| !listed);
        for (block, _) in unlisted {
            if self.ref_count(block) == 0 {
                return Err(KvCacheError::LeakedBlock { block });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{BlockId, BlockPool};
    use crate::KvCacheError;

    #[test]
    fn blocks_come_in_order_and_the_last_freed_comes_first() {
        let mut pool = BlockPool::new(3);
        assert_eq!(pool.allocate(), Some(BlockId(0)));
        assert_eq!(pool.allocate(), Some(BlockId(1)));
        assert_eq!(pool.allocate(), Some(BlockId(2)));
        assert_eq!(pool.allocate(), None);
        pool.free(BlockId(2));
        pool.free(BlockId(0));
        assert_eq!((pool.num_free(), pool.num_total()), (2, 3));
        assert_eq!(pool.allocate(), Some(BlockId(0)));
    }

    #[test]
    fn a_retained_block_is_free_only_after_its_last_reference() {
        let mut pool = BlockPool::new(1);
        let block = pool.allocate().unwrap();
        pool.retain(block);
        pool.free(block);
        assert_eq!((pool.num_free(), pool.ref_count(block)), (0, 1));
        pool.free(block);
        assert_eq!((pool.num_free(), pool.ref_count(block)), (1, 0));
    }

    #[test]
    #[should_panic(expected = "block 0 freed twice")]
    fn a_double_free_panics() {
        let mut pool = BlockPool::new(2);
        let block = pool.allocate().unwrap();
        pool.free(block);
        pool.free(block);
    }

    #[test]
    #[should_panic(expected = "block 1 retained while it is free")]
    fn retaining_a_free_block_panics() {
        BlockPool::new(2).retain(BlockId(1));
    }

    #[test]
    fn each_kind_of_damage_is_named() {
        let check = |damage: fn(&mut BlockPool), expected| {
            let mut pool = BlockPool::new(4);
            let block = pool.allocate().unwrap();
            assert_eq!((block, pool.check_integrity()), (BlockId(0), Ok(())));
            damage(&mut pool);
            assert_eq!(pool.check_integrity(), Err(expected));
        };
        let block = BlockId(0);
        check(|pool| pool.ref_counts[0] = 0, KvCacheError::LeakedBlock { block });
        check(
            |pool| pool.free_blocks.push(BlockId(0)),
            KvCacheError::FreeBlockInUse { block, ref_count: 1 },
        );
        check(
            |pool| pool.free_blocks.push(BlockId(2)),
            KvCacheError::FreeBlockInUse { block: BlockId(2), ref_count: 0 },
        );
        check(
            |pool| pool.free_blocks.push(BlockId(4)),
            KvCacheError::UnknownFreeBlock { block: BlockId(4), num_total: 4 },
        );
    }
}
