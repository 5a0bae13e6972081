//! Element types of the KV cache.

use std::ops::Range;

use half::{bf16, f16, slice::HalfFloatSliceExt};

use super::lanes::{Lanes, Plain};
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

    /// Writes a token's head, and its scales where the type has some.
    fn write_head(head: &[f32], codes: &mut [Self], scales: &mut [Self]) {
        write_scaled(head, codes, scales);
    }

    /// Reads a token's head. `scales`: the token's, none for types without.
    #[inline(always)]
    fn widen_head<L: Lanes>(l: L, codes: &[Self], scales: &[Self], to: &mut [f32]) {
        match Self::DTYPE.greatest_code() {
            Some(_) => widen_scaled(l, codes, Self::scale(scales), to),
            None => widen_slice(l, codes, to),
        }
    }

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

/// Two numbers from 0 to 15.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Int4(u8);

/// Bytes of a group's numbers, and of its factor and least number.
const GROUP_BYTES: usize = KvDtype::GROUP / 2;
const FACTOR_BYTES: usize = 4;

impl Int4 {
    /// A group's factor and least number.
    #[inline(always)]
    fn factors(from: &[Self]) -> (f32, f32) {
        let half = |i: usize| f16::from_le_bytes([from[i].0, from[i + 1].0]).to_f32();
        (half(0), half(2))
    }

    /// Numbers as nibbles: the first half of a group in the lower bits.
    #[inline(always)]
    fn nibbles(codes: &[Self]) -> [i8; KvDtype::GROUP] {
        let mut numbers = [0; KvDtype::GROUP];
        let (low, high) = numbers.split_at_mut(GROUP_BYTES);
        for (code, (low, high)) in codes.iter().zip(low.iter_mut().zip(high)) {
            (*low, *high) = ((code.0 & 15) as i8, (code.0 >> 4) as i8);
        }
        numbers
    }
}

impl KvElement for Int4 {
    const DTYPE: KvDtype = KvDtype::Int4;

    fn narrow(_from: &[f32], _to: &mut [Self]) {
        unreachable!("numbers of four bits are written by groups")
    }

    unsafe fn load<L: Lanes>(_l: L, _from: *const Self) -> L::V {
        unreachable!("numbers of four bits are read by groups")
    }

    fn widen(self) -> f32 {
        unreachable!("numbers of four bits are read by groups")
    }

    fn set_scale(scale: f32, to: &mut [Self]) {
        for (byte, to) in scale.to_ne_bytes().into_iter().zip(to) {
            *to = Self(byte);
        }
    }

    fn write_head(head: &[f32], codes: &mut [Self], scales: &mut [Self]) {
        let places = codes.chunks_exact_mut(GROUP_BYTES).zip(scales.chunks_exact_mut(FACTOR_BYTES));
        for (group, (codes, factors)) in head.chunks(KvDtype::GROUP).zip(places) {
            let least = group.iter().fold(f32::INFINITY, |least, x| least.min(*x));
            let greatest = group.iter().fold(f32::NEG_INFINITY, |greatest, x| greatest.max(*x));
            let (factor, least) = (f16::from_f32((greatest - least) / 15.0), f16::from_f32(least));
            let bytes = factor.to_le_bytes().into_iter().chain(least.to_le_bytes());
            factors.iter_mut().zip(bytes).for_each(|(to, byte)| *to = Self(byte));
            let (factor, least) = (factor.to_f32(), least.to_f32());
            let inverse = if factor > 0.0 { 1.0 / factor } else { 0.0 };
            let code = |i: usize| {
                let x = group.get(i).map_or(0.0, |x| ((x - least) * inverse).round_ties_even());
                x.clamp(0.0, 15.0) as u8
            };
            for (i, to) in codes.iter_mut().enumerate() {
                *to = Self(code(i) | code(i + GROUP_BYTES) << 4);
            }
        }
    }

    #[inline(always)]
    fn widen_head<L: Lanes>(l: L, codes: &[Self], scales: &[Self], to: &mut [f32]) {
        let groups = codes.chunks_exact(GROUP_BYTES).zip(scales.chunks_exact(FACTOR_BYTES));
        for (to, (codes, factors)) in to.chunks_mut(KvDtype::GROUP).zip(groups) {
            let (factor, least) = Self::factors(factors);
            let numbers = Self::nibbles(codes);
            let (factors, leasts) = (l.splat(factor), l.splat(least));
            let num_numbers = to.len();
            let mut chunks = to.chunks_exact_mut(L::N);
            for (to, numbers) in chunks.by_ref().zip(numbers.chunks_exact(L::N)) {
                // SAFETY: both chunks have N elements.
                unsafe {
                    let numbers = l.load_i8(numbers.as_ptr());
                    l.store(to.as_mut_ptr(), l.mul_add(numbers, factors, leasts));
                }
            }
            // A last group may be shorter.
            let start = num_numbers / L::N * L::N;
            for (to, number) in chunks.into_remainder().iter_mut().zip(&numbers[start..]) {
                *to = f32::from(*number).mul_add(factor, least);
            }
        }
    }
}

/// Writes one token's head: its codes, and for types that have scales its scale.
fn write_scaled<K: KvElement>(head: &[f32], codes: &mut [K], scale: &mut [K]) {
    let Some(greatest_code) = K::DTYPE.greatest_code() else {
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

/// Where a token's head lies in its strip, in elements: its codes and its scales.
#[inline(always)]
pub(super) fn places<K: KvElement>(layout: &KvLayout, token: usize) -> [Range<usize>; 2] {
    let (head_len, scale_len) =
        (layout.head_bytes() / size_of::<K>(), layout.scale_bytes() / size_of::<K>());
    let scales = layout.codes_bytes() / size_of::<K>() + token * scale_len;
    [token * head_len..(token + 1) * head_len, scales..scales + scale_len]
}

/// Writes a token's head to its strip.
pub(super) fn write_head<K: KvElement>(
    layout: &KvLayout,
    token: usize,
    head: &[f32],
    strip: &mut [K],
) {
    let [codes, scales] = places::<K>(layout, token);
    let (first, second) = strip.split_at_mut(scales.start);
    K::write_head(head, &mut first[codes], &mut second[..scales.len()]);
}

/// Reads a token's head from its strip; not for many tokens.
pub(super) fn read_head<K: KvElement>(
    layout: &KvLayout,
    token: usize,
    strip: &[K],
    head: &mut [f32],
) {
    let [codes, scales] = places::<K>(layout, token);
    K::widen_head(Plain, &strip[codes], &strip[scales], head);
}

/// Writes `from` as f32 to `to`, of the same length.
#[inline(always)]
fn widen_slice<L: Lanes, K: KvElement>(l: L, from: &[K], to: &mut [f32]) {
    widen(l, from, to, |x| x);
}

/// Writes `from` as f32, times `scale`, to `to`, of the same length.
#[inline(always)]
fn widen_scaled<L: Lanes, K: KvElement>(l: L, from: &[K], scale: f32, to: &mut [f32]) {
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
    use crate::cpu::kernels::lanes::{Kernel, dispatch};
    use crate::cpu::kernels::testing::at_every_level;

    fn check<K: KvElement>(head: &[f32], expected: &[f32], expected_scale: f32) {
        let mut codes = vec![K::default(); head.len()];
        let mut scale = [K::default(); 4];
        K::write_head(head, &mut codes, &mut scale);
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

    /// Each group of 32 has sixteen steps from its least to its greatest number; 40 numbers are two
    /// groups.
    #[test]
    fn numbers_of_four_bits_are_steps_of_their_group() {
        let head: Vec<f32> = (0..40).map(|i| if i < 32 { i as f32 } else { -8.0 }).collect();
        let (mut codes, mut scales) = ([Int4(0); 32], [Int4(0); 8]);
        Int4::write_head(&head, &mut codes, &mut scales);
        let steps = [Int4::factors(&scales[..4]), Int4::factors(&scales[4..])];
        assert_eq!(steps[1], (0.0, -8.0));
        assert!((steps[0].0 - 31.0 / 15.0).abs() < 1e-3 && steps[0].1 == 0.0);
        at_every_level(|cores| {
            let mut out = vec![0.0; 40];
            dispatch(cores.simd, Widen { codes: &codes, scales: &scales, to: &mut out });
            for (x, expected) in out.iter().zip(&head) {
                assert!((x - expected).abs() <= 31.0 / 30.0 + 1e-2, "{x} for {expected}");
            }
            assert_eq!(out[32..], [-8.0; 8]);
        });
    }

    struct Widen<'a> {
        codes: &'a [Int4],
        scales: &'a [Int4],
        to: &'a mut [f32],
    }

    impl Kernel for Widen<'_> {
        type Output = ();

        #[inline(always)]
        fn run<L: Lanes>(self, l: L) {
            Int4::widen_head(l, self.codes, self.scales, self.to);
        }
    }
}
