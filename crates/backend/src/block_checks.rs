//! Checksums of blocks of the KV cache: finds blocks that changed though nobody was to write to
//! them. For debugging: whoever checks reads all of a block.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use crate::{Backend, BlockPair, KvBlocks};

/// What blocks held when that was last noted. Handles are to the same one.
///
/// Streams use it in the order that they use blocks in, so no order of its own is needed.
#[derive(Clone, Debug)]
pub struct BlockSums {
    /// `[num_blocks]`; 0: not known, or to change.
    device: Arc<[AtomicU64]>,
    /// `[num_swap_blocks]`.
    host: Arc<[AtomicU64]>,
}

/// Arguments of [`Backend::check_blocks`].
#[allow(missing_docs)]
pub struct CheckBlocks<'a, B: Backend> {
    pub kv: &'a KvBlocks<B>,
    pub sums: &'a BlockSums,
    pub check: BlockCheck<'a, B>,
}

/// What is done with checksums.
pub enum BlockCheck<'a, B: Backend> {
    /// What blocks hold now is noted, and what was noted of others, that are not full, forgotten.
    Note {
        /// Blocks that nobody is to write to any more.
        full: &'a [u32],
        /// Blocks that were written to and will be.
        partial: &'a [u32],
    },
    /// Blocks hold what was noted of them, if anything was.
    Verify(&'a [u32]),
    /// Blocks of the host that were just copied from the device hold what was noted there.
    Left(&'a B::HostBuffer, &'a [BlockPair]),
    /// Blocks of the host hold what they did when they came there; they are copied to the device.
    Returns(&'a B::HostBuffer, &'a [BlockPair]),
}

impl BlockSums {
    /// Nothing is known of any block.
    #[must_use]
    pub fn new(num_blocks: usize, num_host_blocks: usize) -> Self {
        let unknown = |len| (0..len).map(|_| AtomicU64::new(0)).collect();
        Self { device: unknown(num_blocks), host: unknown(num_host_blocks) }
    }

    /// Notes that a block of the host is to be filled from elsewhere.
    pub fn forget_host(&self, block: u32) {
        self.host[block as usize].store(0, Ordering::Relaxed);
    }

    /// Takes part in [`Backend::check_blocks`]; `content` gives the sum of what a block holds now,
    /// of the host for the checks that name it and of the device for others. It is never 0.
    ///
    /// # Errors
    /// Names the first block that holds something else than it should.
    pub fn check(
        &self,
        check: SumCheck<'_>,
        mut content: impl FnMut(u32) -> u64,
    ) -> Result<(), String> {
        match check {
            SumCheck::Note { full, partial } => {
                for &block in full {
                    self.device[block as usize].store(content(block), Ordering::Relaxed);
                }
                for &block in partial {
                    self.device[block as usize].store(0, Ordering::Relaxed);
                }
            }
            SumCheck::Verify(blocks) => {
                for &block in blocks {
                    let noted = self.device[block as usize].load(Ordering::Relaxed);
                    agree(noted, content(block), || format!("block {block} of the KV cache"))?;
                }
            }
            SumCheck::Left(pairs) => {
                for &BlockPair { from, to } in pairs {
                    let noted = self.device[from as usize].load(Ordering::Relaxed);
                    let found = content(to);
                    agree(noted, found, || format!("block {from} of the KV cache, which left,"))?;
                    self.host[to as usize].store(found, Ordering::Relaxed);
                }
            }
            SumCheck::Returns(pairs) => {
                for &BlockPair { from, to } in pairs {
                    let noted = self.host[from as usize].load(Ordering::Relaxed);
                    let found = content(from);
                    agree(noted, found, || format!("block {from} of the host's memory"))?;
                    self.device[to as usize].store(found, Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }
}

/// [`BlockCheck`] without the host's memory.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub enum SumCheck<'a> {
    Note { full: &'a [u32], partial: &'a [u32] },
    Verify(&'a [u32]),
    Left(&'a [BlockPair]),
    Returns(&'a [BlockPair]),
}

fn agree(noted: u64, found: u64, what: impl FnOnce() -> String) -> Result<(), String> {
    match noted == 0 || noted == found {
        true => Ok(()),
        false => Err(format!("{} is not what it was when it was full", what())),
    }
}

/// A checksum in the making: not of cryptographic strength.
#[derive(Clone, Copy, Debug)]
pub struct BlockSum(u64);

impl Default for BlockSum {
    fn default() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }
}

impl BlockSum {
    /// The sum of what was added and these bytes behind it.
    #[must_use]
    pub fn with(self, bytes: &[u8]) -> Self {
        let words = bytes.chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_le_bytes(word)
        });
        // Both steps can be undone, so two contents that differ in one word differ in their sums.
        Self(words.fold(self.0, |sum, word| {
            (sum ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(29)
        }))
    }

    /// The sum; never 0.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0.max(1)
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn one_flipped_bit_changes_the_sum() {
        let bytes: Vec<u8> = (0..100).collect();
        let sum = BlockSum::default().with(&bytes).get();
        assert_eq!(BlockSum::default().with(&bytes[..48]).with(&bytes[48..]).get(), sum);
        for bit in 0..800 {
            let mut other = bytes.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(BlockSum::default().with(&other).get(), sum, "bit {bit}");
        }
    }

    #[test]
    fn blocks_are_followed_to_the_host_and_back() {
        let sums = BlockSums::new(4, 2);
        let holds = |sum: u64| move |_: u32| sum;
        let (full, partial) = (&[1, 2][..], &[3][..]);
        let [out, back] = [[BlockPair { from: 1, to: 0 }], [BlockPair { from: 0, to: 3 }]];
        sums.check(SumCheck::Note { full, partial }, holds(7)).unwrap();
        sums.check(SumCheck::Verify(&[1, 3]), holds(7)).unwrap();
        sums.check(SumCheck::Verify(&[3]), holds(9)).expect("nothing is known of it");
        let changed = sums.check(SumCheck::Verify(&[2]), holds(8)).unwrap_err();
        assert!(changed.contains("block 2 of the KV cache is not what"), "{changed}");
        let changed = sums.check(SumCheck::Left(&out), holds(8)).unwrap_err();
        assert!(changed.contains("block 1 of the KV cache, which left, is not"), "{changed}");
        sums.check(SumCheck::Left(&out), holds(7)).unwrap();
        let changed = sums.check(SumCheck::Returns(&back), holds(8)).unwrap_err();
        assert!(changed.contains("block 0 of the host's memory is not"), "{changed}");
        sums.check(SumCheck::Returns(&back), holds(7)).unwrap();
        assert!(sums.check(SumCheck::Verify(&[3]), holds(8)).is_err(), "it is known of now");
        sums.forget_host(0);
        sums.check(SumCheck::Returns(&back), holds(8)).expect("filled from elsewhere");
    }
}
