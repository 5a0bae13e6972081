//! What a block's content depends on besides its own tokens, and the hash by which it is found.

use std::{
    fmt,
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
};

use sha2::{Digest, Sha256};

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

impl BlockHash {
    /// As a number: equal ones for equal hashes.
    #[must_use]
    pub fn to_bits(self) -> u64 {
        self.0
    }
}

/// Names a full block and everything before it, its key included, outside the pool: SHA-256, so
/// that equal names are equal contents though nobody compares tokens there.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockName(pub [u8; 32]);

impl BlockName {
    /// The name of what layer group `group` has of the same tokens; the first group's is that of
    /// the tokens.
    ///
    /// Digests that differ in their last byte alone are as hard to find as equal ones.
    #[must_use]
    pub fn of_group(mut self, group: usize) -> Self {
        self.0[31] ^= u8::try_from(group).expect("a model has fewer than 256 layer groups");
        self
    }
}

impl fmt::Debug for BlockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().take(6).try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

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
    /// As many as hashes, where names are asked for.
    names: Option<Vec<BlockName>>,
}

impl PrefixChain {
    /// The chain of no tokens.
    ///
    /// # Panics
    /// When `block_size` is zero.
    #[must_use]
    pub fn new(key: PrefixKey, block_size: usize) -> Self {
        assert!(block_size > 0, "a block holds at least one token");
        Self { key, block_size, hashes: Vec::new(), names: None }
    }

    /// The same chain of no tokens, which names its blocks, too.
    ///
    /// # Panics
    /// When tokens were hashed already.
    #[must_use]
    pub fn with_names(mut self) -> Self {
        assert!(self.hashes.is_empty(), "names begin with the first block");
        self.names = Some(Vec::new());
        self
    }

    /// Hashes the full blocks of `tokens`, the whole sequence, that were not hashed yet.
    pub fn extend(&mut self, tokens: &[u32]) {
        let blocks = tokens.chunks_exact(self.block_size).skip(self.hashes.len());
        for block in blocks {
            self.hashes.push(self.hash_after(block));
            if let Some(names) = &mut self.names {
                names.push(name(&self.key, names.last(), block));
            }
        }
    }

    /// What the hash of one more full block would be.
    #[must_use]
    pub fn hash_after(&self, block: &[u32]) -> BlockHash {
        let mut hasher = DefaultHasher::new();
        match self.hashes.last() {
            Some(before) => before.hash(&mut hasher),
            None => self.key.hash(&mut hasher),
        }
        block.hash(&mut hasher);
        BlockHash(hasher.finish())
    }

    /// The names of the full blocks; none unless they were asked for.
    #[must_use]
    pub fn names(&self) -> &[BlockName] {
        self.names.as_deref().unwrap_or_default()
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

/// A block's name: of its tokens after the name before it, or after the key.
fn name(key: &PrefixKey, before: Option<&BlockName>, tokens: &[u32]) -> BlockName {
    let mut hasher = Sha256::new();
    match before {
        Some(BlockName(before)) => hasher.update(before),
        None => key.update(&mut hasher),
    }
    tokens.iter().for_each(|token| hasher.update(token.to_le_bytes()));
    BlockName(hasher.finalize().into())
}

impl PrefixKey {
    /// Each part with its length or presence first, so that no two keys give the same bytes.
    fn update(&self, hasher: &mut Sha256) {
        hasher.update(self.model.0.to_le_bytes());
        match self.adapter {
            Some(adapter) => hasher.update([&[1], &adapter.0.to_le_bytes()[..]].concat()),
            None => hasher.update([0]),
        }
        match &self.salt {
            Some(salt) => {
                hasher.update([1]);
                hasher.update((salt.len() as u64).to_le_bytes());
                hasher.update(salt.as_bytes());
            }
            None => hasher.update([0]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(key: PrefixKey, tokens: &[u32]) -> Vec<BlockName> {
        let mut chain = PrefixChain::new(key, 2).with_names();
        chain.extend(tokens);
        chain.names().to_vec()
    }

    #[test]
    fn a_name_is_the_digest_of_the_one_before_and_the_tokens() {
        let names = names(PrefixKey::default(), &[1, 2, 3, 4, 5]);
        // By Python's hashlib: sha256(bytes(6) + struct.pack("<2I", 1, 2)), then of that and 3, 4.
        let hex = |name: &BlockName| format!("{:02x?}", &name.0[..4]);
        assert_eq!(names.len(), 2);
        assert_eq!([hex(&names[0]), hex(&names[1])], ["[b2, e5, 23, d4]", "[1e, 83, 75, a8]"]);
    }

    #[test]
    fn keys_give_other_names() {
        let key = PrefixKey::default();
        let keys = [
            key.clone(),
            PrefixKey { model: ModelId(1), ..key.clone() },
            PrefixKey { adapter: Some(AdapterId(0)), ..key.clone() },
            PrefixKey { salt: Some("".into()), ..key.clone() },
            PrefixKey { salt: Some("a".into()), ..key },
        ];
        let first = keys.map(|key| names(key, &[1, 2])[0]);
        for (i, name) in first.iter().enumerate() {
            assert!(!first[..i].contains(name), "key {i}");
        }
    }

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
