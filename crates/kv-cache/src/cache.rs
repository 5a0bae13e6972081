//! The pool and the prefix cache over it: who may have which block.

use crate::prefix_cache::{Evicted, Insertion, PrefixCache};
use crate::{BlockId, BlockName, BlockPool, KvCacheError, PrefixChain};

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
///
/// A cached block may be copied elsewhere before it is evicted. It stays what it is meanwhile, but
/// nobody gets its memory: evicted all the same, it is free when the copy has ended.
#[derive(Debug, Clone)]
pub struct KvCache {
    pool: BlockPool,
    /// `None`: prefixes are not cached.
    prefixes: Option<PrefixCache>,
    /// Of each block, whether a copy of it is being made elsewhere, which holds one reference.
    copied: Vec<bool>,
    /// Blocks that only the prefix cache holds, and a copy.
    num_unheld_copied: usize,
    num_evicted: u64,
    num_lost: u64,
}

impl KvCache {
    /// `num_blocks` free blocks; `caches_prefixes` says whether full blocks can be found again.
    #[must_use]
    pub fn new(num_blocks: u32, caches_prefixes: bool) -> Self {
        let prefixes = caches_prefixes.then(|| PrefixCache::new(num_blocks));
        Self {
            pool: BlockPool::new(num_blocks),
            prefixes,
            copied: vec![false; num_blocks as usize],
            num_unheld_copied: 0,
            num_evicted: 0,
            num_lost: 0,
        }
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

    /// Number of blocks that [`allocate`](Self::allocate) can give: free ones, and cached ones of
    /// which no copy is being made.
    #[must_use]
    pub fn num_available(&self) -> usize {
        self.num_free() + self.num_cached() - self.num_unheld_copied
    }

    /// Number of references to all blocks together, the prefix cache's own included.
    #[must_use]
    pub fn num_references(&self) -> usize {
        self.pool.num_references()
    }

    /// Number of blocks that can be found by their tokens.
    #[must_use]
    pub fn num_findable(&self) -> usize {
        self.prefixes.as_ref().map_or(0, PrefixCache::len)
    }

    /// Number of cached blocks that were evicted, and of those that had not been
    /// [offered](Self::offer) before.
    #[must_use]
    pub fn num_evicted(&self) -> (u64, u64) {
        (self.num_evicted, self.num_lost)
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

    /// Whether only the prefix cache holds `block`.
    #[must_use]
    pub fn is_unheld(&self, block: BlockId) -> bool {
        self.prefixes.as_ref().is_some_and(|prefixes| prefixes.is_unheld(block))
    }

    /// Whether taking `block` takes an available one.
    #[must_use]
    pub fn is_available(&self, block: BlockId) -> bool {
        self.is_unheld(block) && !self.copied[block.index()]
    }

    /// Hands out a block with one reference, evicting cached ones if none is free. Blocks of which
    /// copies are being made go with them, as they are in front of it, but are not given.
    pub fn allocate(&mut self) -> Option<BlockId> {
        if self.num_available() == 0 {
            return None;
        }
        while self.pool.num_free() == 0 {
            let mut orphans = Vec::new();
            let oldest = self.prefixes.as_mut()?.evict(&mut orphans)?;
            for evicted in [oldest].into_iter().chain(orphans) {
                self.forget(evicted);
            }
        }
        self.pool.allocate()
    }

    /// Drops the prefix cache's reference to a block that it has forgotten.
    fn forget(&mut self, evicted: Evicted) {
        let Evicted { block, was_offered, was_unheld } = evicted;
        if was_unheld {
            self.num_evicted += 1;
            self.num_lost += u64::from(!was_offered);
            self.num_unheld_copied -= usize::from(self.copied[block.index()]);
        }
        self.pool.free(block);
    }

    /// The cached block that will be evicted first of those that were not offered yet, with its
    /// name, for somebody who may want to [copy](Self::begin_copy) it.
    pub fn offer(&mut self) -> Option<(BlockId, BlockName)> {
        self.prefixes.as_mut()?.offer()
    }

    /// Whether there are cached blocks that were not offered yet.
    #[must_use]
    pub fn has_more_to_offer(&self) -> bool {
        self.prefixes.as_ref().is_some_and(|prefixes| prefixes.num_offered() < self.num_cached())
    }

    /// Number of blocks that can be given without losing what was not offered: free ones, and
    /// cached ones that were.
    #[must_use]
    pub fn num_expendable(&self) -> usize {
        self.num_free() + self.prefixes.as_ref().map_or(0, PrefixCache::num_offered)
    }

    /// Adds the reference of a copy that is being made of a block that only the prefix cache holds.
    ///
    /// # Panics
    /// When others hold it, or when a copy of it is being made already.
    pub fn begin_copy(&mut self, block: BlockId) {
        assert!(self.is_available(block), "block {block} is copied while it is in use");
        self.pool.retain(block);
        self.copied[block.index()] = true;
        self.num_unheld_copied += 1;
    }

    /// Drops the reference of a copy that was made.
    ///
    /// # Panics
    /// When none was being made.
    pub fn end_copy(&mut self, block: BlockId) {
        let was_copied = std::mem::take(&mut self.copied[block.index()]);
        assert!(was_copied, "no copy of block {block} was being made");
        self.num_unheld_copied -= usize::from(self.is_unheld(block));
        self.pool.free(block);
    }

    /// References to a block besides that of a copy.
    fn num_holders(&self, block: BlockId) -> u32 {
        self.pool.ref_count(block) - u32::from(self.copied[block.index()])
    }

    /// Adds a reference to a block that is owned or cached.
    ///
    /// # Panics
    /// When the block is free.
    pub fn retain(&mut self, block: BlockId) {
        self.pool.retain(block);
        self.num_unheld_copied -= usize::from(self.is_unheld(block) && self.copied[block.index()]);
        if let Some(prefixes) = &mut self.prefixes {
            prefixes.take(block);
        }
    }

    /// Drops one reference; a block whose last one it was is free, or cached if it can be found.
    ///
    /// # Panics
    /// When the block has no owner.
    pub fn free(&mut self, block: BlockId) {
        let num_holders = self.num_holders(block);
        let cached = self.prefixes.as_mut().filter(|prefixes| prefixes.contains(block));
        if let Some(prefixes) = cached
            && num_holders <= 2
        {
            prefixes.let_go(block);
            self.num_unheld_copied += usize::from(self.copied[block.index()]);
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

    /// Lets `block`, number `index` of the chain's, be found as the one after `before`. Says what
    /// became of it; `None` if prefixes are not cached.
    ///
    /// A block that another table holds stays as it is: that table may have other blocks before it.
    pub(crate) fn insert(
        &mut self,
        block: BlockId,
        before: Option<&BlockId>,
        (chain, index): (&PrefixChain, usize),
        tokens: &[u32],
    ) -> Option<Insertion> {
        let is_shared = self.pool.ref_count(block) > 1;
        let prefixes = self.prefixes.as_mut()?;
        if is_shared && !prefixes.contains(block) && !prefixes.knows(index, chain) {
            return Some(Insertion::Shared);
        }
        let insertion = prefixes.insert(block, before, (chain, index), tokens);
        if insertion == Insertion::New {
            self.pool.retain(block);
        }
        Some(insertion)
    }

    /// The block that layer group `group` has of the same tokens as `of`, one of the first group's
    /// that can be found.
    #[must_use]
    pub fn companion(&self, of: BlockId, group: usize) -> Option<BlockId> {
        self.prefixes.as_ref()?.companion(of, group)
    }

    /// Lets `block`, of layer group `group`, be found through `of`, which the first group has of
    /// the same tokens. Gives the block that is found in its place, if there is another.
    pub(crate) fn attach(&mut self, block: BlockId, of: BlockId, group: usize) -> Option<BlockId> {
        match self.prefixes.as_mut()?.attach(block, of, group)? {
            Insertion::New => self.pool.retain(block),
            Insertion::Known(other) if other != block => return Some(other),
            _ => {}
        }
        None
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
            let (count, unheld) = (self.num_holders(block), prefixes.is_unheld(block));
            let can_be_found = prefixes.contains(block);
            if can_be_found && count == 0 || unheld != (can_be_found && count == 1) {
                return Err(KvCacheError::WrongState { block, ref_count: count });
            }
        }
        let is_unheld_copied =
            |&block: &BlockId| self.is_unheld(block) && !self.is_available(block);
        let blocks = (0..).map(BlockId).take(self.num_total());
        let num_unheld_copied = blocks.filter(is_unheld_copied).count();
        assert_eq!(num_unheld_copied, self.num_unheld_copied, "cached blocks that are copied");
        Ok(())
    }
}
