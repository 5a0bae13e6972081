//! A map by sequences' ids.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::SequenceId;

/// Looked up several times for every row of a plan. The engine gives the ids, so nobody can choose
/// them to collide.
pub(crate) type IdMap<T> = HashMap<SequenceId, T, BuildHasherDefault<IdHasher>>;

/// Spreads counted ids by a multiplication.
#[derive(Debug, Default)]
pub(crate) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    /// # Source
    /// Knuth, "The Art of Computer Programming", volume 3, section 6.4: 2^64 over the golden ratio.
    fn write_u64(&mut self, id: u64) {
        let product = (self.0 ^ id).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // The map uses the highest bits and the lowest.
        self.0 = product ^ (product >> 32);
    }
}
