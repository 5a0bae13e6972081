//! Blocks of host memory: those of sequences that gave way, and cold prefixes.

use std::{collections::HashMap, fmt};

use crate::{BlockId, BlockName, BlockPool, KvCacheError, lru::LruList};

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
///
/// Blocks that no sequence needs may keep what was evicted, or soon will be, from the prefix cache:
///
/// ```text
///            keep                  a move has filled it
///   free ───────────► being filled ────────────────────► kept, can be found
///    ▲                                                        │
///    └── the least recently used, when no other is free ◄─────┘
/// ```
///
/// A kept block has one reference of its own besides those of moves. Sequences that give way come
/// first: for them kept blocks are forgotten.
#[derive(Debug, Clone)]
pub struct SwapSpace {
    pool: BlockPool,
    /// Looked up and never walked, so that its order cannot matter.
    by_name: HashMap<BlockName, HostBlockId>,
    /// Indexed by host block: what it keeps.
    kept: Vec<Option<Kept>>,
    /// Kept blocks that can be found and that no move uses, oldest first.
    unheld: LruList,
}

#[derive(Debug, Clone, Copy)]
struct Kept {
    name: BlockName,
    is_filled: bool,
}

/// What the host knows of a block's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnHost {
    /// Nothing.
    Missing,
    /// It is on its way.
    Arriving,
    /// It is there.
    Kept(HostBlockId),
}

impl SwapSpace {
    /// `num_blocks` free blocks.
    #[must_use]
    pub fn new(num_blocks: u32) -> Self {
        Self {
            pool: BlockPool::new(num_blocks),
            by_name: HashMap::new(),
            kept: vec![None; num_blocks as usize],
            unheld: LruList::new(num_blocks),
        }
    }

    /// Number of blocks, free or not.
    #[must_use]
    pub fn num_total(&self) -> usize {
        self.pool.num_total()
    }

    /// Number of blocks that [`allocate`](Self::allocate) can give: free ones, and kept ones that
    /// no move uses.
    #[must_use]
    pub fn num_available(&self) -> usize {
        self.pool.num_free() + self.unheld.len()
    }

    /// Number of blocks that keep a prefix, those included that are being filled.
    #[must_use]
    pub fn num_kept(&self) -> usize {
        self.by_name.len()
    }

    /// Number of references to a block, one for keeping a prefix included.
    #[must_use]
    pub fn ref_count(&self, block: HostBlockId) -> u32 {
        self.pool.ref_count(BlockId(block.0))
    }

    /// Number of references to all blocks together.
    #[must_use]
    pub fn num_references(&self) -> usize {
        self.pool.num_references()
    }

    /// Whether a block keeps a prefix.
    #[must_use]
    pub fn is_kept(&self, block: HostBlockId) -> bool {
        self.kept[block.0 as usize].is_some()
    }

    /// `num_blocks` blocks with one reference each, or nothing when there are fewer. Kept ones are
    /// forgotten when no others are free.
    pub fn allocate(&mut self, num_blocks: usize) -> Option<Vec<HostBlockId>> {
        if num_blocks > self.num_available() {
            return None;
        }
        Some((0..num_blocks).map_while(|_| self.allocate_one()).collect())
    }

    fn allocate_one(&mut self) -> Option<HostBlockId> {
        if self.pool.num_free() == 0 {
            let oldest = self.unheld.pop_oldest()?;
            self.forget(HostBlockId(oldest.0));
            self.pool.free(oldest);
        }
        self.pool.allocate().map(|block| HostBlockId(block.0))
    }

    /// Takes a block to keep what `name` names; a move is to fill it. `None` when the content is
    /// known, which counts as a use of it, or when there is no room.
    pub fn keep(&mut self, name: BlockName) -> Option<HostBlockId> {
        if let Some(&known) = self.by_name.get(&name) {
            self.touch(BlockId(known.0));
            return None;
        }
        let block = self.allocate_one()?;
        self.by_name.insert(name, block);
        self.kept[block.0 as usize] = Some(Kept { name, is_filled: false });
        Some(block)
    }

    /// Whether [`keep`](Self::keep) would take another block for something new.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.num_available() > 0
    }

    fn touch(&mut self, block: BlockId) {
        if self.unheld.contains(block) {
            self.unheld.remove(block);
            self.unheld.push(block);
        }
    }

    /// Notes that a kept block has its content. Its move's reference is still held.
    pub fn fill(&mut self, block: HostBlockId) {
        if let Some(kept) = &mut self.kept[block.0 as usize] {
            kept.is_filled = true;
        }
    }

    /// Fills a kept block that no move has a reference to.
    pub fn fill_alone(&mut self, block: HostBlockId) {
        self.retain(block);
        self.fill(block);
        self.free(block);
    }

    /// Gives a kept block up that was not filled and that no move has a reference to.
    pub fn discard(&mut self, block: HostBlockId) {
        self.forget(block);
        self.free(block);
    }

    /// What a block keeps.
    #[must_use]
    pub fn name(&self, block: HostBlockId) -> Option<BlockName> {
        self.kept[block.0 as usize].map(|kept| kept.name)
    }

    /// What there is of a block's content.
    #[must_use]
    pub fn find(&self, name: &BlockName) -> OnHost {
        let Some(&block) = self.by_name.get(name) else { return OnHost::Missing };
        match self.kept[block.0 as usize] {
            Some(kept) if kept.is_filled => OnHost::Kept(block),
            _ => OnHost::Arriving,
        }
    }

    fn forget(&mut self, block: HostBlockId) {
        if let Some(kept) = self.kept[block.0 as usize].take() {
            self.by_name.remove(&kept.name);
        }
    }

    /// Adds a reference.
    ///
    /// # Panics
    /// When the block is free.
    pub fn retain(&mut self, block: HostBlockId) {
        let block = BlockId(block.0);
        self.pool.retain(block);
        if self.unheld.contains(block) {
            self.unheld.remove(block);
        }
    }

    /// Drops a reference; a kept block that only it held becomes the most recently used.
    ///
    /// # Panics
    /// When the block is free.
    pub fn free(&mut self, block: HostBlockId) {
        let id = BlockId(block.0);
        self.pool.free(id);
        let is_filled = self.kept[id.index()].is_some_and(|kept| kept.is_filled);
        if is_filled && self.pool.ref_count(id) == 1 {
            self.unheld.push(id);
        }
    }

    /// Checks that the free list is exactly the set of blocks without references, and that what is
    /// kept can be found.
    ///
    /// # Errors
    /// The first violation found.
    pub fn check_integrity(&self) -> Result<(), KvCacheError> {
        self.pool.check_integrity()?;
        for (block, kept) in (0u32..).map(BlockId).zip(&self.kept) {
            let ref_count = self.pool.ref_count(block);
            let known = kept.map(|kept| self.by_name.get(&kept.name).map(|known| known.0));
            if known.is_some_and(|known| known != Some(block.0)) {
                return Err(KvCacheError::LostPrefix { block });
            }
            let is_filled = kept.is_some_and(|kept| kept.is_filled);
            let is_unheld = self.unheld.contains(block);
            if is_unheld != (is_filled && ref_count == 1) || kept.is_some() && ref_count == 0 {
                return Err(KvCacheError::WrongState { block, ref_count });
            }
        }
        let num_kept = self.kept.iter().flatten().count();
        match num_kept == self.by_name.len() {
            true => Ok(()),
            false => Err(KvCacheError::LostPrefix { block: BlockId(0) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(byte: u8) -> BlockName {
        BlockName([byte; 32])
    }

    /// Keeps a block and fills it, as a move does.
    fn keep(space: &mut SwapSpace, byte: u8) -> Option<HostBlockId> {
        let block = space.keep(name(byte))?;
        space.retain(block);
        assert_eq!(space.find(&name(byte)), OnHost::Arriving);
        space.fill(block);
        space.free(block);
        assert_eq!(space.find(&name(byte)), OnHost::Kept(block));
        assert_eq!(space.check_integrity(), Ok(()));
        Some(block)
    }

    #[test]
    fn all_or_nothing() {
        let mut space = SwapSpace::new(3);
        assert_eq!(space.allocate(4), None);
        let blocks = space.allocate(2).unwrap();
        assert_eq!(blocks, [HostBlockId(0), HostBlockId(1)]);
        space.retain(blocks[1]);
        blocks.iter().for_each(|&block| space.free(block));
        assert_eq!((space.num_available(), space.ref_count(blocks[1])), (2, 1));
        space.free(blocks[1]);
        assert_eq!((space.num_total(), space.num_available()), (3, 3));
        assert_eq!(space.check_integrity(), Ok(()));
    }

    #[test]
    fn the_least_recently_used_makes_room() {
        let mut space = SwapSpace::new(3);
        let blocks = [1, 2, 3].map(|byte| keep(&mut space, byte).unwrap());
        assert_eq!((space.num_kept(), space.num_available()), (3, 3));
        // Used again: by a move from it, and by being evicted once more.
        space.retain(blocks[0]);
        assert_eq!(space.num_available(), 2);
        space.free(blocks[0]);
        assert_eq!(keep(&mut space, 2), None);
        assert_eq!(keep(&mut space, 4), Some(blocks[2]));
        assert_eq!(space.find(&name(3)), OnHost::Missing);
        // A sequence takes what it needs.
        assert_eq!(space.allocate(2), Some(vec![blocks[0], blocks[1]]));
        assert_eq!((space.num_kept(), space.check_integrity()), (1, Ok(())));
    }

    #[test]
    fn what_comes_from_elsewhere_is_kept_or_given_up() {
        let mut space = SwapSpace::new(2);
        let (good, bad) = (space.keep(name(1)).unwrap(), space.keep(name(2)).unwrap());
        assert_eq!(space.num_available(), 0, "nobody takes what is being filled");
        space.fill_alone(good);
        space.discard(bad);
        assert_eq!((space.find(&name(1)), space.name(good)), (OnHost::Kept(good), Some(name(1))));
        assert_eq!((space.find(&name(2)), space.num_available()), (OnHost::Missing, 2));
        assert_eq!(space.check_integrity(), Ok(()));
    }

    #[test]
    fn what_a_move_uses_stays() {
        let mut space = SwapSpace::new(2);
        let (filling, reading) = (space.keep(name(1)).unwrap(), keep(&mut space, 2).unwrap());
        space.retain(filling);
        space.retain(reading);
        assert_eq!((space.has_room(), space.keep(name(3)), space.allocate(1)), (false, None, None));
        assert_eq!(space.keep(name(1)), None, "it is on its way");
        space.free(reading);
        assert_eq!(space.allocate(1), Some(vec![reading]));
    }
}
