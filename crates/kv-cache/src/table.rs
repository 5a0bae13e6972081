//! The blocks of one sequence, in the order of its tokens.

use crate::prefix_cache::Insertion;
use crate::{BlockId, KvCache, KvCacheError, PrefixChain, blocks_for};

/// The list of blocks that hold one sequence's keys and values.
///
/// ```text
///   blocks      [  7  |  2  |  9  |  4  ]
///                 can be found │ own: written by this table alone
///                 by prefix ───┤
///                         num_cached
/// ```
///
/// A table owns one reference to each of its blocks. It is not `Clone`, since a copy would own
/// nothing: [`share`](Self::share) makes a second owner. Before a table is dropped it must be
/// [released](Self::release), or its blocks stay held for ever (integrity checks report that).
#[derive(Debug)]
pub struct BlockTable {
    blocks: Vec<BlockId>,
    block_size: usize,
    /// How many of the first blocks are in the prefix cache.
    num_cached: usize,
}

/// A block whose content is to be copied on the device, before anything else of its batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCopy {
    /// Holds the content.
    pub from: BlockId,
    /// Is overwritten.
    pub to: BlockId,
}

impl BlockTable {
    /// An empty table over blocks of `block_size` tokens.
    ///
    /// # Panics
    /// When `block_size` is zero.
    #[must_use]
    pub fn new(block_size: usize) -> Self {
        assert!(block_size > 0, "a block holds at least one token");
        Self { blocks: Vec::new(), block_size, num_cached: 0 }
    }

    /// The blocks, first tokens first.
    ///
    /// # Shapes
    /// `[num_blocks]`; entry `i` holds positions `i * block_size .. (i + 1) * block_size`.
    #[must_use]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// How many of the first blocks can be found by their tokens.
    #[must_use]
    pub fn num_cached(&self) -> usize {
        self.num_cached
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
    pub fn grow_to(&mut self, num_tokens: usize, cache: &mut KvCache) -> Result<(), KvCacheError> {
        let needed = blocks_for(num_tokens, self.block_size).saturating_sub(self.blocks.len());
        let free = cache.num_available();
        if needed > free {
            return Err(KvCacheError::OutOfBlocks { needed, free });
        }
        self.blocks.extend((0..needed).map_while(|_| cache.allocate()));
        Ok(())
    }

    /// Gives all blocks back; the table is empty afterwards and can be used again.
    ///
    /// The last block goes first, so that a pool that hands out the latest freed block first gives
    /// them out again in the order of their tokens, and so that the prefix cache evicts a block
    /// before those it follows.
    pub fn release(&mut self, cache: &mut KvCache) {
        for block in self.blocks.drain(..).rev() {
            cache.free(block);
        }
        self.num_cached = 0;
    }

    /// Takes blocks that [`KvCache::find`] has found as the first ones of this empty table.
    ///
    /// # Panics
    /// When the table has blocks.
    pub fn adopt(&mut self, found: &[BlockId], cache: &mut KvCache) {
        assert!(self.blocks.is_empty(), "only an empty table begins with a found prefix");
        for &block in found {
            cache.retain(block);
        }
        self.blocks.extend_from_slice(found);
        self.num_cached = found.len();
    }

    /// A new table that shares the blocks of this one's first `num_tokens` tokens.
    ///
    /// The last of them may be partly filled. Whoever writes to it first while both hold it must
    /// [take a copy](Self::make_private).
    ///
    /// # Panics
    /// When the table holds fewer than `num_tokens` tokens.
    #[must_use]
    pub fn share(&self, num_tokens: usize, cache: &mut KvCache) -> Self {
        assert!(num_tokens <= self.capacity(), "a table shares only tokens that it holds");
        let shared = &self.blocks[..blocks_for(num_tokens, self.block_size)];
        for &block in shared {
            cache.retain(block);
        }
        let num_cached = self.num_cached.min(shared.len());
        Self { blocks: shared.to_vec(), block_size: self.block_size, num_cached }
    }

    /// Whether the block of `position` is held by others, too, the prefix cache among them.
    #[must_use]
    pub fn is_shared(&self, position: usize, cache: &KvCache) -> bool {
        self.blocks.get(position / self.block_size).is_some_and(|&b| cache.ref_count(b) > 1)
    }

    /// Makes the table the only holder of the block of `position`, its last one, so that it may be
    /// written. Gives the copy that the device must make for that, if one is needed; the copy's
    /// source is retained and must be freed by the caller once the copy is enqueued.
    ///
    /// # Errors
    /// [`KvCacheError::OutOfBlocks`] when no block is free; then nothing was changed.
    pub fn make_private(
        &mut self,
        position: usize,
        cache: &mut KvCache,
    ) -> Result<Option<BlockCopy>, KvCacheError> {
        let index = position / self.block_size;
        if !self.is_shared(position, cache) {
            return Ok(None);
        }
        let to = cache.allocate().ok_or(KvCacheError::OutOfBlocks { needed: 1, free: 0 })?;
        // The table's own reference to the source is now the copy's.
        let from = std::mem::replace(&mut self.blocks[index], to);
        self.num_cached = self.num_cached.min(index);
        Ok(Some(BlockCopy { from, to }))
    }

    /// Lets the full blocks of the first `num_tokens` tokens be found by other sequences. `tokens`
    /// are this sequence's, and `chain` their hashes.
    ///
    /// A block whose content another one already has is given back and the other used in its
    /// place: full blocks are never written again.
    pub fn cache_full_blocks(
        &mut self,
        num_tokens: usize,
        chain: &PrefixChain,
        tokens: &[u32],
        cache: &mut KvCache,
    ) {
        let num_full = num_tokens.min(tokens.len()) / self.block_size;
        let num_full = num_full.min(self.blocks.len()).min(chain.hashes().len());
        for index in self.num_cached..num_full {
            let block = self.blocks[index];
            let content = &tokens[index * self.block_size..][..self.block_size];
            match cache.insert(block, &self.blocks[..index], chain, content) {
                Some(Insertion::New) => {}
                Some(Insertion::Known(other)) => {
                    cache.retain(other);
                    cache.free(block);
                    self.blocks[index] = other;
                }
                Some(Insertion::Collision | Insertion::Shared) | None => return,
            }
            self.num_cached = index + 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{BlockCopy, BlockTable};
    use crate::{BlockId, KvCache, KvCacheError, PrefixChain, PrefixKey};

    fn chain(tokens: &[u32]) -> PrefixChain {
        let mut chain = PrefixChain::new(PrefixKey::default(), 4);
        chain.extend(tokens);
        chain
    }

    /// A table that holds `tokens` and has made its full blocks known.
    fn computed(tokens: &[u32], cache: &mut KvCache) -> BlockTable {
        let mut table = BlockTable::new(4);
        table.grow_to(tokens.len(), cache).unwrap();
        table.cache_full_blocks(tokens.len(), &chain(tokens), tokens, cache);
        table
    }

    #[test]
    fn slots_follow_the_blocks() {
        let mut cache = KvCache::new(8, false);
        let (mut a, mut b) = (BlockTable::new(4), BlockTable::new(4));
        a.grow_to(1, &mut cache).unwrap();
        b.grow_to(1, &mut cache).unwrap();
        a.grow_to(6, &mut cache).unwrap();
        assert_eq!(a.blocks(), [BlockId(0), BlockId(2)]);
        let slots: Vec<u32> = (0..8).map(|position| a.slot(position)).collect();
        assert_eq!(slots, [0, 1, 2, 3, 8, 9, 10, 11]);
        assert_eq!(b.slot(3), 7);
    }

    #[test]
    fn growing_is_all_or_nothing() {
        let mut cache = KvCache::new(3, false);
        let mut table = BlockTable::new(16);
        table.grow_to(16, &mut cache).unwrap();
        let error = table.grow_to(16 * 4, &mut cache).unwrap_err();
        assert_eq!(error, KvCacheError::OutOfBlocks { needed: 3, free: 2 });
        assert_eq!(error.to_string(), "3 more KV cache blocks needed, 2 are free");
        assert_eq!((table.blocks().len(), cache.num_free()), (1, 2));
        table.grow_to(16 * 3, &mut cache).unwrap();
        table.grow_to(1, &mut cache).unwrap();
        assert_eq!((table.capacity(), cache.num_free()), (48, 0));
    }

    #[test]
    fn released_blocks_are_reused_in_token_order() {
        let mut cache = KvCache::new(4, false);
        let mut table = BlockTable::new(1);
        table.grow_to(3, &mut cache).unwrap();
        table.release(&mut cache);
        table.release(&mut cache);
        assert_eq!((table.capacity(), cache.num_free()), (0, 4));
        table.grow_to(3, &mut cache).unwrap();
        assert_eq!(table.blocks(), [BlockId(0), BlockId(1), BlockId(2)]);
    }

    #[test]
    fn a_shared_block_is_copied_by_all_writers_but_the_last() {
        let mut cache = KvCache::new(5, false);
        let mut parent = BlockTable::new(4);
        parent.grow_to(10, &mut cache).unwrap();
        let mut children = [parent.share(9, &mut cache), parent.share(9, &mut cache)];
        assert_eq!(children[0].blocks(), parent.blocks());
        assert_eq!(cache.num_free(), 2, "sharing costs nothing");
        for (child, to) in children.iter_mut().zip([BlockId(3), BlockId(4)]) {
            let copy = child.make_private(9, &mut cache).unwrap();
            assert_eq!(copy, Some(BlockCopy { from: BlockId(2), to }));
            assert_eq!(child.blocks(), [BlockId(0), BlockId(1), to]);
            assert!(parent.is_shared(9, &cache), "until the copy is enqueued");
            cache.free(BlockId(2));
        }
        assert_eq!(parent.make_private(9, &mut cache), Ok(None), "nobody else holds it");
        parent.release(&mut cache);
        children.iter_mut().for_each(|child| child.release(&mut cache));
        assert_eq!((cache.num_free(), cache.check_integrity()), (5, Ok(())));
    }

    #[test]
    #[should_panic(expected = "shares only tokens that it holds")]
    fn sharing_beyond_the_table_panics() {
        let mut cache = KvCache::new(1, false);
        let _ = BlockTable::new(4).share(1, &mut cache);
    }

    #[test]
    fn full_blocks_are_found_by_all_tokens_up_to_their_end() {
        let mut cache = KvCache::new(8, true);
        let mut table = computed(&[1, 2, 3, 4, 5, 6, 7, 8, 9], &mut cache);
        assert_eq!(table.num_cached(), 2);
        let find = |tokens: &[u32], max| cache.find(&chain(tokens), tokens, max).len();
        assert_eq!(find(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 9], 9), 2);
        assert_eq!(find(&[1, 2, 3, 4, 5, 6, 7, 8], 1), 1, "no more than asked for");
        assert_eq!(find(&[1, 2, 3, 4, 5, 6, 7, 9], 9), 1);
        assert_eq!(find(&[5, 6, 7, 8, 1, 2, 3, 4], 9), 0);
        assert_eq!(find(&[1, 2, 3], 9), 0);
        table.release(&mut cache);
        assert_eq!((cache.num_free(), cache.num_cached(), cache.num_available()), (6, 2, 8));
    }

    #[test]
    fn other_keys_find_nothing() {
        let mut cache = KvCache::new(8, true);
        let tokens = [1, 2, 3, 4];
        computed(&tokens, &mut cache).release(&mut cache);
        let mut salted =
            PrefixChain::new(PrefixKey { salt: Some("x".into()), ..PrefixKey::default() }, 4);
        salted.extend(&tokens);
        assert_eq!(cache.find(&salted, &tokens, 9), []);
        // Even if the hashes were equal.
        salted.collide(&chain(&tokens));
        assert_eq!(cache.find(&salted, &tokens, 9), []);
        let mut table = BlockTable::new(4);
        table.grow_to(4, &mut cache).unwrap();
        table.cache_full_blocks(4, &salted, &tokens, &mut cache);
        assert_eq!(table.num_cached(), 0, "the hash is taken");
        table.release(&mut cache);
        assert_eq!((cache.num_free(), cache.check_integrity()), (7, Ok(())));
    }

    #[test]
    fn the_same_content_is_kept_once() {
        let mut cache = KvCache::new(8, true);
        let tokens = [1, 2, 3, 4, 5, 6, 7, 8];
        let mut first = computed(&tokens, &mut cache);
        let mut second = computed(&tokens, &mut cache);
        assert_eq!(first.blocks(), second.blocks());
        assert_eq!((cache.num_free(), cache.ref_count(BlockId(0))), (6, 3));
        first.release(&mut cache);
        second.release(&mut cache);
        assert_eq!((cache.num_cached(), cache.check_integrity()), (2, Ok(())));
    }

    #[test]
    fn the_least_recently_used_leaf_goes_first() {
        let mut cache = KvCache::new(4, true);
        let (old, new) = ([1, 2, 3, 4, 5, 6, 7, 8], [9, 9, 9, 9, 5, 6, 7, 8]);
        computed(&old, &mut cache).release(&mut cache);
        computed(&new, &mut cache).release(&mut cache);
        // Used again, the old prefix's first block outlives the new one's blocks.
        let mut table = BlockTable::new(4);
        table.adopt(&cache.find(&chain(&old), &old, 1), &mut cache);
        table.release(&mut cache);
        let found = |cache: &KvCache| {
            [old, new].map(|tokens| cache.find(&chain(&tokens), &tokens, 9).len())
        };
        assert_eq!((cache.num_free(), found(&cache)), (0, [2, 2]));
        for expected in [[1, 2], [1, 1], [1, 0], [0, 0]] {
            assert!(cache.allocate().is_some());
            assert_eq!((found(&cache), cache.check_integrity()), (expected, Ok(())));
        }
        assert_eq!(cache.allocate(), None);
    }
}
