//! Random use of one cache by many tables, checked against a plain model after every call.
//!
//! The model keeps for every cached block the whole text up to its end, and finds and evicts by
//! looking at all of them.

use std::collections::BTreeMap;

use inflight_kv_cache::{
    BlockId, BlockTable, KvCache, KvCacheError, PrefixChain, PrefixKey, TableStart, blocks_for,
};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Call {
    /// A sequence begins with these tokens, of which it takes what can be found.
    Begin {
        key: u32,
        tokens: Vec<u32>,
    },
    /// A sequence grows.
    Extend {
        table: usize,
        tokens: Vec<u32>,
    },
    /// Its full blocks may be found.
    Cache {
        table: usize,
        num_tokens: usize,
    },
    /// A second sequence begins with a sequence's first tokens and writes the last of them.
    Share {
        table: usize,
        num_tokens: usize,
    },
    Release {
        table: usize,
    },
}

/// Few tokens and keys, so that prefixes are met again.
fn tokens(len: std::ops::Range<usize>) -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(prop_oneof![3 => Just(1u32), 1 => Just(2)], len)
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let table = 0usize..8;
    let call = prop_oneof![
        3 => (0u32..2, tokens(1..30)).prop_map(|(key, tokens)| Call::Begin { key, tokens }),
        3 => (table.clone(), tokens(1..8))
            .prop_map(|(table, tokens)| Call::Extend { table, tokens }),
        4 => (table.clone(), 0usize..40)
            .prop_map(|(table, num_tokens)| Call::Cache { table, num_tokens }),
        2 => (table.clone(), 1usize..40)
            .prop_map(|(table, num_tokens)| Call::Share { table, num_tokens }),
        3 => table.prop_map(|table| Call::Release { table }),
    ];
    prop::collection::vec(call, 1..80)
}

/// All that a block's content depends on.
type Prefix = (u32, Vec<u32>);

struct Sequence {
    key: u32,
    tokens: Vec<u32>,
    table: BlockTable,
    chain: PrefixChain,
}

struct World {
    cache: KvCache,
    block_size: usize,
    sequences: Vec<Sequence>,
    /// What the model says of every cached block.
    cached: BTreeMap<BlockId, Prefix>,
    /// When the last table let go of a block, counted in calls to `free`.
    let_go: BTreeMap<BlockId, u64>,
    clock: u64,
}

impl World {
    fn chain(&self, key: u32, tokens: &[u32]) -> PrefixChain {
        let salt = (key > 0).then(|| key.to_string().into());
        let mut chain =
            PrefixChain::new(PrefixKey { salt, ..PrefixKey::default() }, self.block_size);
        chain.extend(tokens);
        chain
    }

    fn holders(&self) -> Vec<u32> {
        let mut holders = vec![0; self.cache.num_total()];
        let tables = self.sequences.iter().map(|sequence| &sequence.table);
        tables.flat_map(BlockTable::blocks).for_each(|block| holders[block.index()] += 1);
        holders
    }

    /// Takes from the model what allocating `num_blocks` must evict: always the block without
    /// cached descendant that was let go of first.
    fn evict(&mut self, num_blocks: usize) -> Vec<BlockId> {
        let holders = self.holders();
        let evict_one = |_| {
            let is_leaf = |prefix: &Prefix| {
                let follows = |other: &Prefix| {
                    other.0 == prefix.0
                        && other.1.len() > prefix.1.len()
                        && other.1.starts_with(&prefix.1)
                };
                !self.cached.values().any(follows)
            };
            let unheld = self.cached.iter().filter(|(block, _)| holders[block.index()] == 0);
            let leaves = unheld.filter(|(_, prefix)| is_leaf(prefix)).map(|(&block, _)| block);
            let oldest = leaves.min_by_key(|block| self.let_go[block]);
            let oldest = oldest.expect("no more is allocated than is available");
            self.cached.remove(&oldest);
            oldest
        };
        (0..num_blocks).map(evict_one).collect()
    }

    fn find(&self, key: u32, tokens: &[u32], max_blocks: usize) -> usize {
        let known = |&num_blocks: &usize| {
            let prefix = (key, tokens[..num_blocks * self.block_size].to_vec());
            self.cached.values().any(|cached| *cached == prefix)
        };
        let num_full = tokens.len() / self.block_size;
        (1..=num_full.min(max_blocks)).take_while(known).count()
    }

    fn begin(&mut self, key: u32, tokens: Vec<u32>) {
        let (chain, mut table) = (self.chain(key, &tokens), BlockTable::new(self.block_size));
        let max_blocks = (tokens.len() - 1) / self.block_size;
        let found = self.cache.find(&chain, &tokens, max_blocks);
        assert_eq!(found.len(), self.find(key, &tokens, max_blocks));
        for (i, block) in found.iter().enumerate() {
            assert_eq!(self.cached[block], (key, tokens[..(i + 1) * self.block_size].to_vec()));
        }
        table.adopt(&TableStart::found(found, 0), &mut self.cache);
        self.sequences.push(Sequence { key, tokens, table, chain });
        let last = self.sequences.len() - 1;
        if !self.grow(last) {
            self.release(last);
        }
    }

    /// Blocks for all tokens of a sequence; whether there were enough.
    fn grow(&mut self, index: usize) -> bool {
        let (free, available) = (self.cache.num_free(), self.cache.num_available());
        let before = self.sequences[index].table.blocks().to_vec();
        let len = self.sequences[index].tokens.len();
        let needed = blocks_for(len, self.block_size) - before.len();
        let evicted = self.evict(if needed > available { 0 } else { needed.saturating_sub(free) });
        let table = &mut self.sequences[index].table;
        let result = table.grow_to(len, &mut self.cache);
        assert_eq!(table.blocks()[..before.len()], before, "old blocks stay where they were");
        if needed > available {
            assert_eq!(result, Err(KvCacheError::OutOfBlocks { needed, free: available }));
            assert_eq!(table.blocks().len(), before.len());
            return false;
        }
        assert_eq!((result, table.blocks().len()), (Ok(()), before.len() + needed));
        assert!(table.blocks().ends_with(&evicted), "free blocks first, then the oldest leaves");
        true
    }

    fn extend(&mut self, index: usize, tokens: &[u32]) {
        let sequence = &mut self.sequences[index];
        sequence.tokens.extend(tokens);
        sequence.chain.extend(&sequence.tokens);
        if !self.grow(index) {
            self.release(index);
        }
    }

    fn cache_blocks(&mut self, index: usize, num_tokens: usize) {
        let Sequence { key, tokens, table, chain } = &mut self.sequences[index];
        let num_full = num_tokens.min(tokens.len()) / self.block_size;
        table.cache_full_blocks(num_tokens, chain, tokens, &mut self.cache);
        // It stops only at a block that another sequence holds, too.
        let is_held = |&block: &BlockId| self.cache.ref_count(block) > 1;
        let next = table.blocks().get(table.num_cached());
        assert!(table.num_cached() >= num_full || next.is_some_and(is_held));
        for i in 0..table.num_cached() {
            let prefix = (*key, tokens[..(i + 1) * self.block_size].to_vec());
            let known = self.cached.entry(table.blocks()[i]).or_insert_with(|| prefix.clone());
            assert_eq!(*known, prefix);
        }
    }

    fn share(&mut self, index: usize, num_tokens: usize) {
        let num_tokens = num_tokens.min(self.sequences[index].tokens.len());
        let Sequence { key, tokens, table, .. } = &self.sequences[index];
        let (key, tokens) = (*key, tokens[..num_tokens].to_vec());
        let start = table.shared(0..num_tokens).expect("nothing was dropped");
        let (chain, mut table) = (self.chain(key, &tokens), BlockTable::new(self.block_size));
        table.adopt(&start, &mut self.cache);
        assert_eq!(table.blocks().len(), blocks_for(num_tokens, self.block_size));
        self.sequences.push(Sequence { key, tokens, table, chain });
        let (free, available) = (self.cache.num_free(), self.cache.num_available());
        let evicted = self.evict(usize::from(free == 0 && available > 0));
        let sequence = self.sequences.last_mut().expect("just pushed");
        match sequence.table.make_private(num_tokens - 1, &mut self.cache) {
            Err(error) => {
                assert_eq!(
                    (error, available),
                    (KvCacheError::OutOfBlocks { needed: 1, free: 0 }, 0)
                );
                self.release(self.sequences.len() - 1);
            }
            Ok(copy) => {
                let copy = copy.expect("the other sequence holds it, too");
                assert_eq!(sequence.table.blocks().last(), Some(&copy.to));
                assert!(evicted.is_empty() || evicted == [copy.to]);
                assert!(sequence.table.num_cached() < sequence.table.blocks().len());
                self.cache.free(copy.from);
            }
        }
    }

    fn release(&mut self, index: usize) {
        let mut sequence = self.sequences.swap_remove(index);
        let blocks = sequence.table.blocks().to_vec();
        sequence.table.release(&mut self.cache);
        for block in blocks.into_iter().rev() {
            self.clock += 1;
            self.let_go.insert(block, self.clock);
        }
    }

    fn apply(&mut self, call: &Call) {
        let pick = |index: usize| {
            let num = self.sequences.len();
            (num > 0).then(|| index % num)
        };
        match call {
            Call::Begin { key, tokens } => self.begin(*key, tokens.clone()),
            Call::Extend { table, tokens } => {
                pick(*table).into_iter().for_each(|i| self.extend(i, tokens));
            }
            Call::Cache { table, num_tokens } => {
                pick(*table).into_iter().for_each(|i| self.cache_blocks(i, *num_tokens));
            }
            Call::Share { table, num_tokens } => {
                pick(*table).into_iter().for_each(|i| self.share(i, *num_tokens));
            }
            Call::Release { table } => pick(*table).into_iter().for_each(|i| self.release(i)),
        }
    }

    /// Each block is in one state, counts match tables and cache, and nobody shares what he writes.
    fn check(&self) {
        self.cache.check_integrity().expect("the cache is sound after every call");
        let holders = self.holders();
        for (block, &held) in (0..).map(BlockId).zip(&holders) {
            let is_cached = self.cached.contains_key(&block);
            assert_eq!(self.cache.is_cached(block), is_cached, "block {block}");
            assert_eq!(self.cache.ref_count(block), held + u32::from(is_cached), "block {block}");
        }
        let owned = holders.iter().filter(|&&held| held > 0).count();
        let (free, cached) = (self.cache.num_free(), self.cache.num_cached());
        assert_eq!(free + owned + cached, self.cache.num_total());
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 3000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_cache_agrees_with_a_plain_model(
        calls in calls(),
        num_blocks in 1u32..24,
        block_size in 1usize..6,
    ) {
        let mut world = World {
            cache: KvCache::new(num_blocks, true),
            block_size,
            sequences: Vec::new(),
            cached: BTreeMap::new(),
            let_go: BTreeMap::new(),
            clock: 0,
        };
        for call in &calls {
            world.apply(call);
            world.check();
        }
        while !world.sequences.is_empty() {
            world.release(0);
            world.check();
        }
        prop_assert_eq!(world.cache.num_available(), world.cache.num_total());
    }
}
