//! Blocks of host memory, for sequences that gave way.

use std::fmt;

use crate::{BlockId, BlockPool, KvCacheError};

/// Index of one block in the host's swap space, from 0 to its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostBlockId(pub u32);

impl fmt::Display for HostBlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "host {}", self.0)
    }
}

/// A fixed number of host blocks, each as large as a block of the KV cache. A block is held by the
/// sequence whose content it has and by every move that reads or writes it.
#[derive(Debug, Clone)]
pub struct SwapSpace {
    pool: BlockPool,
}

impl SwapSpace {
    /// `num_blocks` free blocks.
    #[must_use]
    pub fn new(num_blocks: u32) -> Self {
        Self { pool: BlockPool::new(num_blocks) }
    }

    /// Number of blocks, free or not.
    #[must_use]
    pub fn num_total(&self) -> usize {
        self.pool.num_total()
    }

    /// Number of blocks that nobody holds.
    #[must_use]
    pub fn num_free(&self) -> usize {
        self.pool.num_free()
    }

    /// Number of references to a block.
    #[must_use]
    pub fn ref_count(&self, block: HostBlockId) -> u32 {
        self.pool.ref_count(BlockId(block.0))
    }

    /// `num_blocks` blocks with one reference each, or nothing when there are fewer.
    pub fn allocate(&mut self, num_blocks: usize) -> Option<Vec<HostBlockId>> {
        if num_blocks > self.num_free() {
            return None;
        }
        let ids = (0..num_blocks).map_while(|_| self.pool.allocate());
        Some(ids.map(|block| HostBlockId(block.0)).collect())
    }

    /// Adds a reference.
    ///
    /// # Panics
    /// When the block is free.
    pub fn retain(&mut self, block: HostBlockId) {
        self.pool.retain(BlockId(block.0));
    }

    /// Drops a reference.
    ///
    /// # Panics
    /// When the block is free.
    pub fn free(&mut self, block: HostBlockId) {
        self.pool.free(BlockId(block.0));
    }

    /// Checks that the free list is exactly the set of blocks without references.
    ///
    /// # Errors
    /// The first violation found.
    pub fn check_integrity(&self) -> Result<(), KvCacheError> {
        self.pool.check_integrity()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_or_nothing() {
        let mut space = SwapSpace::new(3);
        assert_eq!(space.allocate(4), None);
        let blocks = space.allocate(2).unwrap();
        assert_eq!(blocks, [HostBlockId(0), HostBlockId(1)]);
        space.retain(blocks[1]);
        blocks.iter().for_each(|&block| space.free(block));
        assert_eq!((space.num_free(), space.ref_count(blocks[1])), (2, 1));
        space.free(blocks[1]);
        assert_eq!((space.num_total(), space.num_free()), (3, 3));
        assert_eq!(space.check_integrity(), Ok(()));
    }
}
