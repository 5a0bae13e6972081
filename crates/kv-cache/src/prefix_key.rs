//! What a block's content depends on besides its own tokens, and the hash by which it is found.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
};

/// Which prefixes may be shared at all: blocks under different keys never meet.
///
/// Keys and values follow from the weights (model and adapter) and from the tokens before them. The
/// salt keeps those apart who must not learn, by timing, what others sent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct PrefixKey {
    /// The model that computes.
    pub model: ModelId,
    /// The adapter on top of its weights; an adapter that is loaded anew is a new one.
    pub adapter: Option<AdapterId>,
    /// A text of the caller's.
    pub salt: Option<Arc<str>>,
}

/// Names a set of weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct ModelId(pub u32);

/// Names a loaded adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AdapterId(pub u32);

/// Hash of a full block and of everything before it, its key included.
///
/// Equal prefixes have equal hashes; the reverse is checked token by token, as hashes may collide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockHash(u64);

/// The hashes of a sequence's full blocks, computed once each.
///
/// ```text
///   key ──► hash 0 ──► hash 1 ──► hash 2
///           tokens     tokens     tokens
///           0 .. 15    16 .. 31   32 .. 47
/// ```
#[derive(Debug, Clone)]
pub struct PrefixChain {
    key: PrefixKey,
    block_size: usize,
    hashes: Vec<BlockHash>,
}

impl PrefixChain {
    /// The chain of no tokens.
    ///
    /// # Panics
    /// When `block_size` is zero.
    #[must_use]
    pub fn new(key: PrefixKey, block_size: usize) -> Self {
        assert!(block_size > 0, "a block holds at least one token");
        Self { key, block_size, hashes: Vec::new() }
    }

    /// Hashes the full blocks of `tokens`, the whole sequence, that were not hashed yet.
    pub fn extend(&mut self, tokens: &[u32]) {
        let blocks = tokens.chunks_exact(self.block_size).skip(self.hashes.len());
        for block in blocks {
            let mut hasher = DefaultHasher::new();
            match self.hashes.last() {
                Some(before) => before.hash(&mut hasher),
                None => self.key.hash(&mut hasher),
            }
            block.hash(&mut hasher);
            self.hashes.push(BlockHash(hasher.finish()));
        }
    }

    /// The key.
    #[must_use]
    pub fn key(&self) -> &PrefixKey {
        &self.key
    }

    /// Tokens in one block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// `[num_full_blocks]`, of as many as were hashed.
    #[must_use]
    pub fn hashes(&self) -> &[BlockHash] {
        &self.hashes
    }

    /// Makes the last hash that of another chain's, as a collision would.
    #[cfg(test)]
    pub(crate) fn collide(&mut self, other: &Self) {
        self.hashes.pop();
        self.hashes.extend(other.hashes.last());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(key: PrefixKey, tokens: &[u32]) -> Vec<BlockHash> {
        let mut chain = PrefixChain::new(key, 2);
        chain.extend(tokens);
        chain.hashes
    }

    #[test]
    fn a_hash_covers_all_that_comes_before() {
        let key = PrefixKey::default();
        let base = chain(key.clone(), &[1, 2, 3, 4, 5]);
        assert_eq!(base.len(), 2);
        assert_eq!(base, chain(key.clone(), &[1, 2, 3, 4, 6]));
        let other_start = chain(key.clone(), &[0, 2, 3, 4]);
        assert!(base[0] != other_start[0] && base[1] != other_start[1]);
        for key in [
            PrefixKey { model: ModelId(1), ..key.clone() },
            PrefixKey { adapter: Some(AdapterId(0)), ..key.clone() },
            PrefixKey { salt: Some("a".into()), ..key },
        ] {
            let other = chain(key, &[1, 2, 3, 4]);
            assert!(base[0] != other[0] && base[1] != other[1]);
        }
    }

    #[test]
    fn hashes_do_not_depend_on_when_they_are_computed() {
        let tokens = [7, 8, 9, 10, 11, 12, 13];
        let mut stepwise = PrefixChain::new(PrefixKey::default(), 2);
        for len in 0..=tokens.len() {
            stepwise.extend(&tokens[..len]);
        }
        assert_eq!(stepwise.hashes, chain(PrefixKey::default(), &tokens));
    }
}
