//! Kernels for AVX2: a panel's lanes in two halves of eight, one after the other.

use std::arch::x86_64::*;

use super::{
    format::{
        Format, GroupLayout, Min, PANEL_ROWS, Q4K, Q4One, Q4Zero, Q5K, Q5One, Q5Zero, Q6K, Q8Zero,
        SCALES_BYTES, VECTOR_BYTES, number_panel_bytes,
    },
    tile::{Tile, TileKernel, prefetch},
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
        Dtype::F8E4M3 => unreachable!("packed as bf16"),
    }
}

const fn groups<F: Format>() -> [TileKernel; 4] {
    [group_tile::<F, 1>, group_tile::<F, 2>, group_tile::<F, 3>, group_tile::<F, 4>]
}

/// Twelve registers of sums, two of weights and one of an activation are all but one of 16.
const fn numbers<N: Number>() -> [TileKernel; 6] {
    [
        number_tile::<N, 1>,
        number_tile::<N, 2>,
        number_tile::<N, 3>,
        number_tile::<N, 4>,
        number_tile::<N, 5>,
        number_tile::<N, 6>,
    ]
}

/// Quantised weights times quantised activations.
#[target_feature(enable = "avx2,fma,f16c")]
fn group_tile<F: Format, const ROWS: usize>(tile: &Tile<'_>) {
    let layout = F::LAYOUT;
    let num_super_blocks = tile.num_steps / layout.num_groups;
    assert!(tile.weights.len() >= num_super_blocks * layout.super_block_bytes());
    assert!(tile.x.len() >= tile.num_steps * (2 + layout.num_quads()) * ROWS);
    // SAFETY: the panel and the block are long enough, as asserted.
    let halves = [0, 1].map(|half| unsafe { half_sums::<F, ROWS>(tile, num_super_blocks, half) });
    write::<ROWS>(tile, std::array::from_fn(|row| halves.map(|sums| sums[row])));
}

/// The sums of eight lanes.
///
/// # Safety
/// The tile's panel and block have as many super-blocks.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn half_sums<F: Format, const ROWS: usize>(
    tile: &Tile<'_>,
    num_super_blocks: usize,
    half: usize,
) -> [__m256; ROWS] {
    let layout = F::LAYOUT;
    let (mut weights, mut x) = (tile.weights.as_ptr(), tile.x.as_ptr().cast::<f32>());
    let mut sums = [_mm256_setzero_ps(); ROWS];
    for _ in 0..num_super_blocks {
        // SAFETY: the caller's promise: the pointers walk through the panel and the block.
        unsafe {
            let header = weights;
            weights = weights.add(layout.header_bytes());
            for _ in 0..layout.num_groups {
                if half == 0 {
                    prefetch(weights, layout.group_bytes());
                }
                let vectors = weights.add(layout.factors_bytes() + half * VECTOR_BYTES / 2);
                let dots = group_dots::<F, ROWS>(vectors, x.add(2 * ROWS).cast());
                let (scales, mins) = scales_and_mins(layout, header, weights, half);
                for row in 0..ROWS {
                    let dot = _mm256_cvtepi32_ps(dots[row]);
                    let scaled = _mm256_mul_ps(dot, _mm256_set1_ps(*x.add(row)));
                    sums[row] = _mm256_fmadd_ps(scaled, scales, sums[row]);
                    let x_sum = _mm256_set1_ps(*x.add(ROWS + row));
                    sums[row] = _mm256_fmadd_ps(mins, x_sum, sums[row]);
                }
                weights = weights.add(layout.group_bytes());
                x = x.add((2 + layout.num_quads()) * ROWS);
            }
        }
    }
    sums
}

/// Dot products of eight rows of codes with those of every row of activations.
///
/// # Safety
/// The pointers lead to the half vectors and the words of one group.
#[target_feature(enable = "avx2")]
unsafe fn group_dots<F: Format, const ROWS: usize>(
    vectors: *const u8,
    words: *const i32,
) -> [__m256i; ROWS] {
    let quads_per_sum = const { quads_per_sum(F::LAYOUT.code_bits) };
    let mut dots = [_mm256_setzero_si256(); ROWS];
    for start in (0..F::LAYOUT.num_quads()).step_by(quads_per_sum) {
        let mut pairs = [_mm256_setzero_si256(); ROWS];
        for i in start..F::LAYOUT.num_quads().min(start + quads_per_sum) {
            // SAFETY: the caller's promise.
            unsafe {
                let codes = quad(F::LAYOUT, vectors, i);
                add_pairs::<F, ROWS>(&mut pairs, codes, words.add(i * ROWS));
            }
        }
        for (dot, pairs) in dots.iter_mut().zip(pairs) {
            *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
    }
    dots
}

/// How many quads' pairs of products may be added in 16 bits.
///
/// The magnitude of a code of eight bits, made signed again, is 128 at most.
const fn quads_per_sum(code_bits: usize) -> usize {
    let largest_code = if code_bits == 8 { 128 } else { (1 << code_bits) - 1 };
    i16::MAX as usize / (largest_code * 127 * 2)
}

/// Adds to every row's 16-bit sums the products of four columns, in pairs.
///
/// Codes of eight bits are made signed again, and their sign moved to the activations.
///
/// # Safety
/// `words` points to `ROWS` words.
#[target_feature(enable = "avx2")]
unsafe fn add_pairs<F: Format, const ROWS: usize>(
    sums: &mut [__m256i; ROWS],
    codes: __m256i,
    words: *const i32,
) {
    let signed = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
    let magnitudes = _mm256_abs_epi8(signed);
    for (row, sum) in sums.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        let x = _mm256_set1_epi32(unsafe { words.add(row).read() });
        let pairs = if F::LAYOUT.code_bits == 8 {
            _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(x, signed))
        } else {
            _mm256_maddubs_epi16(codes, x)
        };
        *sum = _mm256_add_epi16(*sum, pairs);
    }
}

/// Codes of quad `i`, one in each byte.
///
/// # Safety
/// `vectors` leads to half the codes of a group, which has more than `i` quads.
#[target_feature(enable = "avx2")]
unsafe fn quad(layout: GroupLayout, vectors: *const u8, i: usize) -> __m256i {
    // SAFETY: the caller's promise; see `format` for what is where.
    let vector = |start: usize| unsafe { _mm256_loadu_si256(vectors.add(start).cast()) };
    if layout.code_bits == 8 {
        return vector(i * VECTOR_BYTES);
    }
    let half = layout.num_quads() / 2;
    let nibbles = vector(i % half * VECTOR_BYTES);
    let nibbles = if i < half { nibbles } else { _mm256_srli_epi16::<4>(nibbles) };
    let nibbles = _mm256_and_si256(nibbles, _mm256_set1_epi8(15));
    if layout.high_bits() == 0 {
        return nibbles;
    }
    // Brings the quad's bits to bit 4; what comes over from a neighbouring byte is masked off.
    let high = vector(layout.high_bits_start());
    let start = layout.high_bits() * i;
    let high = if start < 4 {
        _mm256_sll_epi16(high, _mm_cvtsi32_si128(4 - start as i32))
    } else {
        _mm256_srl_epi16(high, _mm_cvtsi32_si128(start as i32 - 4))
    };
    let mask = _mm256_set1_epi8(((1 << layout.high_bits()) - 1) << 4);
    _mm256_or_si256(nibbles, _mm256_and_si256(high, mask))
}

/// Scales and minimums of half the lanes of a group.
///
/// # Safety
/// `header` leads to a super-block, `factors` to one of its groups.
#[target_feature(enable = "avx2,f16c")]
unsafe fn scales_and_mins(
    layout: GroupLayout,
    header: *const u8,
    factors: *const u8,
    half: usize,
) -> (__m256, __m256) {
    let load = |i: usize| {
        // SAFETY: inside the header and the factors.
        unsafe {
            let halves = header.add(i * SCALES_BYTES + half * SCALES_BYTES / 2);
            let shared = _mm256_cvtph_ps(_mm_loadu_si128(halves.cast()));
            if layout.num_groups == 1 {
                return shared;
            }
            let factors = _mm_loadl_epi64(factors.add(i * PANEL_ROWS + half * HALF).cast());
            _mm256_mul_ps(shared, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(factors)))
        }
    };
    let scales = load(0);
    let mins = match layout.min {
        Min::Stored => load(1),
        // Codes of eight bits were made signed.
        Min::ZeroPoint(128) => _mm256_setzero_ps(),
        Min::ZeroPoint(code) => _mm256_mul_ps(scales, _mm256_set1_ps(-f32::from(code))),
    };
    (scales, mins)
}

/// Plain weights times plain activations.
#[target_feature(enable = "avx2,fma,f16c")]
fn number_tile<N: Number, const ROWS: usize>(tile: &Tile<'_>) {
    let column_bytes = PANEL_ROWS * N::DTYPE.block_bytes();
    assert!(tile.weights.len() >= number_panel_bytes(N::DTYPE, tile.num_steps, PANEL_ROWS));
    assert!(tile.x.len() >= tile.num_steps * ROWS);
    let mut sums = [[_mm256_setzero_ps(); 2]; ROWS];
    let (weights, x) = (tile.weights.as_ptr(), tile.x.as_ptr().cast::<f32>());
    for k in (0..tile.num_steps & !1).step_by(2) {
        // SAFETY: columns `k` and `k + 1` are inside the panel and the block, as asserted above.
        unsafe {
            let weights = weights.add(k * column_bytes);
            prefetch(weights, 2 * column_bytes);
            let (low, high) = (N::pair(weights, 0), N::pair(weights, 1));
            add_column(&mut sums, [low[0], high[0]], x.add(k * ROWS));
            add_column(&mut sums, [low[1], high[1]], x.add((k + 1) * ROWS));
        }
    }
    if tile.num_steps % 2 == 1 {
        let k = tile.num_steps - 1;
        // SAFETY: as above.
        unsafe {
            let weights = weights.add(k * column_bytes);
            add_column(&mut sums, [N::last(weights, 0), N::last(weights, 1)], x.add(k * ROWS));
        }
    }
    write(tile, sums);
}

/// Adds to every row's sums those of one column.
///
/// # Safety
/// `x` points to `ROWS` numbers.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn add_column<const ROWS: usize>(
    sums: &mut [[__m256; 2]; ROWS],
    column: [__m256; 2],
    x: *const f32,
) {
    for (row, sums) in sums.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        let x = _mm256_set1_ps(unsafe { x.add(row).read() });
        sums[0] = _mm256_fmadd_ps(column[0], x, sums[0]);
        sums[1] = _mm256_fmadd_ps(column[1], x, sums[1]);
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn write<const ROWS: usize>(tile: &Tile<'_>, sums: [[__m256; 2]; ROWS]) {
    // By index, so that the sums stay in registers.
    #[allow(clippy::needless_range_loop)]
    for row in 0..ROWS {
        let mut lanes = [0.0_f32; PANEL_ROWS];
        // SAFETY: both halves fit; the kernel's caller keeps everybody else off the tile.
        unsafe {
            _mm256_storeu_ps(lanes.as_mut_ptr(), sums[row][0]);
            _mm256_storeu_ps(lanes.as_mut_ptr().add(HALF), sums[row][1]);
            tile.out.write(row, lanes);
        }
    }
}

/// A plain type of weight.
trait Number {
    const DTYPE: Dtype;

    /// Half the lanes of two neighbouring columns of a panel.
    ///
    /// # Safety
    /// `weights` points to the columns, and the processor has AVX2 and F16C.
    unsafe fn pair(weights: *const u8, half: usize) -> [__m256; 2];

    /// Half the lanes of the last column of an odd number of them.
    ///
    /// # Safety
    /// As for `pair`.
    unsafe fn last(weights: *const u8, half: usize) -> __m256;
}

struct F32;
struct F16;
struct Bf16;

impl Number for F32 {
    const DTYPE: Dtype = Dtype::F32;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn pair(weights: *const u8, half: usize) -> [__m256; 2] {
        // SAFETY: the caller's promise.
        unsafe { [Self::last(weights, half), Self::last(weights.add(64), half)] }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn last(weights: *const u8, half: usize) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_ps(weights.add(half * 32).cast()) }
    }
}

impl Number for F16 {
    const DTYPE: Dtype = Dtype::F16;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn pair(weights: *const u8, half: usize) -> [__m256; 2] {
        // SAFETY: the caller's promise.
        unsafe { [Self::last(weights, half), Self::last(weights.add(32), half)] }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn last(weights: *const u8, half: usize) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(weights.add(half * 16).cast())) }
    }
}

impl Number for Bf16 {
    const DTYPE: Dtype = Dtype::BF16;

    /// A bf16 is the upper half of an f32.
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn pair(weights: *const u8, half: usize) -> [__m256; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let words = _mm256_loadu_si256(weights.add(half * 32).cast());
            let upper = _mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000_u32.cast_signed()));
            [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(words)), _mm256_castsi256_ps(upper)]
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn last(weights: *const u8, half: usize) -> __m256 {
        // SAFETY: the caller's promise; the column that is missing is there as zeros.
        unsafe { Self::pair(weights, half)[0] }
    }
}
