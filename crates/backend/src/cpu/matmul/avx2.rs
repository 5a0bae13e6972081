//! Kernels for AVX2: a panel's lanes in two halves of eight, one after the other.

use std::arch::x86_64::*;

use super::{
    format::{
        Format, GroupLayout, Min, PANEL_ROWS, Q4K, Q4One, Q4Zero, Q5K, Q5One, Q5Zero, Q6K, Q8Zero,
        VECTOR_BYTES,
    },
    tile::{Tile, TileKernel},
};
use crate::Dtype;

/// Lanes of a register.
const HALF: usize = PANEL_ROWS / 2;

/// See [`super::kernels::kernels`].
pub(super) fn kernels(dtype: Dtype) -> &'static [TileKernel] {
    match dtype {
        Dtype::F32 => &const { numbers::<F32>() },
        Dtype::F16 => &const { numbers::<F16>() },
        Dtype::BF16 => &const { numbers::<Bf16>() },
        Dtype::Q4_0 => &const { groups::<Q4Zero>() },
        Dtype::Q4_1 => &const { groups::<Q4One>() },
        Dtype::Q5_0 => &const { groups::<Q5Zero>() },
        Dtype::Q5_1 => &const { groups::<Q5One>() },
        Dtype::Q8_0 => &const { groups::<Q8Zero>() },
        Dtype::Q4K => &const { groups::<Q4K>() },
        Dtype::Q5K => &const { groups::<Q5K>() },
        Dtype::Q6K => &const { groups::<Q6K>() },
    }
}

const fn groups<F: Format>() -> [TileKernel; 4] {
    [group_tile::<F, 1>, group_tile::<F, 2>, group_tile::<F, 3>, group_tile::<F, 4>]
}

const fn numbers<N: Number>() -> [TileKernel; 4] {
    [number_tile::<N, 1>, number_tile::<N, 2>, number_tile::<N, 3>, number_tile::<N, 4>]
}

/// Quantised weights times quantised activations.
#[target_feature(enable = "avx2,fma,f16c")]
fn group_tile<F: Format, const ROWS: usize>(tile: &Tile<'_>) {
    let layout = F::LAYOUT;
    let x_group_words = (2 + layout.group_len / 4) * ROWS;
    assert!(tile.weights.len() >= tile.num_steps * layout.group_bytes());
    assert!(tile.x.len() >= tile.num_steps * x_group_words);
    let mut sums = [[_mm256_setzero_ps(); 2]; ROWS];
    for half in 0..2 {
        for g in 0..tile.num_steps {
            // SAFETY: group `g` is inside the panel and the block, as asserted above.
            unsafe {
                let weights = tile.weights.as_ptr().add(g * layout.group_bytes());
                let x = tile.x.as_ptr().add(g * x_group_words).cast::<f32>();
                let vectors = weights.add(layout.header_bytes() + half * VECTOR_BYTES / 2);
                let dots = group_dots::<F, ROWS>(vectors, x.add(2 * ROWS).cast());
                let (scales, mins) = scales_and_mins(layout, weights, half);
                for row in 0..ROWS {
                    let sum = &mut sums[row][half];
                    let dot = _mm256_cvtepi32_ps(dots[row]);
                    let scaled = _mm256_mul_ps(dot, _mm256_set1_ps(*x.add(row)));
                    *sum = _mm256_fmadd_ps(scaled, scales, *sum);
                    *sum = _mm256_fmadd_ps(mins, _mm256_set1_ps(*x.add(ROWS + row)), *sum);
                }
            }
        }
    }
    write(tile, sums);
}

/// Dot products of eight rows of codes with every row's.
///
/// # Safety
/// The pointers lead to the half vectors and the words of one group.
#[target_feature(enable = "avx2")]
unsafe fn group_dots<F: Format, const ROWS: usize>(
    vectors: *const u8,
    words: *const i32,
) -> [__m256i; ROWS] {
    let num_vectors = F::LAYOUT.num_vectors();
    let nibble = _mm256_set1_epi8(15);
    let mut dots = [_mm256_setzero_si256(); ROWS];
    for i in 0..num_vectors {
        // SAFETY: the caller's promise.
        unsafe {
            let codes = _mm256_loadu_si256(vectors.add(i * VECTOR_BYTES).cast());
            if F::LAYOUT.code_bits == 4 {
                let high = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), nibble);
                let high_words = words.add((i + num_vectors) * ROWS);
                add_dots::<F, ROWS>(
                    &mut dots,
                    _mm256_and_si256(codes, nibble),
                    words.add(i * ROWS),
                );
                add_dots::<F, ROWS>(&mut dots, high, high_words);
            } else {
                add_dots::<F, ROWS>(&mut dots, codes, words.add(i * ROWS));
            }
        }
    }
    dots
}

/// Adds to every row's dots those of four columns.
///
/// Pairs of products are added in 16 bits. For codes below 64 two of them reach 63 * 127 * 2, which
/// fits. Codes of eight bits are made signed again and moved to the side of the activations' sign:
/// then a pair reaches 128 * 127 * 2 at most, which fits too.
///
/// # Safety
/// `words` points to `ROWS` words.
#[target_feature(enable = "avx2")]
unsafe fn add_dots<F: Format, const ROWS: usize>(
    dots: &mut [__m256i; ROWS],
    codes: __m256i,
    words: *const i32,
) {
    let ones = _mm256_set1_epi16(1);
    let signed = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
    let magnitudes = _mm256_abs_epi8(signed);
    for (row, dot) in dots.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        let x = _mm256_set1_epi32(unsafe { words.add(row).read() });
        let pairs = if F::LAYOUT.min == Min::ZeroPoint(128) {
            _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(x, signed))
        } else {
            _mm256_maddubs_epi16(codes, x)
        };
        *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(pairs, ones));
    }
}

/// Scales and minimums of half the lanes of the group at `header`.
///
/// # Safety
/// `header` points to a header of this layout.
#[target_feature(enable = "avx2,f16c")]
unsafe fn scales_and_mins(layout: GroupLayout, header: *const u8, half: usize) -> (__m256, __m256) {
    let load = |start: usize| {
        // SAFETY: inside the header.
        unsafe {
            let start = header.add(start + half * layout.scales_bytes() / 2);
            if layout.wide_scales {
                _mm256_loadu_ps(start.cast())
            } else {
                _mm256_cvtph_ps(_mm_loadu_si128(start.cast()))
            }
        }
    };
    let scales = load(0);
    let mins = match layout.min {
        Min::Stored => load(layout.scales_bytes()),
        // The codes were made signed.
        Min::ZeroPoint(128) => _mm256_setzero_ps(),
        Min::ZeroPoint(code) => _mm256_mul_ps(scales, _mm256_set1_ps(-f32::from(code))),
    };
    (scales, mins)
}

/// Plain weights times plain activations.
#[target_feature(enable = "avx2,fma,f16c")]
fn number_tile<N: Number, const ROWS: usize>(tile: &Tile<'_>) {
    assert!(tile.weights.len() >= tile.num_steps * PANEL_ROWS * N::BYTES);
    assert!(tile.x.len() >= tile.num_steps * ROWS);
    let mut sums = [[_mm256_setzero_ps(); 2]; ROWS];
    for k in 0..tile.num_steps {
        // SAFETY: column `k` is inside the panel and the block, as asserted above.
        unsafe {
            let weights = tile.weights.as_ptr().add(k * PANEL_ROWS * N::BYTES);
            let x = tile.x.as_ptr().cast::<f32>().add(k * ROWS);
            let columns = [N::load(weights), N::load(weights.add(HALF * N::BYTES))];
            for (row, sums) in sums.iter_mut().enumerate() {
                let x = _mm256_set1_ps(*x.add(row));
                sums[0] = _mm256_fmadd_ps(columns[0], x, sums[0]);
                sums[1] = _mm256_fmadd_ps(columns[1], x, sums[1]);
            }
        }
    }
    write(tile, sums);
}

#[target_feature(enable = "avx2")]
fn write<const ROWS: usize>(tile: &Tile<'_>, sums: [[__m256; 2]; ROWS]) {
    for (row, halves) in sums.into_iter().enumerate() {
        let mut lanes = [0.0_f32; PANEL_ROWS];
        // SAFETY: both halves fit; the kernel's caller keeps everybody else off the tile.
        unsafe {
            _mm256_storeu_ps(lanes.as_mut_ptr(), halves[0]);
            _mm256_storeu_ps(lanes.as_mut_ptr().add(HALF), halves[1]);
            tile.out.write(row, lanes);
        }
    }
}

/// A plain type of weight.
trait Number {
    const BYTES: usize;

    /// Eight numbers.
    ///
    /// # Safety
    /// `weights` points to as many, and the processor has AVX2 and F16C.
    unsafe fn load(weights: *const u8) -> __m256;
}

struct F32;
struct F16;
struct Bf16;

impl Number for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load(weights: *const u8) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_ps(weights.cast()) }
    }
}

impl Number for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(weights: *const u8) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(weights.cast())) }
    }
}

impl Number for Bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(weights: *const u8) -> __m256 {
        // SAFETY: the caller's promise. A bf16 is the upper half of an f32.
        unsafe {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(weights.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        }
    }
}
