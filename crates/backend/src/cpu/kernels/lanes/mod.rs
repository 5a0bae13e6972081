//! One source for every operator, whatever the vector instructions: [`Lanes`] is a register of f32
//! and what can be done with it; [`dispatch`] compiles a [`Kernel`] once for each level.
//!
//! Invariant: a value of a [`Lanes`] type exists only where its instructions do, so that its
//! methods are safe to call.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod plain;

use half::{bf16, f16};

pub(crate) use plain::Plain;

use crate::cpu::simd::SimdLevel;

/// Most lanes of any register.
pub(crate) const MAX_LANES: usize = 16;

/// A register of [`Lanes::N`] numbers, and what can be done with it.
pub(crate) trait Lanes: Copy {
    /// Numbers in a register: 8 or 16.
    const N: usize;
    /// The register.
    type V: Copy;

    fn splat(self, x: f32) -> Self::V;

    /// # Safety
    /// `from` is valid for reading `N` elements.
    unsafe fn load(self, from: *const f32) -> Self::V;

    /// # Safety
    /// `from` is valid for reading `N` elements.
    unsafe fn load_f16(self, from: *const f16) -> Self::V;

    /// # Safety
    /// `from` is valid for reading `N` elements.
    unsafe fn load_bf16(self, from: *const bf16) -> Self::V;

    /// # Safety
    /// `from` is valid for reading `N` elements.
    unsafe fn load_i8(self, from: *const i8) -> Self::V;

    /// Codes of e4m3 that are numbers.
    ///
    /// # Safety
    /// `from` is valid for reading `N` elements.
    unsafe fn load_e4m3(self, from: *const u8) -> Self::V;

    /// # Safety
    /// `to` is valid for writing `N` elements.
    unsafe fn store(self, to: *mut f32, v: Self::V);

    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;

    /// `a * b + c`, rounded once where the instructions allow.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;

    /// The greater one; `b` if either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;

    /// The lesser one; `b` if either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;

    /// To the nearest integer, ties to even, for numbers below 2^22 in magnitude.
    fn round(self, a: Self::V) -> Self::V;

    /// `a * 2^n` for integers `n` in -252..=254; gradual underflow and overflow as in IEEE 754.
    fn scale_by_exponent(self, a: Self::V, n: Self::V) -> Self::V;

    /// Sum of all lanes, in a fixed order.
    fn sum(self, v: Self::V) -> f32;

    /// Greatest of all lanes; anything if one is NaN.
    fn max_lane(self, v: Self::V) -> f32;

    /// Lane `i` is the sum of all lanes of `rows[i]`, in the same order for every `i`. Only the
    /// first `N` are looked at.
    fn sum_each(self, rows: [Self::V; MAX_LANES]) -> Self::V;

    /// The first `N` numbers of `x`, zeros where it is shorter.
    #[inline(always)]
    fn load_part(self, x: &[f32]) -> Self::V {
        if x.len() >= Self::N {
            // SAFETY: just checked.
            return unsafe { self.load(x.as_ptr()) };
        }
        let mut padded = [0.0; MAX_LANES];
        padded[..x.len()].copy_from_slice(x);
        // SAFETY: N is at most MAX_LANES.
        unsafe { self.load(padded.as_ptr()) }
    }

    /// Writes the first lanes over `x`, at most `N`.
    #[inline(always)]
    fn store_part(self, x: &mut [f32], v: Self::V) {
        if x.len() >= Self::N {
            // SAFETY: just checked.
            return unsafe { self.store(x.as_mut_ptr(), v) };
        }
        let mut padded = [0.0; MAX_LANES];
        // SAFETY: N is at most MAX_LANES.
        unsafe { self.store(padded.as_mut_ptr(), v) };
        x.copy_from_slice(&padded[..x.len()]);
    }
}

/// Work written once for every level.
///
/// Implementors mark `run` and what it calls `#[inline(always)]`: only code inlined into
/// [`dispatch`]'s functions is compiled with their instructions.
pub(crate) trait Kernel {
    /// What it gives back.
    type Output;

    fn run<L: Lanes>(self, lanes: L) -> Self::Output;
}

/// Runs `kernel` with the instructions of `level`.
///
/// # Panics
/// If the processor lacks them.
#[cfg(target_arch = "x86_64")]
pub(crate) fn dispatch<K: Kernel>(level: SimdLevel, kernel: K) -> K::Output {
    match level {
        SimdLevel::Plain => kernel.run(Plain),
        SimdLevel::Avx2 => {
            assert!(level.is_available(), "this processor has no AVX2");
            // SAFETY: just checked.
            unsafe { avx2::run(kernel) }
        }
        SimdLevel::Amx | SimdLevel::Avx512 => {
            assert!(level.is_available(), "this processor has no AVX-512");
            // SAFETY: just checked.
            unsafe { avx512::run(kernel) }
        }
    }
}

/// Runs `kernel` with what the target guarantees: no other level is available.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn dispatch<K: Kernel>(_: SimdLevel, kernel: K) -> K::Output {
    kernel.run(Plain)
}

/// Bytes that a processor moves at a time.
pub(super) const CACHE_LINE: usize = 64;

/// Asks the processor to fetch a cache line, and does not wait for it. Any address will do.
#[inline(always)]
#[cfg(target_arch = "x86_64")]
pub(super) fn prefetch(address: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: SSE is part of the target, and a prefetch reads nothing and never faults.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
}

/// Nothing: other architectures fetch ahead by themselves.
#[inline(always)]
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn prefetch(_: *const u8) {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::e4m3;

    /// Every operation on numbers for which the exact result is known.
    struct Operations;

    impl Kernel for Operations {
        type Output = ();

        #[inline(always)]
        fn run<L: Lanes>(self, l: L) {
            let numbers: Vec<f32> = (0..MAX_LANES).map(|i| i as f32 - 3.5).collect();
            let read = |v| {
                let mut out = vec![0.0; L::N];
                l.store_part(&mut out, v);
                out
            };
            let expect = |v, f: &dyn Fn(f32) -> f32| {
                let expected: Vec<f32> = numbers[..L::N].iter().map(|x| f(*x)).collect();
                assert_eq!(read(v), expected);
            };
            let v = l.load_part(&numbers);
            expect(l.add(v, l.splat(1.0)), &|x| x + 1.0);
            expect(l.sub(v, l.splat(1.0)), &|x| x - 1.0);
            expect(l.mul(v, v), &|x| x * x);
            expect(l.div(v, l.splat(2.0)), &|x| x / 2.0);
            expect(l.mul_add(v, v, l.splat(0.5)), &|x| x * x + 0.5);
            expect(l.max(v, l.splat(0.0)), &|x| x.max(0.0));
            expect(l.min(v, l.splat(0.0)), &|x| x.min(0.0));
            expect(l.round(v), &f32::round_ties_even);
            let scaled = l.scale_by_exponent(v, l.splat(-3.0));
            expect(scaled, &|x| x / 8.0);
            let tiny = l.scale_by_exponent(l.splat(1.5), l.splat(-149.0));
            expect(tiny, &|_| f32::from_bits(2));
            let huge = l.scale_by_exponent(l.splat(1.5), l.splat(128.0));
            expect(huge, &|_| f32::INFINITY);
            assert_eq!(l.sum(v), numbers[..L::N].iter().sum::<f32>());
            assert_eq!(l.max_lane(v), numbers[L::N - 1]);
            let nan = l.splat(f32::NAN);
            assert!(read(l.max(v, nan))[0].is_nan() && read(l.min(v, nan))[0].is_nan());
            assert_eq!(read(l.max(nan, v)), numbers[..L::N]);
            let mut rows = [l.splat(0.0); MAX_LANES];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = l.mul(v, l.splat(i as f32));
            }
            let sums: Vec<f32> = (0..L::N).map(|i| l.sum(v) * i as f32).collect();
            assert_eq!(read(l.sum_each(rows)), sums);
        }
    }

    #[test]
    fn every_level_does_the_same_arithmetic() {
        for level in SimdLevel::available() {
            dispatch(level, Operations);
        }
    }

    /// All 65,536 values of both 16-bit types.
    struct Widen;

    impl Kernel for Widen {
        type Output = ();

        #[inline(always)]
        fn run<L: Lanes>(self, l: L) {
            let halves: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
            let brains: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
            let mut out = [0.0; MAX_LANES];
            for at in (0..halves.len()).step_by(L::N) {
                // SAFETY: 65,536 is a multiple of N.
                l.store_part(&mut out[..L::N], unsafe { l.load_f16(&raw const halves[at]) });
                for (half, x) in halves[at..].iter().zip(&out[..L::N]) {
                    assert!(half.to_f32() == *x || (half.is_nan() && x.is_nan()), "{half:?}");
                }
                // SAFETY: as above.
                l.store_part(&mut out[..L::N], unsafe { l.load_bf16(&raw const brains[at]) });
                for (brain, x) in brains[at..].iter().zip(&out[..L::N]) {
                    assert!(brain.to_f32() == *x || (brain.is_nan() && x.is_nan()), "{brain:?}");
                }
            }
        }
    }

    #[test]
    fn every_16_bit_number_widens_exactly() {
        for level in SimdLevel::available() {
            dispatch(level, Widen);
        }
    }

    /// All values of both 8-bit types.
    struct WidenBytes;

    impl Kernel for WidenBytes {
        type Output = ();

        #[inline(always)]
        fn run<L: Lanes>(self, l: L) {
            let codes: Vec<u8> = (0..=u8::MAX).collect();
            let mut out = [0.0; MAX_LANES];
            for at in (0..codes.len()).step_by(L::N) {
                // SAFETY: 256 is a multiple of N.
                l.store_part(&mut out[..L::N], unsafe { l.load_i8((&raw const codes[at]).cast()) });
                for (code, x) in codes[at..].iter().zip(&out[..L::N]) {
                    assert_eq!(f32::from(code.cast_signed()), *x);
                }
                // SAFETY: as above.
                l.store_part(&mut out[..L::N], unsafe { l.load_e4m3(&raw const codes[at]) });
                for (code, x) in codes[at..].iter().zip(&out[..L::N]) {
                    let expected = e4m3::to_f32(*code);
                    assert!(expected.is_nan() || expected.to_bits() == x.to_bits(), "{code:#x}");
                }
            }
        }
    }

    #[test]
    fn every_8_bit_number_widens_exactly() {
        for level in SimdLevel::available() {
            dispatch(level, WidenBytes);
        }
    }
}
