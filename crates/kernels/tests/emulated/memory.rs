//! Memory that kernels read and write, and numbers to fill it with.

use std::marker::PhantomData;

use half::bf16;
use inflight_kernels::DevicePtr;

/// Numbers on a 16-byte boundary, with a fence in front of them, and behind them a page that can be
/// neither read nor written.
pub(crate) struct Memory<T> {
    /// The last one is that page.
    pages: *mut u8,
    num_bytes: usize,
    /// In `pages`.
    start: usize,
    len: usize,
    kind: PhantomData<T>,
}

/// Numbers of which every pattern of bits is one.
pub(crate) trait Plain: Copy {}
impl Plain for u8 {}
impl Plain for u16 {}
impl Plain for u32 {}
impl Plain for u64 {}
impl Plain for f32 {}
impl Plain for bf16 {}

const FENCE: [u8; 16] = *b"|-fence--fence-|";
/// No number in any floating-point format, and far from zero as a whole one.
const UNWRITTEN: u8 = 0xff;

impl<T: Plain> Memory<T> {
    pub(crate) fn new(numbers: &[T]) -> Self {
        let mut memory = Self::unwritten(numbers.len());
        memory.as_mut_slice().copy_from_slice(numbers);
        memory
    }

    pub(crate) fn unwritten(len: usize) -> Self {
        // SAFETY: it only tells a number.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let padded = (len * size_of::<T>()).next_multiple_of(FENCE.len());
        let usable = (FENCE.len() + padded).next_multiple_of(page);
        let (num_bytes, access) = (usable + page, libc::PROT_READ | libc::PROT_WRITE);
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: new pages, which nobody has.
        let pages = unsafe { libc::mmap(std::ptr::null_mut(), num_bytes, access, kind, -1, 0) };
        assert_ne!(pages, libc::MAP_FAILED, "{num_bytes} bytes");
        let pages = pages.cast::<u8>();
        let start = usable - padded;
        // SAFETY: all of it is within the pages, the last of which is no longer touched.
        unsafe {
            pages.add(start - FENCE.len()).copy_from(FENCE.as_ptr(), FENCE.len());
            pages.add(start).write_bytes(UNWRITTEN, padded);
            assert_eq!(libc::mprotect(pages.add(usable).cast(), page, libc::PROT_NONE), 0);
        }
        Self { pages, num_bytes, start, len, kind: PhantomData }
    }

    fn numbers(&self) -> *mut T {
        // SAFETY: they begin there.
        unsafe { self.pages.add(self.start).cast() }
    }

    pub(crate) fn address(&mut self) -> DevicePtr {
        self.numbers().expose_provenance() as DevicePtr
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: so many fit, aligned, and all patterns of bits are numbers.
        unsafe { std::slice::from_raw_parts_mut(self.numbers(), self.len) }
    }

    /// # Panics
    /// If a kernel wrote beside it.
    pub(crate) fn as_slice(&self) -> &[T] {
        let end = self.start + self.len * size_of::<T>();
        let padding = end.next_multiple_of(FENCE.len()) - end;
        // SAFETY: both are in front of the page that cannot be read.
        let [fence, padding] = unsafe {
            [(self.start - FENCE.len(), FENCE.len()), (end, padding)]
                .map(|(at, len)| std::slice::from_raw_parts(self.pages.add(at), len))
        };
        let is_whole = fence == FENCE && padding.iter().all(|byte| *byte == UNWRITTEN);
        assert!(is_whole, "a kernel wrote beside {} numbers", self.len);
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(self.numbers(), self.len) }
    }
}

impl<T: Plain> Clone for Memory<T> {
    fn clone(&self) -> Self {
        Self::new(self.as_slice())
    }
}

impl<T> Drop for Memory<T> {
    fn drop(&mut self) {
        // SAFETY: pages of its own.
        unsafe { libc::munmap(self.pages.cast(), self.num_bytes) };
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
