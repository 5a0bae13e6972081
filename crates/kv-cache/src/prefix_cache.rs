//! Full blocks that may be found again, by the tokens they hold and all tokens before.
//!
//! The blocks form trees, one for each key; a child's tokens follow its parent's:
//!
//! ```text
//!   key ─┬─ [ 1 2 3 4 ] ─┬─ [ 5 6 7 8 ] ── [ 9 .. ]
//!        │               └─ [ 5 6 0 0 ]
//!        └─ [ 7 7 7 7 ]
//! ```
//!
//! Most tables hold a prefix of a path, and let go of its end first: every descendant is in front
//! of its ancestors in the order of eviction, and the least recently used block is a leaf. A table
//! that keeps only its latest tokens lets go of ancestors first. When such a one is evicted,
//! nothing that follows it can be found any more, and it is forgotten, too, held or not.
//!
//! Where a model has several layer groups, the tree is the first group's. Blocks that other groups
//! have of the same tokens are its blocks' *companions*: they are found through it, come and go one
//! by one, and go with it at the latest.

use std::collections::HashMap;

use crate::{BlockHash, BlockId, BlockName, KvCacheError, PrefixChain, PrefixKey, lru::LruList};

/// The blocks that can be found, and those of them that nobody else holds, oldest first.
#[derive(Debug, Clone)]
pub(crate) struct PrefixCache {
    /// Looked up and never walked, so that its order cannot matter.
    by_hash: HashMap<BlockHash, BlockId>,
    /// Indexed by block id.
    nodes: Vec<Option<Node>>,
    /// Indexed by block id: whose companion it is.
    companions: Vec<Option<Companion>>,
    num_companions: usize,
    /// Blocks that only the cache holds.
    unheld: LruList,
}

/// What a block of another group than the first goes with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Companion {
    of: BlockId,
    group: usize,
}

/// A block in the cache.
#[derive(Debug, Clone)]
struct Node {
    hash: BlockHash,
    parent: Parent,
    tokens: Box<[u32]>,
    num_children: u32,
    /// Its name outside the pool, if it has one.
    name: Option<BlockName>,
    /// Of the groups behind the first, as far as some block was ever attached.
    companions: Vec<Option<BlockId>>,
}

/// A block that was forgotten.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Evicted {
    pub(crate) block: BlockId,
    /// Whether it was offered to be kept elsewhere.
    pub(crate) was_offered: bool,
    /// Whether nobody else held it.
    pub(crate) was_unheld: bool,
}

/// What a block's tokens follow.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Parent {
    Start(PrefixKey),
    Block(BlockId),
}

/// What became of a block that was to be found again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Insertion {
    /// It can be found now.
    New,
    /// Another block with the same content is found.
    Known(BlockId),
    /// Its hash is another content's: neither it nor what follows it can be found.
    Collision,
    /// Another table holds it, perhaps after other blocks.
    Shared,
}

impl PrefixCache {
    pub(crate) fn new(num_blocks: u32) -> Self {
        Self {
            by_hash: HashMap::new(),
            nodes: vec![None; num_blocks as usize],
            companions: vec![None; num_blocks as usize],
            num_companions: 0,
            unheld: LruList::new(num_blocks),
        }
    }

    pub(crate) fn contains(&self, block: BlockId) -> bool {
        self.nodes[block.index()].is_some() || self.companions[block.index()].is_some()
    }

    /// Number of blocks that can be found.
    pub(crate) fn len(&self) -> usize {
        self.by_hash.len() + self.num_companions
    }

    /// Number of blocks that only the cache holds.
    pub(crate) fn num_unheld(&self) -> usize {
        self.unheld.len()
    }

    pub(crate) fn is_unheld(&self, block: BlockId) -> bool {
        self.unheld.contains(block)
    }

    /// The longest run of the chain's blocks, from its start, that can be found; at most
    /// `max_blocks` of them. `tokens` are the sequence's.
    pub(crate) fn find(
        &self,
        chain: &PrefixChain,
        tokens: &[u32],
        max_blocks: usize,
    ) -> Vec<BlockId> {
        let mut found = Vec::new();
        let blocks = tokens.chunks_exact(chain.block_size());
        for (&hash, tokens) in chain.hashes().iter().zip(blocks).take(max_blocks) {
            let parent = parent(found.last(), chain);
            let Some(&block) = self.by_hash.get(&hash) else { break };
            if !self.holds(block, &parent, tokens) {
                break;
            }
            found.push(block);
        }
        found
    }

    /// Whether some content has the hash of number `index` of the chain's blocks.
    pub(crate) fn knows(&self, index: usize, chain: &PrefixChain) -> bool {
        self.by_hash.contains_key(&chain.hashes()[index])
    }

    /// Lets `block` be found: number `index` of the chain's, after `before`, with these tokens.
    pub(crate) fn insert(
        &mut self,
        block: BlockId,
        before: Option<&BlockId>,
        (chain, index): (&PrefixChain, usize),
        tokens: &[u32],
    ) -> Insertion {
        let (hash, parent) = (chain.hashes()[index], parent(before, chain));
        if let Some(&known) = self.by_hash.get(&hash) {
            let is_same = self.holds(known, &parent, tokens);
            return if is_same { Insertion::Known(known) } else { Insertion::Collision };
        }
        if let Parent::Block(before) = parent {
            let before = self.nodes[before.index()].as_mut();
            before.expect("a block follows one that can be found").num_children += 1;
        }
        self.by_hash.insert(hash, block);
        let name = chain.names().get(index).copied();
        let companions = Vec::new();
        let node = Node { hash, parent, tokens: tokens.into(), num_children: 0, name, companions };
        let previous = self.nodes[block.index()].replace(node);
        assert!(previous.is_none(), "block {block} was in the prefix cache already");
        Insertion::New
    }

    /// The block that `group` has of the same tokens as `of`.
    pub(crate) fn companion(&self, of: BlockId, group: usize) -> Option<BlockId> {
        let node = self.nodes[of.index()].as_ref()?;
        node.companions.get(group.checked_sub(1)?).copied().flatten()
    }

    /// Lets `block`, of another group than the first, be found through `of`. `None` if nobody can
    /// find that one, or if `block` is found through another.
    pub(crate) fn attach(
        &mut self,
        block: BlockId,
        of: BlockId,
        group: usize,
    ) -> Option<Insertion> {
        if let Some(known) = self.companion(of, group) {
            return Some(Insertion::Known(known));
        }
        if self.contains(block) {
            return None;
        }
        let node = self.nodes[of.index()].as_mut()?;
        let index = group - 1;
        node.companions.resize(node.companions.len().max(group), None);
        node.companions[index] = Some(block);
        self.companions[block.index()] = Some(Companion { of, group });
        self.num_companions += 1;
        Some(Insertion::New)
    }

    /// Forgets a companion alone.
    fn detach(&mut self, block: BlockId) -> Evicted {
        let (was_offered, was_unheld) = (self.unheld.is_passed(block), self.is_unheld(block));
        self.take(block);
        let Companion { of, group } =
            self.companions[block.index()].take().expect("only called for companions");
        if let Some(node) = &mut self.nodes[of.index()] {
            node.companions[group - 1] = None;
        }
        self.num_companions -= 1;
        Evicted { block, was_offered, was_unheld }
    }

    /// Notes that a table holds a block again.
    pub(crate) fn take(&mut self, block: BlockId) {
        if self.unheld.contains(block) {
            self.unheld.remove(block);
        }
    }

    /// Notes that no table holds a block any more.
    pub(crate) fn let_go(&mut self, block: BlockId) {
        self.unheld.push(block);
    }

    /// The block that will be evicted first of those that were not offered yet, and its name.
    pub(crate) fn offer(&mut self) -> Option<(BlockId, BlockName)> {
        loop {
            let block = self.unheld.pass()?;
            if let Some(name) = self.name(block) {
                return Some((block, name));
            }
        }
    }

    /// The name of a block that can be found, if it has one.
    fn name(&self, block: BlockId) -> Option<BlockName> {
        let companion = self.companions[block.index()];
        let (of, group) = companion.map_or((block, 0), |Companion { of, group }| (of, group));
        Some(self.nodes[of.index()].as_ref()?.name?.of_group(group))
    }

    /// Number of blocks that only the cache holds and that were offered.
    pub(crate) fn num_offered(&self) -> usize {
        self.unheld.num_passed()
    }

    /// Forgets the least recently used block that no table holds, and with it all that follow it:
    /// the orphans. A companion goes alone.
    pub(crate) fn evict(&mut self, orphans: &mut Vec<Evicted>) -> Option<Evicted> {
        let oldest = self.unheld.iter().next()?;
        if self.companions[oldest.index()].is_some() {
            return Some(self.detach(oldest));
        }
        let node = self.nodes[oldest.index()].as_ref().expect("an unheld block can be found");
        if node.num_children > 0 {
            for block in self.descendants(oldest) {
                let evicted = self.forget(block, orphans);
                orphans.push(evicted);
            }
        }
        Some(self.forget(oldest, orphans))
    }

    /// Forgets a block of the first group; its companions become orphans.
    fn forget(&mut self, block: BlockId, orphans: &mut Vec<Evicted>) -> Evicted {
        let (was_offered, was_unheld) = (self.unheld.is_passed(block), self.is_unheld(block));
        self.take(block);
        let node = self.nodes[block.index()].take().expect("it could be found");
        self.by_hash.remove(&node.hash);
        if let Parent::Block(parent) = node.parent
            && let Some(parent) = &mut self.nodes[parent.index()]
        {
            parent.num_children -= 1;
        }
        for companion in node.companions.into_iter().flatten() {
            orphans.push(self.detach(companion));
        }
        Evicted { block, was_offered, was_unheld }
    }

    /// All blocks that follow `block`, by a walk over all blocks.
    fn descendants(&self, block: BlockId) -> Vec<BlockId> {
        let mut follows = vec![None; self.nodes.len()];
        follows[block.index()] = Some(true);
        let (mut found, mut path) = (Vec::new(), Vec::new());
        for (start, _) in self.blocks() {
            let mut at = start;
            let answer = loop {
                if let Some(known) = follows[at.index()] {
                    break known;
                }
                path.push(at);
                match self.nodes[at.index()].as_ref().map(|node| &node.parent) {
                    Some(Parent::Block(parent)) => at = *parent,
                    Some(Parent::Start(_)) | None => break false,
                }
            };
            for at in path.drain(..) {
                follows[at.index()] = Some(answer);
                found.extend(answer.then_some(at));
            }
        }
        found
    }

    fn holds(&self, block: BlockId, parent: &Parent, tokens: &[u32]) -> bool {
        let node = self.nodes[block.index()].as_ref().expect("a found block has a node");
        node.parent == *parent && *node.tokens == *tokens
    }

    /// Checks that hashes and nodes agree, and that parents are there and know their children.
    pub(crate) fn check_integrity(&self) -> Result<(), KvCacheError> {
        let mut num_children = vec![0; self.nodes.len()];
        for (block, node) in self.blocks() {
            if self.by_hash.get(&node.hash) != Some(&block) {
                return Err(KvCacheError::LostPrefix { block });
            }
            if let Parent::Block(parent) = node.parent {
                num_children[parent.index()] += 1;
                if !self.contains(parent) {
                    return Err(KvCacheError::OrphanBlock { block });
                }
            }
        }
        let wrong = |(block, node): &(BlockId, &Node)| {
            node.num_children != num_children[block.index()] || self.len() > self.nodes.len()
        };
        let lost = self.blocks().find(wrong).map(|(block, _)| block);
        let unknown = self.unheld.iter().find(|&block| !self.contains(block));
        match lost.or(unknown).or_else(|| self.lost_companion()) {
            Some(block) => Err(KvCacheError::LostPrefix { block }),
            None => Ok(()),
        }
    }

    /// A companion that cannot be found through the block it goes with, or the other way round.
    fn lost_companion(&self) -> Option<BlockId> {
        let known = (0u32..).map(BlockId).zip(&self.companions);
        let mut known = known.filter_map(|(block, companion)| Some((block, (*companion)?)));
        let lost = known.find(|(block, Companion { of, group })| {
            self.companion(*of, *group) != Some(*block) || self.nodes[block.index()].is_some()
        });
        let num_listed = |(_, node): (BlockId, &Node)| node.companions.iter().flatten().count();
        let num_listed: usize = self.blocks().map(num_listed).sum();
        let miscounted = (num_listed != self.num_companions).then_some(BlockId(0));
        lost.map(|(block, _)| block).or(miscounted)
    }

    fn blocks(&self) -> impl Iterator<Item = (BlockId, &Node)> {
        let ids = (0u32..).map(BlockId);
        ids.zip(&self.nodes).filter_map(|(block, node)| Some((block, node.as_ref()?)))
    }
}

fn parent(before: Option<&BlockId>, chain: &PrefixChain) -> Parent {
    before.map_or_else(|| Parent::Start(chain.key().clone()), |&block| Parent::Block(block))
}
