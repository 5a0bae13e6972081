//! A hash that never changes, for names of files and checks of their content.

/// FNV-1a of 128 bits.
///
/// # Source
/// Fowler, Noll and Vo: "The FNV non-cryptographic hash algorithm", draft-eastlake-fnv.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hash(u128);

impl Hash {
    pub(crate) const fn new() -> Self {
        Self(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }

    pub(crate) fn bytes(mut self, bytes: &[u8]) -> Self {
        for byte in bytes {
            self.0 = (self.0 ^ u128::from(*byte)).wrapping_mul((1 << 88) + 0x13b);
        }
        self
    }

    /// A text and its length, so that texts hashed one after the other cannot run together.
    pub(crate) fn text(self, text: &str) -> Self {
        self.bytes(&(text.len() as u64).to_le_bytes()).bytes(text.as_bytes())
    }

    pub(crate) const fn value(self) -> u128 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The draft's test vectors.
    #[test]
    fn known_answers() {
        let hash = |text: &str| Hash::new().bytes(text.as_bytes()).value();
        assert_eq!(hash(""), 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
        assert_eq!(hash("a"), 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
        assert_eq!(hash("foobar"), 0x343e_1662_793c_64bf_6f0d_3597_ba44_6f18);
    }

    #[test]
    fn texts_do_not_run_together() {
        let hash = |a, b| Hash::new().text(a).text(b).value();
        assert_ne!(hash("ab", "c"), hash("a", "bc"));
    }
}
