//! Activations to signed bytes, a group at a time.
//!
//! A group of activations is `scale * code` with scale = max |x| / 127. All levels give the same
//! bits: one product and one rounding to nearest even for each code.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::activations::Part;
use crate::cpu::simd::SimdLevel;

/// Quantises a part in groups of `LEN` columns; for the layout see [`super::activations`].
pub(super) fn part<const LEN: usize>(level: SimdLevel, part: &Part<'_>, out: &mut [u32]) {
    match level {
        // SAFETY: whoever chose the level made sure that the processor has it.
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Amx | SimdLevel::Avx512 => unsafe { part_avx512::<LEN>(part, out) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx2 => unsafe { part_avx2::<LEN>(part, out) },
        _ => each_group(part, out, quantise::<LEN>),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")]
fn part_avx512<const LEN: usize>(part: &Part<'_>, out: &mut [u32]) {
    each_group(part, out, |group| quantise_avx512::<LEN>(group));
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn part_avx2<const LEN: usize>(part: &Part<'_>, out: &mut [u32]) {
    each_group(part, out, quantise::<LEN>);
}

/// A group's scale, the sum of its codes, and the codes.
type Quantised<const LEN: usize> = (f32, i32, [i8; LEN]);

#[inline(always)]
fn each_group<const LEN: usize>(
    part: &Part<'_>,
    out: &mut [u32],
    quantise: impl Fn(&[f32; LEN]) -> Quantised<LEN>,
) {
    let num_rows = part.num_rows();
    for (g, out) in out.chunks_exact_mut((2 + LEN / 4) * num_rows).enumerate() {
        let (scales, rest) = out.split_at_mut(num_rows);
        let (sums, words) = rest.split_at_mut(num_rows);
        for row in 0..num_rows {
            let group = part.row(row)[g * LEN..].first_chunk().expect("LEN divides cols");
            let (scale, sum, codes) = quantise(group);
            scales[row] = scale.to_bits();
            sums[row] = (scale * sum as f32).to_bits();
            let words = words[row..].iter_mut().step_by(num_rows);
            for (word, quad) in words.zip(codes.as_chunks::<4>().0) {
                *word = u32::from_ne_bytes(quad.map(i8::cast_unsigned));
            }
        }
    }
}

/// Nearest codes under the scale that takes the largest magnitude to 127.
///
/// A NaN or an infinity makes the scale NaN or infinite, hence the outputs too.
#[inline(always)]
fn quantise<const LEN: usize>(x: &[f32; LEN]) -> Quantised<LEN> {
    /// 1.5 * 2^23: adding it leaves no bits for a fraction, and rounds to nearest even.
    const ROUNDER: f32 = 12_582_912.0;
    // Magnitudes compare as their bits do, NaN above all.
    let largest = x.iter().map(|x| (x.to_bits() & 0x7fff_ffff) as i32).fold(0, i32::max);
    let (scale, inverse) = scale_and_inverse(largest);
    // The code is in the low bits of the rounded sum.
    let codes = x.map(|x| (x * inverse + ROUNDER).to_bits() as i8);
    (scale, codes.iter().map(|code| i32::from(*code)).sum(), codes)
}

#[inline(always)]
fn scale_and_inverse(largest_bits: i32) -> (f32, f32) {
    let largest = f32::from_bits(largest_bits.cast_unsigned());
    (largest / 127.0, if largest > 0.0 { 127.0 / largest } else { 0.0 })
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn quantise_avx512<const LEN: usize>(x: &[f32; LEN]) -> Quantised<LEN> {
    const { assert!(LEN.is_multiple_of(16)) };
    let magnitude = _mm512_set1_epi32(0x7fff_ffff);
    let mut largest = _mm512_setzero_si512();
    for x in x.as_chunks::<16>().0 {
        // SAFETY: sixteen numbers.
        let bits = unsafe { _mm512_loadu_si512(x.as_ptr().cast()) };
        largest = _mm512_max_epi32(largest, _mm512_and_si512(bits, magnitude));
    }
    let (scale, inverse) = scale_and_inverse(_mm512_reduce_max_epi32(largest));
    let mut sums = _mm512_setzero_si512();
    let mut codes = [0; LEN];
    for (x, codes) in x.as_chunks::<16>().0.iter().zip(codes.as_chunks_mut::<16>().0) {
        // SAFETY: sixteen numbers in, sixteen bytes out.
        unsafe {
            let scaled = _mm512_mul_ps(_mm512_loadu_ps(x.as_ptr()), _mm512_set1_ps(inverse));
            let rounded = _mm512_cvtps_epi32(scaled);
            sums = _mm512_add_epi32(sums, rounded);
            _mm_storeu_si128(codes.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(rounded));
        }
    }
    (scale, _mm512_reduce_add_epi32(sums), codes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_to_nearest_under_the_largest_magnitude() {
        let mut x = [0.0; 16];
        x[..6].copy_from_slice(&[12.7, -12.7, 0.1, -0.249, 0.26, 6.349]);
        let (scale, sum, codes) = quantise(&x);
        assert!((scale - 0.1).abs() < 1e-8);
        assert_eq!(codes[..7], [127, -127, 1, -2, 3, 63, 0]);
        assert_eq!(sum, 1 - 2 + 3 + 63);
        assert_eq!(quantise(&[0.0; 16]), (0.0, 0, [0; 16]));
    }

    #[test]
    fn what_is_not_finite_stays_visible() {
        let mut x = [1.0; 32];
        x[7] = f32::NAN;
        x[9] = f32::INFINITY;
        assert!(quantise(&x).0.is_nan());
        x[7] = -f32::NAN;
        assert!(quantise(&x).0.is_nan());
        x[7] = 0.0;
        assert_eq!(quantise(&x).0, f32::INFINITY);
    }

    #[test]
    fn tiny_groups_do_not_overflow() {
        let mut x = [0.0; 16];
        x[3] = f32::MIN_POSITIVE / 1e6;
        let (scale, _, codes) = quantise(&x);
        assert!(scale.is_finite());
        assert!(codes.iter().all(|code| f32::from(*code) * scale <= x[3] * 2.0));
    }

    #[test]
    fn all_levels_give_the_same_bits() {
        let (num_rows, cols) = (3, 192);
        let mut x: Vec<f32> = (0..num_rows * cols).map(|i| (i as f32 * 0.7).sin() * 4.0).collect();
        // Ties, zeros, and numbers too small for an inverse scale.
        x[..32].fill(0.0);
        x[32..64].iter_mut().enumerate().for_each(|(i, x)| *x = i as f32 * 0.5);
        x[63] = 127.0;
        x[64..96].fill(1e-40);
        let run = |level| {
            let mut out = vec![0; num_rows * cols / 32 * 10];
            let whole = Part::whole(&x, num_rows);
            part::<32>(level, &whole, &mut out);
            let mut halves = vec![0; num_rows * cols / 16 * 6];
            part::<16>(level, &whole, &mut halves);
            (out, halves)
        };
        for level in SimdLevel::available() {
            assert_eq!(run(level), run(SimdLevel::Plain), "{level:?}");
        }
    }
}
