//! The block tables of one sequence, one for each group of the model's layers.

use crate::table::{BlockCopy, BlockTable, TableStart};
use crate::{BlockId, KvCache, KvCacheError, PrefixChain, Retention, blocks_for};

/// A sequence's block tables: layers that look equally far back share one.
///
/// All tables take blocks of one pool; what a block holds are keys and values of one group's
/// layers, so groups have equally many. Each group keeps what its layers can still see:
///
/// ```text
///   tokens                    0 .. 15 | 16 .. 31 | 32 .. 47 | 48 .. 63
///   group 0, sees everything  [  7    |    2     |    9     |    4    ]
///   group 1, a window of 20             gone      [   11     |    3    ]
///   group 2, a window of 20             gone      [    8     |    5    ]
/// ```
///
/// The first group looks back the furthest. A model whose layers are all alike has no other.
///
/// # Source
/// vLLM's `vllm/v1/core/kv_cache_utils.py` and `single_type_kv_cache_manager.py`: groups of as many
/// layers each over one pool, and which blocks a hit needs of each.
#[derive(Debug)]
pub struct GroupTables {
    first: Group,
    others: Vec<Group>,
}

#[derive(Debug)]
struct Group {
    table: BlockTable,
    retention: Retention,
}

impl GroupTables {
    /// Empty tables over blocks of `block_size` tokens. `retention` is the first group's; `windows`
    /// say how far back the others' layers look, `None` being everything.
    ///
    /// What goes by choice goes from all groups alike.
    ///
    /// # Panics
    /// When `block_size` is zero.
    #[must_use]
    pub fn new(block_size: usize, retention: Retention, windows: &[Option<usize>]) -> Self {
        let group = |retention| Group { table: BlockTable::new(block_size), retention };
        let others = windows.iter().map(|window| group(retention.of_group(*window)));
        Self { first: group(retention), others: others.collect() }
    }

    /// The first group's table.
    #[must_use]
    pub fn first(&self) -> &BlockTable {
        &self.first.table
    }

    /// The same, to be changed; only of a model that has no other group.
    ///
    /// # Panics
    /// When there are other groups.
    pub fn only(&mut self) -> &mut BlockTable {
        assert!(self.others.is_empty(), "a model with several layer groups cannot do this");
        &mut self.first.table
    }

    /// The other groups' tables.
    pub fn others(&self) -> impl Iterator<Item = &BlockTable> {
        self.others.iter().map(|group| &group.table)
    }

    /// Every group's table.
    pub fn iter(&self) -> impl Iterator<Item = &BlockTable> {
        self.groups().map(|group| &group.table)
    }

    /// Number of groups.
    #[must_use]
    pub fn num_groups(&self) -> usize {
        1 + self.others.len()
    }

    fn groups(&self) -> impl Iterator<Item = &Group> {
        [&self.first].into_iter().chain(&self.others)
    }

    fn groups_mut(&mut self) -> impl Iterator<Item = &mut Group> {
        [&mut self.first].into_iter().chain(&mut self.others)
    }

    /// Every block that the tables hold a reference to.
    pub fn held(&self) -> impl Iterator<Item = BlockId> {
        self.iter().flat_map(BlockTable::held)
    }

    /// Number of tokens for which there is or was room in every table.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.iter().map(BlockTable::capacity).min().unwrap_or(0)
    }

    /// Most blocks that the sequence holds at once until it has `num_tokens` tokens in all, if its
    /// rows have at most `most` tokens: of each group.
    pub fn most_blocks(&self, num_tokens: usize, most: usize) -> impl Iterator<Item = usize> {
        let of = move |group: &Group| {
            group.retention.most_blocks(num_tokens, most, group.table.block_size())
        };
        self.groups().map(of)
    }

    /// Of each group whether it lets go of blocks one by one until there are `num_tokens` tokens.
    pub fn lets_go(&self, num_tokens: usize) -> impl Iterator<Item = bool> {
        self.groups().map(move |group| group.retention.lets_go(num_tokens))
    }

    /// Whether some group should have let go of tokens before a row that begins at `start`.
    #[must_use]
    pub fn is_behind(&self, start: usize) -> bool {
        self.groups().any(|group| group.num_to_drop(start) > group.table.num_dropped())
    }

    /// Whether a row that begins at `start` does not see some of the tokens before it.
    #[must_use]
    pub fn drops_before(&self, start: usize) -> bool {
        self.groups().any(|group| group.num_to_drop(start) > 0)
    }

    /// Lets go of what a row that begins at `start` does not see. Whether something went.
    ///
    /// # Errors
    /// As [`BlockTable::slide`]; groups before may have let go.
    pub fn slide(&mut self, start: usize, cache: &mut KvCache) -> Result<bool, KvCacheError> {
        let mut went = false;
        for group in self.groups_mut() {
            let num_dropped = group.num_to_drop(start);
            went |= num_dropped > group.table.num_dropped();
            group.table.slide(num_dropped, group.retention.num_sinks(), cache)?;
        }
        Ok(went)
    }

    /// Takes blocks for a sequence of `len` tokens that goes on at `start` in rows of at most
    /// `most` tokens: for all tokens, or as many as may be there at once.
    ///
    /// # Errors
    /// [`KvCacheError::OutOfBlocks`]; groups before may have grown.
    pub fn grow(
        &mut self,
        start: usize,
        (len, most): (usize, usize),
        cache: &mut KvCache,
    ) -> Result<(), KvCacheError> {
        self.groups_mut().try_for_each(|group| {
            let room = len.min(group.retention.reach(start, most));
            group.table.grow_to(room, cache)
        })
    }

    /// Gives all blocks back. Those of the first group last, so that the prefix cache evicts none
    /// of them before what is found through it.
    pub fn release(&mut self, cache: &mut KvCache) {
        self.others.iter_mut().for_each(|group| group.table.release(cache));
        self.first.table.release(cache);
    }

    /// As [`BlockTable::make_private`], in every group.
    ///
    /// # Errors
    /// [`KvCacheError::OutOfBlocks`]; groups before may have changed.
    pub fn make_private(
        &mut self,
        position: usize,
        cache: &mut KvCache,
    ) -> Result<Vec<BlockCopy>, KvCacheError> {
        let copies = self.groups_mut().map(|group| group.table.make_private(position, cache));
        copies.filter_map(Result::transpose).collect()
    }

    /// As [`BlockTable::cache_full_blocks`], in every group.
    pub fn cache_full_blocks(
        &mut self,
        num_tokens: usize,
        chain: &PrefixChain,
        tokens: &[u32],
        cache: &mut KvCache,
    ) {
        let first = &mut self.first.table;
        first.cache_full_blocks(num_tokens, chain, tokens, cache);
        for (number, group) in self.others.iter_mut().enumerate() {
            group.table.cache_beside(first, number + 1, cache);
        }
    }

    /// How many blocks a sequence can begin with of the `num_first` that the first group has: all
    /// groups must have what a row behind them sees. `found` are those of the first group that are
    /// on the device; of group `g`, `is_elsewhere(g, i)` says whether block `i` can be moved there.
    ///
    /// What a group begins with is found on the device as far as possible, and the rest moved:
    ///
    /// ```text
    ///   group 0   [ found | found | found | found | moved | moved ]
    ///   group 1                   [ found | moved | moved | moved ]    a window
    ///                                             num_usable = 6  ▲
    /// ```
    #[must_use]
    pub fn num_usable(
        &self,
        found: &[BlockId],
        num_first: usize,
        is_elsewhere: impl Fn(usize, usize) -> bool,
        cache: &KvCache,
    ) -> usize {
        if self.others.is_empty() {
            return num_first;
        }
        let mut is_usable = vec![true; num_first + 1];
        for (group, number) in self.others.iter().zip(1..) {
            // From `from_found` to `end` all are on the device; from `from`, the rest elsewhere.
            let (mut from_found, mut from) = (0, 0);
            for (end, is_usable) in is_usable.iter_mut().enumerate().skip(1) {
                let is_found = beside(found, end - 1, number, cache).is_some();
                from_found = if is_found { from_found } else { end };
                from = if is_elsewhere(number, end - 1) { from } else { from_found };
                *is_usable &= from <= group.num_blocks_unseen(end);
            }
        }
        is_usable.iter().rposition(|usable| *usable).unwrap_or(0)
    }

    /// What each group begins with of a row behind so many blocks, as far as it is on the device:
    /// `found` are those of the first group.
    #[must_use]
    pub fn found(&self, found: &[BlockId], num_blocks: usize, cache: &KvCache) -> Vec<TableStart> {
        let start = |(number, group): (usize, &Group)| {
            let num_unseen = group.num_blocks_unseen(num_blocks);
            let blocks = (num_unseen..num_blocks).map_while(|i| beside(found, i, number, cache));
            TableStart::found(blocks.collect(), num_unseen * group.table.block_size())
        };
        self.groups().enumerate().map(start).collect()
    }

    /// Of each group the blocks that a row that begins at `start` sees.
    pub fn seen_from(&self, start: usize) -> impl Iterator<Item = &[BlockId]> {
        self.groups().map(move |Group { table, retention }| {
            let block_size = table.block_size();
            let place = |position: usize| position.saturating_sub(table.num_dropped());
            let unseen = place(retention.num_dropped(start, block_size)) / block_size;
            &table.blocks()[unseen..blocks_for(place(start), block_size)]
        })
    }

    /// Of the groups behind the first, what they begin with if all of it is to come: the row behind
    /// begins at `start`.
    #[must_use]
    pub fn empty_others(&self, start: usize) -> Vec<TableStart> {
        let empty = |group: &Group| TableStart::found(Vec::new(), group.num_to_drop(start));
        self.others.iter().map(empty).collect()
    }

    /// What another sequence that keeps the same begins with to share the blocks of this one's
    /// first `num_tokens` tokens. `None` when some that it sees are gone, or if tokens go by
    /// choice.
    #[must_use]
    pub fn shared(&self, num_tokens: usize) -> Option<Vec<TableStart>> {
        let is_single = self.others.is_empty();
        let start = |group: &Group| {
            let num_dropped = if is_single { 0 } else { group.num_to_drop(num_tokens) };
            let is_exact = num_dropped == 0 || group.retention.num_exact() == usize::MAX;
            group.table.shared(num_dropped..num_tokens).filter(|_| is_exact)
        };
        self.groups().map(start).collect()
    }

    /// Takes what the sequence begins with, of each group; the tables are empty.
    ///
    /// # Panics
    /// When a table has blocks.
    pub fn adopt(&mut self, starts: &[TableStart], cache: &mut KvCache) {
        for (group, start) in self.groups_mut().zip(starts) {
            group.table.adopt(start, cache);
        }
    }
}

/// What group `number` has of the same tokens as number `index` of the first group's blocks.
fn beside(found: &[BlockId], index: usize, number: usize, cache: &KvCache) -> Option<BlockId> {
    let of = *found.get(index)?;
    if number == 0 { Some(of) } else { cache.companion(of, number) }
}

impl Group {
    fn num_to_drop(&self, start: usize) -> usize {
        self.retention.num_dropped(start, self.table.block_size())
    }

    /// Of the first `num_blocks` blocks how many a row behind them does not see.
    fn num_blocks_unseen(&self, num_blocks: usize) -> usize {
        let block_size = self.table.block_size();
        self.num_to_drop(num_blocks * block_size) / block_size
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::ops::Range;

    use proptest::prelude::*;

    use super::*;
    use crate::PrefixKey;

    const BLOCK: usize = 4;

    fn chain(tokens: &[u32]) -> PrefixChain {
        let mut chain = PrefixChain::new(PrefixKey::default(), BLOCK);
        chain.extend(tokens);
        chain
    }

    /// Everything, and a window of six tokens.
    fn tables() -> GroupTables {
        GroupTables::new(BLOCK, Retention::All, &[Some(6)])
    }

    /// Tables of a sequence that has computed `tokens`, four in each row.
    fn computed(tokens: &[u32], cache: &mut KvCache) -> GroupTables {
        let mut tables = tables();
        for start in (0..tokens.len()).step_by(4) {
            tables.slide(start, cache).unwrap();
            tables.grow(start, (tokens.len(), 4), cache).unwrap();
            let end = tokens.len().min(start + 4);
            tables.cache_full_blocks(end, &chain(tokens), tokens, cache);
            assert_eq!(cache.check_integrity(), Ok(()));
        }
        tables
    }

    fn usable(tokens: &[u32], cache: &KvCache) -> usize {
        let found = cache.find(&chain(tokens), tokens, 99);
        tables().num_usable(&found, found.len(), |_, _| false, cache)
    }

    #[test]
    fn each_group_keeps_what_it_sees() {
        let mut cache = KvCache::new(20, false);
        let mut tables = computed(&(0..20).collect::<Vec<_>>(), &mut cache);
        tables.slide(20, &mut cache).unwrap();
        // The token at 20 sees those from 15 on: blocks 3 and 4.
        let lens: Vec<usize> = tables.iter().map(|table| table.blocks().len()).collect();
        assert_eq!((lens, tables.held().count(), cache.num_free()), (vec![5, 2], 7, 13));
        assert_eq!(tables.iter().map(BlockTable::num_dropped).collect::<Vec<_>>(), [0, 12]);
        // Six tokens back and a row of four: ten tokens lie in four blocks at most.
        assert_eq!(tables.most_blocks(100, 4).collect::<Vec<_>>(), [25, 4]);
        tables.release(&mut cache);
        assert_eq!(cache.num_free(), 20);
    }

    #[test]
    fn a_hit_needs_the_last_window_of_groups_that_have_one() {
        let mut cache = KvCache::new(10, true);
        let tokens: Vec<u32> = (0..20).collect();
        let mut old = computed(&tokens, &mut cache);
        assert_eq!((cache.num_free(), cache.num_findable()), (0, 10));
        // The window's first blocks are gone from the table, and cached; they go first.
        let gone = cache.num_cached();
        assert_eq!((gone, usable(&tokens, &cache), usable(&tokens[..8], &cache)), (2, 5, 2));
        let taken: Vec<_> = (0..gone).map(|_| cache.allocate().unwrap()).collect();
        assert_eq!(cache.check_integrity(), Ok(()));
        // Behind two blocks a row sees positions 3 to 7, whose first block is gone.
        assert_eq!((usable(&tokens, &cache), usable(&tokens[..8], &cache)), (5, 0));
        let found = cache.find(&chain(&tokens), &tokens, 99);
        let starts = tables().found(&found, found.len(), &cache);
        let kept: Vec<BlockId> = old.iter().nth(1).unwrap().blocks().to_vec();
        assert_eq!((starts[1].num_dropped, &starts[1].blocks[..]), (12, &kept[kept.len() - 2..]));
        let mut new = tables();
        new.adopt(&starts, &mut cache);
        new.grow(20, (21, 4), &mut cache).unwrap_err();
        new.release(&mut cache);
        old.release(&mut cache);
        taken.into_iter().for_each(|block| cache.free(block));
        assert_eq!((cache.num_available(), cache.check_integrity()), (10, Ok(())));
    }

    /// What is where of one group: on the device, elsewhere, or both.
    type Places = Vec<[bool; 2]>;

    /// Whether a group has what a row behind `end` blocks sees: some on the device, then some
    /// elsewhere.
    fn has_all(places: &Places, num_unseen: usize, end: usize) -> bool {
        let all = |range: Range<usize>, place: usize| range.into_iter().all(|i| places[i][place]);
        (num_unseen..=end).any(|split| all(num_unseen..split, 0) && all(split..end, 1))
    }

    proptest! {
        #[test]
        fn a_beginning_is_found_and_then_moved(
            num_found in 0usize..12,
            window in 1usize..40,
            places in prop::collection::vec(prop::collection::vec(any::<[bool; 2]>(), 16), 2),
        ) {
            let mut cache = KvCache::new(64, true);
            let tokens: Vec<u32> = (0..64).collect();
            let mut first = BlockTable::new(BLOCK);
            first.grow_to(BLOCK * num_found, &mut cache).unwrap();
            first.cache_full_blocks(BLOCK * num_found, &chain(&tokens), &tokens, &mut cache);
            let mut places: Vec<Places> = places;
            let tables = GroupTables::new(BLOCK, Retention::All, &[Some(window), None]);
            for (group, places) in (1..).zip(&mut places) {
                for (i, place) in places.iter_mut().enumerate() {
                    // Nothing is found but beside the first group's.
                    place[0] &= i < num_found;
                    if place[0] {
                        let block = cache.allocate().unwrap();
                        prop_assert_eq!(cache.attach(block, first.blocks()[i], group), None);
                    }
                }
            }
            let is_elsewhere = |group: usize, i: usize| places[group - 1][i][1];
            let usable = tables.num_usable(first.blocks(), 16, is_elsewhere, &cache);
            // The token behind `end` blocks sees `window` tokens, itself included.
            let unseen = |end: usize| (BLOCK * end + 1).saturating_sub(window) / BLOCK;
            let can_begin = |end: &usize| {
                let end = *end;
                has_all(&places[0], unseen(end), end) && has_all(&places[1], 0, end)
            };
            prop_assert_eq!(usable, (0..=16).rev().find(can_begin).unwrap());
            // What is not on the device of what it begins with is elsewhere.
            let starts = tables.found(first.blocks(), usable, &cache);
            prop_assert_eq!(starts[1].num_dropped, BLOCK * unseen(usable));
            for (group, start) in starts.iter().enumerate().skip(1) {
                prop_assert!((start.end(BLOCK)..usable).all(|i| is_elsewhere(group, i)));
            }
            prop_assert_eq!(starts[0].end(BLOCK), usable.min(num_found));
        }
    }

    #[test]
    fn what_goes_with_a_block_has_a_name_of_its_own() {
        let mut cache = KvCache::new(20, true);
        let tokens: Vec<u32> = (0..8).collect();
        let named = |tokens: &[u32]| {
            let mut chain = PrefixChain::new(PrefixKey::default(), BLOCK).with_names();
            chain.extend(tokens);
            chain
        };
        let mut tables = tables();
        tables.grow(0, (8, 8), &mut cache).unwrap();
        tables.cache_full_blocks(8, &named(&tokens), &tokens, &mut cache);
        let blocks: Vec<Vec<BlockId>> =
            tables.iter().map(|table| table.blocks().iter().rev().copied().collect()).collect();
        tables.release(&mut cache);
        // What is found through others goes first, and of each group the end.
        let expected = [1, 0].map(|group| {
            let names =
                named(&tokens).names().iter().rev().map(|name| name.of_group(group)).collect();
            blocks[group].iter().copied().zip::<Vec<_>>(names).collect::<Vec<_>>()
        });
        let offered: Vec<_> = std::iter::from_fn(|| cache.offer()).collect();
        assert_eq!(offered, expected.concat());
        let names: HashSet<_> = offered.iter().map(|(_, name)| *name).collect();
        assert_eq!(names.len(), 4);
        assert_eq!(named(&tokens).names()[0].of_group(0), named(&tokens).names()[0]);
    }

    #[test]
    fn the_same_content_is_kept_once_in_every_group() {
        let mut cache = KvCache::new(16, true);
        let tokens: Vec<u32> = (0..8).collect();
        let (mut a, mut b) = (computed(&tokens, &mut cache), computed(&tokens, &mut cache));
        assert!(a.held().eq(b.held()));
        assert_eq!((cache.num_free(), cache.num_findable()), (12, 4));
        a.release(&mut cache);
        b.release(&mut cache);
        // The second group's second block becomes the latest that was used.
        let found = cache.find(&chain(&tokens), &tokens, 99);
        let latest = cache.companion(found[1], 1).unwrap();
        cache.retain(latest);
        cache.free(latest);
        // What goes with an evicted block can be found no more: its first block goes alone, the
        // first group's second one takes the latest along.
        let take = |num: usize, cache: &mut KvCache| {
            (0..num).for_each(|_| assert!(cache.allocate().is_some()));
            (cache.num_free(), cache.num_findable(), cache.check_integrity())
        };
        assert_eq!(take(13, &mut cache), (0, 3, Ok(())));
        assert_eq!(take(1, &mut cache), (1, 1, Ok(())));
    }

    #[test]
    fn a_follower_shares_what_it_sees() {
        let mut cache = KvCache::new(20, false);
        let mut leader = computed(&(0..18).collect::<Vec<_>>(), &mut cache);
        leader.slide(18, &mut cache).unwrap();
        let starts = leader.shared(17).unwrap();
        assert_eq!(starts.iter().map(|start| start.num_dropped).collect::<Vec<_>>(), [0, 12]);
        let mut follower = tables();
        follower.adopt(&starts, &mut cache);
        let copies = follower.make_private(17, &mut cache).unwrap();
        let last = |tables: &GroupTables| {
            tables.iter().map(|table| *table.blocks().last().unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(copies.iter().map(|copy| copy.from).collect::<Vec<_>>(), last(&leader));
        assert_eq!(copies.iter().map(|copy| copy.to).collect::<Vec<_>>(), last(&follower));
        leader.slide(22, &mut cache).unwrap();
        assert!(leader.shared(17).is_none(), "the block of positions 12 to 15 is gone");
    }
}
