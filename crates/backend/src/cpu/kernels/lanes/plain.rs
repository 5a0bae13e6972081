//! Lanes without any instructions of their own: arrays, which the compiler vectorises as it can.

use std::array::from_fn;

use half::{bf16, f16};

use super::{Lanes, MAX_LANES};
use crate::e4m3;

/// Eight numbers in an array.
#[derive(Clone, Copy)]
pub(crate) struct Plain;

/// Adding and subtracting it rounds to an integer: 1.5 * 2^23.
const ROUNDER: f32 = 12_582_912.0;

impl Lanes for Plain {
    const N: usize = 8;
    type V = [f32; 8];

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; 8]
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::V {
        // SAFETY: the caller's.
        unsafe { from.cast::<Self::V>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> Self::V {
        // SAFETY: the caller's.
        let halves = unsafe { from.cast::<[f16; 8]>().read_unaligned() };
        halves.map(f16::to_f32)
    }

    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> Self::V {
        // SAFETY: the caller's.
        let brains = unsafe { from.cast::<[bf16; 8]>().read_unaligned() };
        brains.map(|x| f32::from_bits(u32::from(x.to_bits()) << 16))
    }

    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> Self::V {
        // SAFETY: the caller's.
        unsafe { from.cast::<[i8; 8]>().read_unaligned() }.map(f32::from)
    }

    #[inline(always)]
    unsafe fn load_e4m3(self, from: *const u8) -> Self::V {
        // SAFETY: the caller's.
        unsafe { from.cast::<[u8; 8]>().read_unaligned() }.map(e4m3::widen)
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: Self::V) {
        // SAFETY: the caller's.
        unsafe { to.cast::<Self::V>().write_unaligned(v) }
    }

    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        from_fn(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        from_fn(|i| a[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        from_fn(|i| a[i] / b[i])
    }

    /// Rounds twice: without the instruction a single rounding is a call into libm.
    #[inline(always)]
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        from_fn(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn round(self, a: Self::V) -> Self::V {
        from_fn(|i| (a[i] + ROUNDER) - ROUNDER)
    }

    #[inline(always)]
    fn scale_by_exponent(self, a: Self::V, n: Self::V) -> Self::V {
        from_fn(|i| {
            let n = n[i] as i32;
            let (first, second) = (n >> 1, n - (n >> 1));
            let power = |n: i32| f32::from_bits(((n + 127) << 23).cast_unsigned());
            a[i] * power(first) * power(second)
        })
    }

    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        let [a, b, c, d, e, f, g, h] = v;
        ((a + e) + (b + f)) + ((c + g) + (d + h))
    }

    #[inline(always)]
    fn max_lane(self, v: Self::V) -> f32 {
        v.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }

    #[inline(always)]
    fn sum_each(self, rows: [Self::V; MAX_LANES]) -> Self::V {
        from_fn(|i| self.sum(rows[i]))
    }
}
