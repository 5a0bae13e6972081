//! Element types of the KV cache.

use half::{bf16, f16, slice::HalfFloatSliceExt};

use super::lanes::Lanes;
use crate::{KvDtype, KvLayout, e4m3};

/// An element type that the KV cache can have.
pub(crate) trait KvElement: Copy + Default + Send + Sync + 'static {
    /// Its name.
    const DTYPE: KvDtype;

    /// Converts to this type, rounding to nearest.
    fn narrow(from: &[f32], to: &mut [Self]);

    /// `N` elements as f32.
    ///
    /// # Safety
    /// `from` is valid for reading `N` elements.
    unsafe fn load<L: Lanes>(l: L, from: *const Self) -> L::V;

    /// One element as f32.
    fn widen(self) -> f32;

    /// Reads a scale, stored in elements of one byte.
    ///
    /// # Panics
    /// If the type has none.
    fn scale(_from: &[Self]) -> f32 {
        unreachable!("{} has no scales", Self::DTYPE)
    }

    /// Writes a scale.
    ///
    /// # Panics
    /// If the type has none.
    fn set_scale(_scale: f32, _to: &mut [Self]) {
        unreachable!("{} has no scales", Self::DTYPE)
    }
}

impl KvElement for f32 {
    const DTYPE: KvDtype = KvDtype::F32;

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
    const DTYPE: KvDtype = KvDtype::F16;

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
    const DTYPE: KvDtype = KvDtype::Bf16;

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

/// A whole number from -127 to 127.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Int8(i8);

/// A code of e4m3.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Fp8(u8);

impl KvElement for Int8 {
    const DTYPE: KvDtype = KvDtype::Int8;

    fn narrow(from: &[f32], to: &mut [Self]) {
        for (from, to) in from.iter().zip(to) {
            *to = Self(from.round_ties_even() as i8); // Saturates.
        }
    }

    #[inline(always)]
    unsafe fn load<L: Lanes>(l: L, from: *const Self) -> L::V {
        // SAFETY: the caller's; `Int8` is its number.
        unsafe { l.load_i8(from.cast()) }
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from(self.0)
    }

    #[inline(always)]
    fn scale(from: &[Self]) -> f32 {
        f32::from_ne_bytes([from[0], from[1], from[2], from[3]].map(|x| x.0.cast_unsigned()))
    }

    fn set_scale(scale: f32, to: &mut [Self]) {
        for (byte, to) in scale.to_ne_bytes().into_iter().zip(to) {
            *to = Self(byte.cast_signed());
        }
    }
}

impl KvElement for Fp8 {
    const DTYPE: KvDtype = KvDtype::Fp8;

    fn narrow(from: &[f32], to: &mut [Self]) {
        for (from, to) in from.iter().zip(to) {
            *to = Self(e4m3::from_f32(*from));
        }
    }

    #[inline(always)]
    unsafe fn load<L: Lanes>(l: L, from: *const Self) -> L::V {
        // SAFETY: the caller's; `Fp8` is its code.
        unsafe { l.load_e4m3(from.cast()) }
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        e4m3::widen(self.0)
    }

    #[inline(always)]
    fn scale(from: &[Self]) -> f32 {
        f32::from_ne_bytes([from[0], from[1], from[2], from[3]].map(|x| x.0))
    }

    fn set_scale(scale: f32, to: &mut [Self]) {
        for (byte, to) in scale.to_ne_bytes().into_iter().zip(to) {
            *to = Self(byte);
        }
    }
}

/// Writes one token's head: its codes, and for types that have scales its scale.
pub(super) fn write_head<K: KvElement>(head: &[f32], codes: &mut [K], scale: Option<&mut [K]>) {
    let (Some(greatest_code), Some(scale)) = (K::DTYPE.greatest_code(), scale) else {
        return K::narrow(head, codes);
    };
    const AT_ONCE: usize = 64;
    let greatest = head.iter().fold(0.0f32, |greatest, x| greatest.max(x.abs()));
    let inverse = if greatest > 0.0 { greatest_code / greatest } else { 0.0 };
    for (from, to) in head.chunks(AT_ONCE).zip(codes.chunks_mut(AT_ONCE)) {
        let mut scaled = [0.0; AT_ONCE];
        for (scaled, x) in scaled.iter_mut().zip(from) {
            *scaled = x * inverse;
        }
        K::narrow(&scaled[..from.len()], to);
    }
    K::set_scale(greatest / greatest_code, scale);
}

/// The scale of a token's head in its strip; 1 for types without.
#[inline(always)]
pub(super) fn scale_of<K: KvElement>(layout: &KvLayout, offset: usize, strip: &[K]) -> f32 {
    if K::DTYPE.greatest_code().is_none() {
        return 1.0;
    }
    K::scale(&strip[layout.codes_bytes() + offset * size_of::<f32>()..])
}

/// Writes `from` as f32 to `to`, of the same length.
#[inline(always)]
pub(super) fn widen_slice<L: Lanes, K: KvElement>(l: L, from: &[K], to: &mut [f32]) {
    widen(l, from, to, |x| x);
}

/// Writes `from` as f32, times `scale`, to `to`, of the same length.
#[inline(always)]
pub(super) fn widen_scaled<L: Lanes, K: KvElement>(l: L, from: &[K], scale: f32, to: &mut [f32]) {
    let factor = l.splat(scale);
    widen(l, from, to, |x| l.mul(x, factor));
    let tail = to.len() / L::N * L::N;
    for to in &mut to[tail..] {
        *to *= scale;
    }
}

/// Whole registers go through `change`; what does not fill one is only widened.
#[inline(always)]
fn widen<L: Lanes, K: KvElement>(l: L, from: &[K], to: &mut [f32], change: impl Fn(L::V) -> L::V) {
    let mut from_chunks = from.chunks_exact(L::N);
    let mut to_chunks = to.chunks_exact_mut(L::N);
    for (from, to) in from_chunks.by_ref().zip(to_chunks.by_ref()) {
        // SAFETY: both chunks have N elements.
        unsafe { l.store(to.as_mut_ptr(), change(K::load(l, from.as_ptr()))) };
    }
    for (from, to) in from_chunks.remainder().iter().zip(to_chunks.into_remainder()) {
        *to = from.widen();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<K: KvElement>(head: &[f32], expected: &[f32], expected_scale: f32) {
        let mut codes = vec![K::default(); head.len()];
        let mut scale = [K::default(); 4];
        write_head(head, &mut codes, Some(&mut scale));
        let codes: Vec<f32> = codes.iter().map(|code| code.widen()).collect();
        assert_eq!((&codes[..], K::scale(&scale)), (expected, expected_scale));
    }

    #[test]
    fn the_greatest_number_gets_the_greatest_code() {
        check::<Int8>(&[0.0, 1.0, -2.0, 0.01], &[0.0, 64.0, -127.0, 1.0], 2.0 / 127.0);
        // In sevenths of 2: 0, 224, -448; 0.01 is 2.24, nearest 2.25.
        check::<Fp8>(&[0.0, 1.0, -2.0, 0.01], &[0.0, 224.0, -448.0, 2.25], 2.0 / 448.0);
        check::<Int8>(&[0.0; 3], &[0.0; 3], 0.0);
        check::<Fp8>(&[0.0; 3], &[0.0; 3], 0.0);
    }
}
