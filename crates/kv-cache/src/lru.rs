//! Blocks in the order in which their last holders let go of them.

use crate::BlockId;

/// A doubly linked list over block ids: adding at the end, removing anywhere and taking the oldest
/// cost the same however long it is.
///
/// A mark may pass over the blocks, the oldest first; it stands before the oldest not yet passed:
///
/// ```text
///   oldest  [ passed | passed ] ▲ [ not yet | not yet ]  newest
///                              mark
/// ```
#[derive(Debug, Clone)]
pub(crate) struct LruList {
    /// One entry per block, and a last one that closes the ring.
    links: Vec<Link>,
    len: usize,
    /// The oldest block that was not passed; the ring's end if all were.
    mark: u32,
    /// Of each block, whether it is in the list and was passed.
    passed: Vec<bool>,
    num_passed: usize,
}

#[derive(Debug, Clone, Copy)]
struct Link {
    older: u32,
    newer: u32,
}

/// Marks a block that is not in the list.
const ABSENT: Link = Link { older: u32::MAX, newer: u32::MAX };

impl LruList {
    pub(crate) fn new(num_blocks: u32) -> Self {
        let mut links = vec![ABSENT; num_blocks as usize];
        links.push(Link { older: num_blocks, newer: num_blocks });
        let passed = vec![false; num_blocks as usize];
        Self { links, len: 0, mark: num_blocks, passed, num_passed: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn contains(&self, block: BlockId) -> bool {
        self.links[block.index()].newer != u32::MAX
    }

    /// Adds a block as the newest.
    pub(crate) fn push(&mut self, block: BlockId) {
        assert!(!self.contains(block), "block {block} is in the list already");
        let ring = self.ring();
        let newest = self.links[ring as usize].older;
        self.links[block.index()] = Link { older: newest, newer: ring };
        self.links[newest as usize].newer = block.0;
        self.links[ring as usize].older = block.0;
        self.len += 1;
        if self.mark == ring {
            self.mark = block.0;
        }
    }

    pub(crate) fn remove(&mut self, block: BlockId) {
        assert!(self.contains(block), "block {block} is not in the list");
        let Link { older, newer } = std::mem::replace(&mut self.links[block.index()], ABSENT);
        self.links[older as usize].newer = newer;
        self.links[newer as usize].older = older;
        self.len -= 1;
        if self.mark == block.0 {
            self.mark = newer;
        }
        self.num_passed -= usize::from(std::mem::take(&mut self.passed[block.index()]));
    }

    /// Passes over the oldest block not yet passed.
    pub(crate) fn pass(&mut self) -> Option<BlockId> {
        let block = self.mark;
        if block == self.ring() {
            return None;
        }
        self.mark = self.links[block as usize].newer;
        self.passed[block as usize] = true;
        self.num_passed += 1;
        Some(BlockId(block))
    }

    /// Number of blocks in the list that were passed.
    pub(crate) fn num_passed(&self) -> usize {
        self.num_passed
    }

    /// Whether a block is in the list and was passed.
    pub(crate) fn is_passed(&self, block: BlockId) -> bool {
        self.passed[block.index()]
    }

    /// Takes the oldest block out.
    pub(crate) fn pop_oldest(&mut self) -> Option<BlockId> {
        let oldest = self.iter().next()?;
        self.remove(oldest);
        Some(oldest)
    }

    /// Oldest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = BlockId> {
        let ring = self.ring();
        let mut at = ring;
        std::iter::from_fn(move || {
            at = self.links[at as usize].newer;
            (at != ring).then_some(BlockId(at))
        })
    }

    fn ring(&self) -> u32 {
        u32::try_from(self.links.len() - 1).expect("block ids are 32 bits wide")
    }
}

#[cfg(test)]
mod tests {
    use super::LruList;
    use crate::BlockId;

    #[test]
    fn the_oldest_comes_first_wherever_others_left() {
        let mut list = LruList::new(5);
        assert_eq!(list.pop_oldest(), None);
        for id in [3, 0, 4, 1] {
            list.push(BlockId(id));
        }
        list.remove(BlockId(4));
        list.remove(BlockId(3));
        list.push(BlockId(3));
        assert!(list.iter().map(|block| block.0).eq([0, 1, 3]));
        assert_eq!((list.pop_oldest(), list.len()), (Some(BlockId(0)), 2));
        assert!(list.contains(BlockId(1)) && !list.contains(BlockId(2)));
    }

    #[test]
    fn each_block_is_passed_once_while_it_is_in_the_list() {
        let mut list = LruList::new(5);
        assert_eq!(list.pass(), None);
        (0..4).for_each(|id| list.push(BlockId(id)));
        assert_eq!((list.pass(), list.pass()), (Some(BlockId(0)), Some(BlockId(1))));
        list.remove(BlockId(2));
        list.remove(BlockId(0));
        assert_eq!((list.num_passed(), list.pass(), list.pass()), (1, Some(BlockId(3)), None));
        list.push(BlockId(0));
        assert!(list.is_passed(BlockId(1)) && !list.is_passed(BlockId(0)));
        assert_eq!((list.pass(), list.num_passed()), (Some(BlockId(0)), 3));
        assert_eq!((list.pop_oldest(), list.num_passed()), (Some(BlockId(1)), 2));
    }
}
