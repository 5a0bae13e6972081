//! The blocks of one sequence, in the order of its tokens.

use std::ops::Range;

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
/// Of a sequence that keeps only its latest tokens ([`Retention`](crate::Retention)) the table has
/// no entries for those that went. Then its sinks, the first tokens, are there twice: aside, as
/// they were computed, and in the table, with keys turned to where the others begin.
///
/// ```text
///   tokens   [ sinks | gone ... gone | 96 .. 111 | 112 .. ]
///   blocks   [  11   |                     2     |   9    ]
///   aside    [   7   ]
/// ```
///
/// A table owns one reference to each of its blocks. It is not `Clone`, since a copy would own
/// nothing: [`adopt`](Self::adopt) makes a second owner. Before a table is dropped it must be
/// [released](Self::release), or its blocks stay held for ever (integrity checks report that).
#[derive(Debug)]
pub struct BlockTable {
    blocks: Vec<BlockId>,
    block_size: usize,
    /// How many of the first blocks are in the prefix cache.
    num_cached: usize,
    /// Tokens that have no entries any more; those of whole blocks.
    num_dropped: usize,
    /// The sinks as they were computed; empty until tokens are dropped. Before a prompt is cut:
    /// blocks for what stays of it.
    aside: Vec<BlockId>,
}

/// What a table begins with: blocks that others have computed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TableStart {
    /// In the order of their tokens.
    pub blocks: Vec<BlockId>,
    /// Tokens before them, of whole blocks, that nothing behind them sees.
    pub num_dropped: usize,
    /// How many of the first blocks are in the prefix cache.
    num_cached: usize,
}

impl TableStart {
    /// Blocks that [`KvCache::find`] has found, but for those of the first `num_dropped` tokens.
    #[must_use]
    pub fn found(blocks: Vec<BlockId>, num_dropped: usize) -> Self {
        Self { num_cached: blocks.len(), blocks, num_dropped }
    }

    /// Number of blocks up to the end of these, those of dropped tokens included.
    #[must_use]
    pub fn end(&self, block_size: usize) -> usize {
        self.num_dropped / block_size + self.blocks.len()
    }
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
        Self { blocks: Vec::new(), block_size, num_cached: 0, num_dropped: 0, aside: Vec::new() }
    }

    /// The blocks, first tokens first.
    ///
    /// # Shapes
    /// `[num_blocks]`; entry `i` holds positions `i * block_size .. (i + 1) * block_size`, further
    /// on by [`num_dropped`](Self::num_dropped) if they are not those of sinks.
    #[must_use]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// How many of the first blocks can be found by their tokens.
    #[must_use]
    pub fn num_cached(&self) -> usize {
        self.num_cached
    }

    /// How many of the sequence's first blocks can or could be found by their tokens, those of
    /// dropped tokens included.
    #[must_use]
    pub fn num_found(&self) -> usize {
        self.num_dropped / self.block_size + self.num_cached
    }

    /// Tokens in one block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Tokens that are not in the cache any more: the first ones behind the sinks.
    #[must_use]
    pub fn num_dropped(&self) -> usize {
        self.num_dropped
    }

    /// Blocks of sinks as they were computed, each with the one that is to have the same content
    /// but for keys turned by [`num_dropped`](Self::num_dropped) positions.
    pub fn turned(&self) -> impl Iterator<Item = BlockCopy> {
        let sinks = if self.num_dropped > 0 { &self.aside[..] } else { &[] };
        let pairs = sinks.iter().zip(&self.blocks);
        pairs.map(|(&from, &to)| BlockCopy { from, to })
    }

    /// Every block that the table holds a reference to.
    pub fn held(&self) -> impl Iterator<Item = BlockId> {
        self.blocks.iter().chain(&self.aside).copied()
    }

    /// Number of tokens for which there is or was room.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.num_dropped + self.blocks.len() * self.block_size
    }

    /// Place of the token at `position` in the KV cache, counted in tokens from its start.
    ///
    /// # Panics
    /// When the table has not grown to `position`, or when the place does not fit 32 bits. Sinks
    /// have no place once tokens were dropped.
    #[must_use]
    pub fn slot(&self, position: usize) -> u32 {
        let position = position - self.num_dropped;
        let block = self.blocks[position / self.block_size];
        let slot = block.index() * self.block_size + position % self.block_size;
        u32::try_from(slot).expect("a KV cache has fewer than 2^32 token places")
    }

    /// Allocates blocks until `num_tokens` tokens have room; does nothing when they already have.
    ///
    /// # Errors
    /// [`KvCacheError::OutOfBlocks`] when too few blocks are free; then nothing was allocated.
    pub fn grow_to(&mut self, num_tokens: usize, cache: &mut KvCache) -> Result<(), KvCacheError> {
        let num_kept = num_tokens.saturating_sub(self.num_dropped);
        let needed = blocks_for(num_kept, self.block_size).saturating_sub(self.blocks.len());
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
        for block in self.blocks.drain(..).rev().chain(self.aside.drain(..).rev()) {
            cache.free(block);
        }
        (self.num_cached, self.num_dropped) = (0, 0);
    }

    /// Lets go of tokens, `num_dropped` in all, the first ones behind `num_sinks` that stay. Does
    /// nothing when they went before.
    ///
    /// The first time the sinks get blocks of their own, so that [turned](Self::turned) keys
    /// overwrite nothing that others see.
    ///
    /// # Errors
    /// [`KvCacheError::OutOfBlocks`] when there are none for that; then nothing was changed.
    ///
    /// # Panics
    /// When the table does not have whole blocks of these tokens.
    pub fn slide(
        &mut self,
        num_dropped: usize,
        num_sinks: usize,
        cache: &mut KvCache,
    ) -> Result<(), KvCacheError> {
        if num_dropped <= self.num_dropped {
            return Ok(());
        }
        let num_sinks = num_sinks / self.block_size;
        if self.aside.is_empty() && num_sinks > 0 {
            let (needed, free) = (num_sinks, cache.num_available());
            if needed > free {
                return Err(KvCacheError::OutOfBlocks { needed, free });
            }
            let copies: Vec<BlockId> = (0..needed).map_while(|_| cache.allocate()).collect();
            self.aside.extend(self.blocks.splice(..num_sinks, copies));
        }
        let num_blocks = (num_dropped - self.num_dropped) / self.block_size;
        for block in self.blocks.drain(num_sinks..num_sinks + num_blocks).rev() {
            cache.free(block);
        }
        self.num_dropped += num_blocks * self.block_size;
        let is_exact = self.aside.is_empty();
        self.num_cached = if is_exact { self.num_cached.saturating_sub(num_blocks) } else { 0 };
        Ok(())
    }

    /// Takes blocks for what is to stay of `num_kept` tokens when the prompt is cut.
    ///
    /// # Errors
    /// [`KvCacheError::OutOfBlocks`] when too few are free; then nothing was changed.
    pub fn reserve_cut(
        &mut self,
        num_kept: usize,
        cache: &mut KvCache,
    ) -> Result<(), KvCacheError> {
        assert!(self.aside.is_empty(), "a prompt is cut once");
        let (needed, free) = (blocks_for(num_kept, self.block_size), cache.num_available());
        if needed > free {
            return Err(KvCacheError::OutOfBlocks { needed, free });
        }
        self.aside.extend((0..needed).map_while(|_| cache.allocate()));
        Ok(())
    }

    /// The blocks that are reserved for a cut; what stays is to be copied there.
    #[must_use]
    pub fn reserved(&self) -> &[BlockId] {
        if self.num_dropped == 0 { &self.aside } else { &[] }
    }

    /// Lets go of a prompt of `prompt_len` tokens but for what was copied to the
    /// [reserved](Self::reserved) blocks.
    pub fn cut(&mut self, prompt_len: usize, cache: &mut KvCache) {
        let reserved = std::mem::take(&mut self.aside);
        for block in std::mem::replace(&mut self.blocks, reserved).into_iter().rev() {
            cache.free(block);
        }
        (self.num_cached, self.num_dropped) = (0, prompt_len - self.capacity());
    }

    /// Takes what this empty table is to begin with.
    ///
    /// # Panics
    /// When the table has blocks.
    pub fn adopt(&mut self, start: &TableStart, cache: &mut KvCache) {
        assert!(self.blocks.is_empty(), "only an empty table begins with a found prefix");
        for &block in &start.blocks {
            cache.retain(block);
        }
        self.blocks.extend_from_slice(&start.blocks);
        (self.num_cached, self.num_dropped) = (start.num_cached, start.num_dropped);
    }

    /// What another table begins with to share the blocks of these tokens, whose first is a block's
    /// first. `None` if not all of them are here.
    ///
    /// The last block may be partly filled. Whoever writes to it first while both hold it must
    /// [take a copy](Self::make_private).
    #[must_use]
    pub fn shared(&self, tokens: Range<usize>) -> Option<TableStart> {
        let before = tokens.start.checked_sub(self.num_dropped)? / self.block_size;
        let num_kept = tokens.end.checked_sub(self.num_dropped)?;
        let blocks = self.blocks.get(before..blocks_for(num_kept, self.block_size))?.to_vec();
        let num_cached = self.num_cached.saturating_sub(before).min(blocks.len());
        Some(TableStart { blocks, num_cached, num_dropped: tokens.start })
    }

    /// Whether the block of `position` is held by others, too, the prefix cache among them.
    #[must_use]
    pub fn is_shared(&self, position: usize, cache: &KvCache) -> bool {
        let block = self.blocks.get((position - self.num_dropped) / self.block_size);
        block.is_some_and(|&block| cache.ref_count(block) > 1)
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
        let index = (position - self.num_dropped) / self.block_size;
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
    /// place: full blocks are never written again. Where tokens were dropped, a block can only be
    /// found behind one that still can.
    pub fn cache_full_blocks(
        &mut self,
        num_tokens: usize,
        chain: &PrefixChain,
        tokens: &[u32],
        cache: &mut KvCache,
    ) {
        if !self.num_dropped.is_multiple_of(self.block_size) {
            return;
        }
        let num_before = self.num_dropped / self.block_size;
        let num_full = (num_tokens.min(tokens.len()) / self.block_size).min(chain.hashes().len());
        let num_full = num_full.saturating_sub(num_before).min(self.blocks.len());
        for index in self.num_cached..num_full {
            let (block, before) = (self.blocks[index], self.blocks[..index].last());
            if num_before > 0 && !before.is_some_and(|&before| cache.is_cached(before)) {
                return;
            }
            let number = num_before + index;
            let content = &tokens[number * self.block_size..][..self.block_size];
            match cache.insert(block, before, (chain, number), content) {
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

    /// As [`cache_full_blocks`](Self::cache_full_blocks), for the table of layer group `group` of a
    /// sequence whose first group's table is `first`: its blocks can be found through that one's.
    pub(crate) fn cache_beside(&mut self, first: &Self, group: usize, cache: &mut KvCache) {
        let num_before = self.num_dropped / self.block_size;
        let num_full = first.num_found().saturating_sub(num_before).min(self.blocks.len());
        for index in self.num_cached..num_full {
            let place = (num_before + index).checked_sub(first.num_dropped / self.block_size);
            let of = place.and_then(|place| first.blocks.get(place));
            let block = self.blocks[index];
            if let Some(other) = of.and_then(|&of| cache.attach(block, of, group)) {
                cache.retain(other);
                cache.free(block);
                self.blocks[index] = other;
            }
        }
        self.num_cached = self.num_cached.max(num_full);
    }
}

#[cfg(test)]
mod tests {
    use super::{BlockCopy, BlockTable, TableStart};
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
        let start = parent.shared(0..9).unwrap();
        let mut children = [BlockTable::new(4), BlockTable::new(4)];
        children.iter_mut().for_each(|child| child.adopt(&start, &mut cache));
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
    fn only_tokens_that_are_there_are_shared() {
        let mut cache = KvCache::new(3, false);
        let mut table = BlockTable::new(4);
        assert_eq!(table.shared(0..1), None);
        table.grow_to(12, &mut cache).unwrap();
        table.slide(4, 0, &mut cache).unwrap();
        assert_eq!((table.shared(0..9), table.shared(4..13)), (None, None));
        let start = table.shared(8..12).unwrap();
        assert_eq!((&start.blocks[..], start.num_dropped), (&[BlockId(2)][..], 8));
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
        table.adopt(&TableStart::found(cache.find(&chain(&old), &old, 1), 0), &mut cache);
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

    #[test]
    fn sliding_lets_the_oldest_go_and_sets_sinks_aside() {
        let mut cache = KvCache::new(8, true);
        let tokens: Vec<u32> = (0..20).collect();
        let mut table = computed(&tokens, &mut cache);
        table.slide(8, 4, &mut cache).unwrap();
        assert_eq!(table.blocks(), [BlockId(5), BlockId(3), BlockId(4)]);
        let turned: Vec<BlockCopy> = table.turned().collect();
        assert_eq!(turned, [BlockCopy { from: BlockId(0), to: BlockId(5) }]);
        // Position 13 is the second token of block 3.
        assert_eq!((table.slot(13), table.capacity(), table.num_dropped()), (13, 20, 8));
        table.slide(12, 4, &mut cache).unwrap();
        assert_eq!(table.blocks(), [BlockId(5), BlockId(4)]);
        assert_eq!(table.turned().count(), 1, "the sinks are copied from the same blocks");
        table.cache_full_blocks(20, &chain(&tokens), &tokens, &mut cache);
        assert_eq!(cache.check_integrity(), Ok(()));
        table.release(&mut cache);
        assert_eq!((cache.num_available(), table.num_dropped()), (8, 0));
        let found = cache.find(&chain(&tokens), &tokens, 9);
        assert_eq!(found.len(), 5, "as it was computed before anything went");
    }

    #[test]
    fn what_follows_an_evicted_block_is_found_no_more() {
        let mut cache = KvCache::new(6, true);
        let tokens: Vec<u32> = (0..16).collect();
        let mut table = computed(&tokens, &mut cache);
        table.slide(8, 0, &mut cache).unwrap();
        let found = |cache: &KvCache| cache.find(&chain(&tokens), &tokens, 9).len();
        assert_eq!((found(&cache), cache.num_available()), (4, 4));
        for expected in [4, 4, 1, 0] {
            assert!(cache.allocate().is_some());
            assert_eq!((found(&cache), cache.check_integrity()), (expected, Ok(())));
        }
        assert_eq!((cache.allocate(), cache.ref_count(BlockId(3))), (None, 1));
        table.release(&mut cache);
        assert_eq!(cache.num_free(), 2, "nobody can find them");
    }

    #[test]
    fn a_cut_prompt_leaves_what_was_copied() {
        let mut cache = KvCache::new(10, true);
        let tokens: Vec<u32> = (0..18).collect();
        let mut table = computed(&tokens, &mut cache);
        table.reserve_cut(8, &mut cache).unwrap();
        assert_eq!((table.reserved(), cache.num_free()), (&[BlockId(5), BlockId(6)][..], 3));
        table.cut(18, &mut cache);
        assert_eq!(table.blocks(), [BlockId(5), BlockId(6)]);
        assert_eq!((table.num_dropped(), table.capacity(), table.turned().count()), (10, 18, 0));
        table.grow_to(19, &mut cache).unwrap();
        assert_eq!(table.slot(18), table.blocks()[2].0 * 4);
        let longer: Vec<u32> = (0..30).collect();
        table.cache_full_blocks(19, &chain(&longer), &longer, &mut cache);
        assert_eq!(table.num_cached(), 0, "what stays is no prefix");
        table.release(&mut cache);
        assert_eq!((cache.num_available(), cache.check_integrity()), (10, Ok(())));
    }
}
