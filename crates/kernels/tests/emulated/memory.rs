//! Memory that kernels read and write, and numbers to fill it with.

use half::bf16;
use inflight_kernels::DevicePtr;

/// Numbers on a 16-byte boundary, with a fence on either side.
#[derive(Clone)]
pub(crate) struct Memory<T> {
    words: Vec<u128>,
    len: usize,
    kind: std::marker::PhantomData<T>,
}

/// Numbers of which every pattern of bits is one.
pub(crate) trait Plain: Copy {}
impl Plain for u8 {}
impl Plain for u16 {}
impl Plain for u32 {}
impl Plain for f32 {}
impl Plain for bf16 {}

const FENCE: u128 = 0x0fec_e000_0fec_e000_0fec_e000_0fec_e000;

impl<T: Plain> Memory<T> {
    pub(crate) fn new(numbers: &[T]) -> Self {
        let mut memory = Self::unwritten(numbers.len());
        memory.as_mut_slice().copy_from_slice(numbers);
        memory
    }

    /// No numbers in any floating-point format, and far from zero as whole ones.
    pub(crate) fn unwritten(len: usize) -> Self {
        let num_words = (len * size_of::<T>()).div_ceil(size_of::<u128>());
        let mut words = vec![u128::MAX; num_words + 2];
        words[0] = FENCE;
        words[num_words + 1] = FENCE;
        Self { words, len, kind: std::marker::PhantomData }
    }

    pub(crate) fn address(&mut self) -> DevicePtr {
        self.words[1..].as_mut_ptr().expose_provenance() as DevicePtr
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: so many fit, aligned, and all patterns of bits are numbers.
        unsafe { std::slice::from_raw_parts_mut(self.words[1..].as_mut_ptr().cast(), self.len) }
    }

    /// # Panics
    /// If a kernel wrote beside it.
    pub(crate) fn as_slice(&self) -> &[T] {
        let fences = (self.words[0], self.words[self.words.len() - 1]);
        assert_eq!(fences, (FENCE, FENCE), "a kernel wrote beside {} numbers", self.len);
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(self.words[1..].as_ptr().cast(), self.len) }
    }
}

/// Numbers by chance, the same ones every time.
///
/// # Source
/// Steele, Lea and Flood: "Fast splittable pseudorandom number generators", 2014 (SplitMix64).
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub(crate) fn below(&mut self, end: u32) -> u32 {
        (self.next() % u64::from(end)) as u32
    }

    /// Evenly from -1 to 1.
    pub(crate) fn number(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// So many numbers from `-greatest` to `greatest`.
    pub(crate) fn bf16s(&mut self, len: usize, greatest: f32) -> Vec<bf16> {
        (0..len).map(|_| bf16::from_f32(self.number() * greatest)).collect()
    }

    pub(crate) fn f32s(&mut self, len: usize, greatest: f32) -> Vec<f32> {
        (0..len).map(|_| self.number() * greatest).collect()
    }
}
