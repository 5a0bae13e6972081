//! Lanes of AVX2, FMA and F16C.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{Kernel, Lanes, MAX_LANES};
use crate::e4m3::WIDEN_FACTOR as E4M3_FACTOR;

/// Proof that the processor has AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

/// Compiles `kernel` with these instructions.
///
/// # Safety
/// The processor has them.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx2(()))
}

// SAFETY of every block below: an `Avx2` exists only inside `run`, whose caller vouches for the
// instructions; pointers are the business of the methods that take them.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Lanes for Avx2 {
    const N: usize = 8;
    type V = __m256;

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m256 {
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> __m256 {
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> __m256 {
        unsafe {
            let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
        }
    }

    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_e4m3(self, from: *const u8) -> __m256 {
        unsafe {
            let codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()));
            let magnitude = _mm256_and_si256(codes, _mm256_set1_epi32(0x7f));
            let magnitude = _mm256_castsi256_ps(_mm256_slli_epi32::<20>(magnitude));
            let magnitude = _mm256_mul_ps(magnitude, _mm256_set1_ps(E4M3_FACTOR));
            let sign = _mm256_slli_epi32::<24>(_mm256_andnot_si256(_mm256_set1_epi32(0x7f), codes));
            _mm256_or_ps(magnitude, _mm256_castsi256_ps(sign))
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: __m256) {
        unsafe { _mm256_storeu_ps(to, v) }
    }

    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_div_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_max_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_min_ps(a, b) }
    }

    #[inline(always)]
    fn round(self, a: __m256) -> __m256 {
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }

    #[inline(always)]
    fn scale_by_exponent(self, a: __m256, n: __m256) -> __m256 {
        unsafe {
            // In two halves, since 2^n alone may be too large or too small for an f32.
            let n = _mm256_cvtps_epi32(n);
            let first = _mm256_srai_epi32::<1>(n);
            let second = _mm256_sub_epi32(n, first);
            let bias = _mm256_set1_epi32(127);
            let first = _mm256_slli_epi32::<23>(_mm256_add_epi32(first, bias));
            let second = _mm256_slli_epi32::<23>(_mm256_add_epi32(second, bias));
            let scaled = _mm256_mul_ps(a, _mm256_castsi256_ps(first));
            _mm256_mul_ps(scaled, _mm256_castsi256_ps(second))
        }
    }

    #[inline(always)]
    fn sum(self, v: __m256) -> f32 {
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    fn max_lane(self, v: __m256) -> f32 {
        unsafe {
            let four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    fn sum_each(self, rows: [__m256; MAX_LANES]) -> __m256 {
        unsafe {
            let low = sum_quad(rows[0], rows[1], rows[2], rows[3]);
            let high = sum_quad(rows[4], rows[5], rows[6], rows[7]);
            _mm256_add_ps(
                _mm256_permute2f128_ps::<0x20>(low, high),
                _mm256_permute2f128_ps::<0x31>(low, high),
            )
        }
    }
}

/// In each half of the register: the sums over that half of `a`, `b`, `c` and `d`.
#[inline(always)]
unsafe fn sum_quad(a: __m256, b: __m256, c: __m256, d: __m256) -> __m256 {
    // SAFETY: called from `Avx2`'s methods only.
    unsafe {
        let ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        let cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
        let (ab, cd) = (_mm256_castps_pd(ab), _mm256_castps_pd(cd));
        let low = _mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd));
        let high = _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd));
        _mm256_add_ps(low, high)
    }
}
