//! The pool and the prefix cache over it: who may have which block.

use crate::prefix_cache::{Insertion, PrefixCache};
use crate::{BlockId, BlockPool, KvCacheError, PrefixChain};

/// All blocks of the KV cache. Each is in one of three states:
///
/// ```text
///             allocate                     a table lets go, and it can be found
///   free ───────────────► owned by tables ─────────────────────────────► cached
///    ▲                        │      ▲                                     │ │
///    └─ a table lets go ──────┘      └─ found by a prefix ─────────────────┘ │
///    └─ evicted, the least recently used first, when none is free ───────────┘
/// ```
///
/// A block that can be found has one reference of the cache's own besides those of tables.
#[derive(Debug, Clone)]
pub struct KvCache {
    pool: BlockPool,
    /// `None`: prefixes are not cached.
    prefixes: Option<PrefixCache>,
}

impl KvCache {
    /// `num_blocks` free blocks; `caches_prefixes` says whether full blocks can be found again.
    #[must_use]
    pub fn new(num_blocks: u32, caches_prefixes: bool) -> Self {
        let prefixes = caches_prefixes.then(|| PrefixCache::new(num_blocks));
        Self { pool: BlockPool::new(num_blocks), prefixes }
    }

    /// Number of blocks in any state.
    #[must_use]
    pub fn num_total(&self) -> usize {
        self.pool.num_total()
    }

    /// Number of blocks that hold nothing.
    #[must_use]
    pub fn num_free(&self) -> usize {
        self.pool.num_free()
    }

    /// Number of blocks that only the prefix cache holds.
    #[must_use]
    pub fn num_cached(&self) -> usize {
        self.prefixes.as_ref().map_or(0, PrefixCache::num_unheld)
    }

    /// Number of blocks that [`allocate`](Self::allocate) can give: free and cached ones.
    #[must_use]
    pub fn num_available(&self) -> usize {
        self.num_free() + self.num_cached()
    }

    /// Number of references to `block`, the prefix cache's own included.
    ///
    /// # Panics
    /// When there is no such block.
    #[must_use]
    pub fn ref_count(&self, block: BlockId) -> u32 {
        self.pool.ref_count(block)
    }

    /// Whether `block` can be found by its tokens.
    #[must_use]
    pub fn is_cached(&self, block: BlockId) -> bool {
        self.prefixes.as_ref().is_some_and(|prefixes| prefixes.contains(block))
    }

    /// Whether only the prefix cache holds `block`, so that taking it takes an available block.
    #[must_use]
    pub fn is_unheld(&self, block: BlockId) -> bool {
        self.prefixes.as_ref().is_some_and(|prefixes| prefixes.is_unheld(block))
    }

    /// Hands out a block with one reference, evicting a cached one if none is free.
    pub fn allocate(&mut self) -> Option<BlockId> {
        if self.pool.num_free() == 0
            && let Some(evicted) = self.prefixes.as_mut()?.evict()
        {
            self.pool.free(evicted);
        }
        self.pool.allocate()
    }

    /// Adds a reference to a block that is owned or cached.
    ///
    /// # Panics
    /// When the block is free.
    pub fn retain(&mut self, block: BlockId) {
        self.pool.retain(block);
        if let Some(prefixes) = &mut self.prefixes {
            prefixes.take(block);
        }
    }

    /// Drops one reference; a block whose last one it was is free, or cached if it can be found.
    ///
    /// # Panics
    /// When the block has no owner.
    pub fn free(&mut self, block: BlockId) {
        let cached = self.prefixes.as_mut().filter(|prefixes| prefixes.contains(block));
        if let Some(prefixes) = cached
            && self.pool.ref_count(block) <= 2
        {
            prefixes.let_go(block);
        }
        self.pool.free(block);
    }

    /// The longest run of a sequence's full blocks that can be found, from its start; at most
    /// `max_blocks`. Nothing is retained.
    #[must_use]
    pub fn find(&self, chain: &PrefixChain, tokens: &[u32], max_blocks: usize) -> Vec<BlockId> {
        let prefixes = self.prefixes.as_ref();
        prefixes.map_or_else(Vec::new, |prefixes| prefixes.find(chain, tokens, max_blocks))
    }

    /// Lets `block` be found as the one after `before`, a sequence's first blocks. Says what became
    /// of it; `None` if prefixes are not cached.
    ///
    /// A block that another table holds stays as it is: that table may have other blocks before it.
    pub(crate) fn insert(
        &mut self,
        block: BlockId,
        before: &[BlockId],
        chain: &PrefixChain,
        tokens: &[u32],
    ) -> Option<Insertion> {
        let is_shared = self.pool.ref_count(block) > 1;
        let prefixes = self.prefixes.as_mut()?;
        if is_shared && !prefixes.contains(block) && !prefixes.knows(before.len(), chain) {
            return Some(Insertion::Shared);
        }
        let insertion = prefixes.insert(block, before.last(), (chain, before.len()), tokens);
        if insertion == Insertion::New {
            self.pool.retain(block);
        }
        Some(insertion)
    }

    /// Checks that every block is in exactly one state and that the prefix cache is sound.
    ///
    /// # Errors
    /// The first violation found.
    pub fn check_integrity(&self) -> Result<(), KvCacheError> {
        self.pool.check_integrity()?;
        let Some(prefixes) = &self.prefixes else { return Ok(()) };
        prefixes.check_integrity()?;
        for block in (0..).map(BlockId).take(self.num_total()) {
            let (count, unheld) = (self.ref_count(block), prefixes.is_unheld(block));
            let can_be_found = prefixes.contains(block);
            if can_be_found && count == 0 || unheld != (can_be_found && count == 1) {
                return Err(KvCacheError::WrongState { block, ref_count: count });
            }
        }
        Ok(())
    }
}
