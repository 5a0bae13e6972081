//! Lanes of AVX-512.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{Kernel, Lanes, MAX_LANES};
use crate::e4m3::WIDEN_FACTOR as E4M3_FACTOR;

/// Proof that the processor has AVX-512 F, BW, DQ and VL, and what [`super::avx2`] asks for.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

/// Compiles `kernel` with these instructions.
///
/// # Safety
/// The processor has them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx512(()))
}

// SAFETY of every block below: an `Avx512` exists only inside `run`, whose caller vouches for the
// instructions; pointers are the business of the methods that take them.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Lanes for Avx512 {
    const N: usize = 16;
    type V = __m512;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> __m512 {
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
        }
    }

    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_e4m3(self, from: *const u8) -> __m512 {
        unsafe {
            let codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
            let magnitude = _mm512_and_si512(codes, _mm512_set1_epi32(0x7f));
            let magnitude = _mm512_castsi512_ps(_mm512_slli_epi32::<20>(magnitude));
            let magnitude = _mm512_mul_ps(magnitude, _mm512_set1_ps(E4M3_FACTOR));
            let sign = _mm512_slli_epi32::<24>(_mm512_andnot_si512(_mm512_set1_epi32(0x7f), codes));
            _mm512_or_ps(magnitude, _mm512_castsi512_ps(sign))
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: __m512) {
        unsafe { _mm512_storeu_ps(to, v) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }

    #[inline(always)]
    fn scale_by_exponent(self, a: __m512, n: __m512) -> __m512 {
        unsafe { _mm512_scalef_ps(a, n) }
    }

    #[inline(always)]
    fn sum(self, v: __m512) -> f32 {
        unsafe {
            let high = _mm512_extractf32x8_ps::<1>(v);
            let eight = _mm256_add_ps(_mm512_castps512_ps256(v), high);
            let high = _mm256_extractf128_ps::<1>(eight);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), high);
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    fn max_lane(self, v: __m512) -> f32 {
        unsafe {
            let high = _mm512_extractf32x8_ps::<1>(v);
            let eight = _mm256_max_ps(_mm512_castps512_ps256(v), high);
            let high = _mm256_extractf128_ps::<1>(eight);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), high);
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    fn sum_each(self, rows: [__m512; MAX_LANES]) -> __m512 {
        unsafe {
            let first = sum_quad(rows[0], rows[1], rows[2], rows[3]);
            let second = sum_quad(rows[4], rows[5], rows[6], rows[7]);
            let third = sum_quad(rows[8], rows[9], rows[10], rows[11]);
            let fourth = sum_quad(rows[12], rows[13], rows[14], rows[15]);
            sum_quarters(sum_quarters(first, second), sum_quarters(third, fourth))
        }
    }
}

/// In each quarter of the register: the sums over that quarter of `a`, `b`, `c` and `d`.
#[inline(always)]
unsafe fn sum_quad(a: __m512, b: __m512, c: __m512, d: __m512) -> __m512 {
    // SAFETY: called from `Avx512`'s methods only.
    unsafe {
        let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
        let low = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
        let high = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
        _mm512_add_ps(low, high)
    }
}

/// `[a0 + a1, a2 + a3, b0 + b1, b2 + b3]`, where each is a quarter of its register.
#[inline(always)]
unsafe fn sum_quarters(a: __m512, b: __m512) -> __m512 {
    // SAFETY: called from `Avx512`'s methods only.
    unsafe {
        let even = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
        let odd = _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b);
        _mm512_add_ps(even, odd)
    }
}
