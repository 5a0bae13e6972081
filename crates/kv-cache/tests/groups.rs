//! Random use of one pool by sequences of a model with several layer groups: what each group's
//! table holds is what its layers see, whoever computed it, and blocks add up.
//!
//! The model knows of every block which group's it is and the whole text up to its end. Some blocks
//! are copied elsewhere, and sequences begin with what is there, too.

#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

use std::collections::HashMap;

use inflight_kv_cache::{
    BlockId, BlockName, GroupTables, KvCache, PrefixChain, PrefixKey, Retention,
};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Call {
    /// A sequence begins with what is here and elsewhere of these tokens.
    Begin { tokens: Vec<u32> },
    /// A sequence computes its next row.
    Row { sequence: usize, len: usize },
    /// A sequence has more tokens.
    Extend { sequence: usize, tokens: Vec<u32> },
    /// A sequence ends.
    Release { sequence: usize },
    /// What is evicted next is copied elsewhere.
    Copy,
    /// The oldest copy was made.
    EndCopy,
}

/// Few tokens, so that prefixes are met again.
fn tokens(len: std::ops::Range<usize>) -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(prop_oneof![4 => Just(1u32), 1 => Just(2)], len)
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let sequence = 0usize..6;
    let call = prop_oneof![
        4 => tokens(1..40).prop_map(|tokens| Call::Begin { tokens }),
        12 => (sequence.clone(), 1usize..9)
            .prop_map(|(sequence, len)| Call::Row { sequence, len }),
        3 => (sequence.clone(), tokens(1..20))
            .prop_map(|(sequence, tokens)| Call::Extend { sequence, tokens }),
        3 => sequence.prop_map(|sequence| Call::Release { sequence }),
        4 => Just(Call::Copy),
        4 => Just(Call::EndCopy),
    ];
    prop::collection::vec(call, 1..120)
}

/// How far back each group looks, the first one the furthest.
fn windows() -> impl Strategy<Value = Vec<Option<usize>>> {
    let window = || prop_oneof![1 => Just(None), 3 => (1usize..24).prop_map(Some)];
    prop::collection::vec(window(), 1..4).prop_map(|mut windows| {
        windows.sort_by_key(|window| std::cmp::Reverse(window.unwrap_or(usize::MAX)));
        windows
    })
}

/// What a full block holds: of which group, and the text up to its end.
type Content = (usize, Vec<u32>);

struct Sequence {
    tokens: Vec<u32>,
    chain: PrefixChain,
    tables: GroupTables,
    num_computed: usize,
}

struct World {
    cache: KvCache,
    block_size: usize,
    windows: Vec<Option<usize>>,
    /// Most tokens of a row.
    most: usize,
    sequences: Vec<Sequence>,
    /// By block; `None`: it is not full, or holds what nobody may read.
    contents: Vec<Option<Content>>,
    copies: Vec<(BlockId, BlockName)>,
    elsewhere: HashMap<BlockName, Content>,
    num_moved: usize,
}

impl World {
    fn chain(&self, tokens: &[u32]) -> PrefixChain {
        let mut chain = PrefixChain::new(PrefixKey::default(), self.block_size).with_names();
        chain.extend(tokens);
        chain
    }

    fn begin(&mut self, tokens: Vec<u32>) {
        let retention = |window: Option<usize>| {
            window.map_or(Retention::All, |window| Retention::Window { window })
        };
        let mut tables =
            GroupTables::new(self.block_size, retention(self.windows[0]), &self.windows[1..]);
        let chain = self.chain(&tokens);
        let found = self.cache.find(&chain, &tokens, (tokens.len() - 1) / self.block_size);
        let names = &chain.names()[..(tokens.len() - 1) / self.block_size];
        let is_there = |name: &BlockName| self.elsewhere.contains_key(name);
        let num_behind = names[found.len()..].iter().take_while(|name| is_there(name)).count();
        let is_elsewhere = |group, i: usize| is_there(&names[i].of_group(group));
        let num_first = found.len() + num_behind;
        let num_blocks = tables.num_usable(&found, num_first, is_elsewhere, &self.cache);
        let starts = tables.found(&found, num_blocks, &self.cache);
        tables.adopt(&starts, &mut self.cache);
        let num_computed = num_blocks * self.block_size;
        let has_room = tables.grow(num_computed, (tokens.len(), self.most), &mut self.cache);
        if has_room.is_ok() {
            for (group, (table, start)) in tables.iter().zip(&starts).enumerate() {
                let behind = names[..num_blocks].iter().skip(start.end(self.block_size));
                for (name, &to) in behind.zip(&table.blocks()[start.blocks.len()..]) {
                    let content = self.elsewhere[&name.of_group(group)].clone();
                    self.contents[to.index()] = Some(content);
                    self.num_moved += 1;
                }
            }
        }
        self.sequences.push(Sequence { tokens, chain, tables, num_computed });
        if has_room.is_err() {
            self.release(self.sequences.len() - 1);
        }
    }

    /// Computes a row, or has the sequence give way if there is no room.
    fn row(&mut self, index: usize, len: usize) {
        let Sequence { tokens, tables, num_computed, .. } = &mut self.sequences[index];
        let start = *num_computed;
        if start == tokens.len() {
            return;
        }
        let slides = tables.slide(start, &mut self.cache);
        let grows = tables.grow(start, (tokens.len(), self.most), &mut self.cache);
        if slides.and(grows).is_err() {
            self.release(index);
            return;
        }
        self.check_context(index);
        let Sequence { tokens, chain, tables, num_computed } = &mut self.sequences[index];
        let len = len.min(self.most).min(tokens.len() - start).min(tables.capacity() - start);
        assert!(len > 0, "there is room for a row");
        let held: Vec<usize> = tables.iter().map(|table| table.blocks().len()).collect();
        let most_blocks: Vec<usize> = tables.most_blocks(tokens.len(), self.most).collect();
        assert!(held.iter().zip(&most_blocks).all(|(held, most)| held <= most));
        for (group, table) in tables.iter().enumerate() {
            for position in start..start + len {
                let block = BlockId(table.slot(position) / self.block_size as u32);
                assert_eq!(self.cache.ref_count(block), 1, "what is written is nobody else's");
                let is_full = (position + 1).is_multiple_of(self.block_size);
                let content = is_full.then(|| (group, tokens[..=position].to_vec()));
                self.contents[block.index()] = content;
            }
        }
        *num_computed += len;
        tables.cache_full_blocks(*num_computed, chain, tokens, &mut self.cache);
        self.check_context(index);
    }

    /// What the tables hold is the sequence's own text, and all that its next row sees.
    fn check_context(&self, index: usize) {
        let Sequence { tokens, tables, num_computed, .. } = &self.sequences[index];
        for (group, (table, window)) in tables.iter().zip(&self.windows).enumerate() {
            let unseen = window.map_or(0, |window| (num_computed + 1).saturating_sub(window));
            assert!(table.num_dropped() <= unseen, "group {group} has dropped what is seen");
            for number in table.num_dropped() / self.block_size..num_computed / self.block_size {
                let block = table.blocks()[number - table.num_dropped() / self.block_size];
                let text = tokens[..(number + 1) * self.block_size].to_vec();
                assert_eq!(self.contents[block.index()], Some((group, text)), "block {number}");
            }
        }
    }

    fn release(&mut self, index: usize) {
        self.sequences.remove(index).tables.release(&mut self.cache);
    }

    fn copy(&mut self) {
        let Some((block, name)) = self.cache.offer() else { return };
        // What was used since its copy began is offered again.
        let is_copied = self.copies.iter().any(|(copied, _)| *copied == block);
        if !is_copied && !self.elsewhere.contains_key(&name) {
            self.cache.begin_copy(block);
            self.copies.push((block, name));
        }
    }

    /// Nobody has written to the block since the copy began.
    fn end_copy(&mut self) {
        if self.copies.is_empty() {
            return;
        }
        let (block, name) = self.copies.remove(0);
        let content = self.contents[block.index()].clone().expect("what can be found is full");
        let known = self.elsewhere.insert(name, content.clone());
        assert!(known.is_none_or(|known| known == content), "a name has one content");
        assert_eq!(name, self.chain(&content.1).names().last().unwrap().of_group(content.0));
        self.cache.end_copy(block);
    }

    fn apply(&mut self, call: &Call) {
        let len = self.sequences.len();
        let pick = |sequence: usize| (len > 0).then(|| sequence % len);
        match call {
            Call::Begin { tokens } => self.begin(tokens.clone()),
            Call::Row { sequence, len } => {
                pick(*sequence).into_iter().for_each(|index| self.row(index, *len));
            }
            Call::Extend { sequence, tokens } => {
                if let Some(index) = pick(*sequence) {
                    let sequence = &mut self.sequences[index];
                    sequence.tokens.extend(tokens);
                    sequence.chain.extend(&sequence.tokens);
                }
            }
            Call::Release { sequence } => {
                pick(*sequence).into_iter().for_each(|index| self.release(index));
            }
            Call::Copy => self.copy(),
            Call::EndCopy => self.end_copy(),
        }
    }

    /// References are those of tables, copies and the cache, and every block is in one state.
    fn check(&self) {
        self.cache.check_integrity().expect("the cache is sound after every call");
        let mut holders = vec![0; self.cache.num_total()];
        let held = self.sequences.iter().flat_map(|sequence| sequence.tables.held());
        held.for_each(|block| holders[block.index()] += 1);
        let (mut num_free, mut num_available) = (0, 0);
        for (block, held) in (0..).map(BlockId).zip(holders) {
            let is_copied = self.copies.iter().any(|(copied, _)| *copied == block);
            let is_cached = self.cache.is_cached(block);
            let expected = held + u32::from(is_copied) + u32::from(is_cached);
            assert_eq!(self.cache.ref_count(block), expected, "block {block}");
            num_free += usize::from(expected == 0);
            num_available += usize::from(held == 0 && !is_copied);
        }
        assert_eq!(self.cache.num_free(), num_free);
        assert_eq!(self.cache.num_available(), num_available);
    }
}

/// Applies calls to a pool that has room for somewhat more than one sequence; how many blocks were
/// moved here.
fn run(
    calls: &[Call],
    (num_blocks, block_size, most): (u32, usize, usize),
    windows: Vec<Option<usize>>,
) -> usize {
    let num_blocks = num_blocks * windows.len() as u32;
    let mut world = World {
        cache: KvCache::new(num_blocks, true),
        block_size,
        windows,
        most,
        sequences: Vec::new(),
        contents: vec![None; num_blocks as usize],
        copies: Vec::new(),
        elsewhere: HashMap::new(),
        num_moved: 0,
    };
    for call in calls {
        world.apply(call);
        world.check();
    }
    while !world.sequences.is_empty() {
        world.release(0);
        world.check();
    }
    while !world.copies.is_empty() {
        world.end_copy();
        world.check();
    }
    assert_eq!(world.cache.num_available(), world.cache.num_total());
    world.num_moved
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn every_group_holds_what_its_layers_see(
        calls in calls(),
        sizes in (4u32..16, 1usize..6, 1usize..9),
        windows in windows(),
    ) {
        run(&calls, sizes, windows);
    }
}

/// A text that was computed and comes back: 32 tokens in eight blocks of the first group and two of
/// the other, whose window of six has the tokens from 27 on. The text between takes all 18 blocks:
/// eight of each group that can be found, and two that are partly filled.
#[test]
fn what_was_copied_elsewhere_comes_back() {
    let text = |token: u32| Call::Begin { tokens: vec![token; 33] };
    let rows = || (0..9).map(|_| Call::Row { sequence: 0, len: 4 });
    let copies = || (0..40).flat_map(|_| [Call::Copy, Call::EndCopy]);
    let turn = |token| {
        let end = [Call::Release { sequence: 0 }];
        [text(token)].into_iter().chain(rows()).chain(end).chain(copies()).collect::<Vec<_>>()
    };
    let calls = [turn(1), turn(2), turn(1)].concat();
    assert_eq!(run(&calls, (9, 4, 4), vec![None, Some(6)]), 8 + 2);
}
