//! Element types of the KV cache.

use half::{bf16, f16, slice::HalfFloatSliceExt};

use super::lanes::Lanes;

/// An element type that the KV cache can have.
pub(crate) trait KvElement: Copy + Default + Send + Sync + 'static {
    /// Converts to this type, rounding to nearest.
    fn narrow(from: &[f32], to: &mut [Self]);

    /// `N` elements as f32.
    ///
    /// # Safety
    /// `from` is valid for reading `N` elements.
    unsafe fn load<L: Lanes>(l: L, from: *const Self) -> L::V;

    /// One element as f32.
    fn widen(self) -> f32;
}

impl KvElement for f32 {
    fn narrow(from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }

    #[inline(always)]
    unsafe fn load<L: Lanes>(l: L, from: *const Self) -> L::V {
        // SAFETY: the caller's.
        unsafe { l.load(from) }
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl KvElement for f16 {
    fn narrow(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }

    #[inline(always)]
    unsafe fn load<L: Lanes>(l: L, from: *const Self) -> L::V {
        // SAFETY: the caller's.
        unsafe { l.load_f16(from) }
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

impl KvElement for bf16 {
    fn narrow(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }

    #[inline(always)]
    unsafe fn load<L: Lanes>(l: L, from: *const Self) -> L::V {
        // SAFETY: the caller's.
        unsafe { l.load_bf16(from) }
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

/// Writes `from` as f32 to `to`, of the same length.
#[inline(always)]
pub(super) fn widen_slice<L: Lanes, K: KvElement>(l: L, from: &[K], to: &mut [f32]) {
    let mut from_chunks = from.chunks_exact(L::N);
    let mut to_chunks = to.chunks_exact_mut(L::N);
    for (from, to) in from_chunks.by_ref().zip(to_chunks.by_ref()) {
        // SAFETY: both chunks have N elements.
        unsafe { l.store(to.as_mut_ptr(), K::load(l, from.as_ptr())) };
    }
    for (from, to) in from_chunks.remainder().iter().zip(to_chunks.into_remainder()) {
        *to = from.widen();
    }
}
