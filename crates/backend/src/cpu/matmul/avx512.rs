//! Kernels for AVX-512 with VNNI: one register holds one column, or four, of a panel.

use std::arch::x86_64::*;

use super::{
    format::{
        Format, GroupLayout, Min, PANEL_ROWS, Q4K, Q4One, Q4Zero, Q5K, Q5One, Q5Zero, Q6K, Q8Zero,
        SCALES_BYTES, VECTOR_BYTES, number_panel_bytes,
    },
    tile::{Tile, TileKernel, prefetch},
};
use crate::Dtype;

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

const fn groups<F: Format>() -> [TileKernel; 12] {
    [
        group_tile::<F, 1>,
        group_tile::<F, 2>,
        group_tile::<F, 3>,
        group_tile::<F, 4>,
        group_tile::<F, 5>,
        group_tile::<F, 6>,
        group_tile::<F, 7>,
        group_tile::<F, 8>,
        group_tile::<F, 9>,
        group_tile::<F, 10>,
        group_tile::<F, 11>,
        group_tile::<F, 12>,
    ]
}

const fn numbers<N: Number>() -> [TileKernel; 12] {
    [
        number_tile::<N, 1>,
        number_tile::<N, 2>,
        number_tile::<N, 3>,
        number_tile::<N, 4>,
        number_tile::<N, 5>,
        number_tile::<N, 6>,
        number_tile::<N, 7>,
        number_tile::<N, 8>,
        number_tile::<N, 9>,
        number_tile::<N, 10>,
        number_tile::<N, 11>,
        number_tile::<N, 12>,
    ]
}

/// Quantised weights times quantised activations.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn group_tile<F: Format, const ROWS: usize>(tile: &Tile<'_>) {
    let layout = F::LAYOUT;
    let num_super_blocks = tile.num_steps / layout.num_groups;
    let x_group_words = (2 + layout.num_quads()) * ROWS;
    assert!(tile.weights.len() >= num_super_blocks * layout.super_block_bytes());
    assert!(tile.x.len() >= tile.num_steps * x_group_words);
    let (mut weights, mut x) = (tile.weights.as_ptr(), tile.x.as_ptr().cast::<f32>());
    let mut sums = [_mm512_setzero_ps(); ROWS];
    for _ in 0..num_super_blocks {
        // SAFETY: the pointers walk through the panel and the block, which are long enough for
        // this many super-blocks, as asserted above.
        unsafe {
            let header = weights;
            weights = weights.add(layout.header_bytes());
            for _ in 0..layout.num_groups {
                prefetch(weights, layout.group_bytes());
                let (scales, mins) = scales_and_mins(layout, header, weights);
                let dots = group_dots::<F, ROWS>(
                    weights.add(layout.factors_bytes()),
                    x.add(2 * ROWS).cast(),
                );
                for row in 0..ROWS {
                    let dot = _mm512_cvtepi32_ps(dots[row]);
                    let scaled = _mm512_mul_ps(dot, _mm512_set1_ps(*x.add(row)));
                    sums[row] = _mm512_fmadd_ps(scaled, scales, sums[row]);
                    let x_sum = _mm512_set1_ps(*x.add(ROWS + row));
                    sums[row] = _mm512_fmadd_ps(mins, x_sum, sums[row]);
                }
                weights = weights.add(layout.group_bytes());
                x = x.add(x_group_words);
            }
        }
    }
    write(tile, sums);
}

/// Dot products of 16 rows of codes with those of every row of activations.
///
/// # Safety
/// The pointers lead to the codes and the words of one group.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn group_dots<F: Format, const ROWS: usize>(
    vectors: *const u8,
    words: *const i32,
) -> [__m512i; ROWS] {
    let mut dots = [_mm512_setzero_si512(); ROWS];
    for i in 0..F::LAYOUT.num_quads() {
        // SAFETY: the caller's promise.
        let codes = unsafe { quad(F::LAYOUT, vectors, i) };
        for (row, dot) in dots.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            let word = unsafe { words.add(i * ROWS + row).read() };
            *dot = _mm512_dpbusd_epi32(*dot, codes, _mm512_set1_epi32(word));
        }
    }
    dots
}

/// Codes of quad `i`, one in each byte.
///
/// # Safety
/// `vectors` leads to the codes of a group, which has more than `i` quads.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn quad(layout: GroupLayout, vectors: *const u8, i: usize) -> __m512i {
    // SAFETY: the caller's promise; see `format` for what is where.
    let vector = |start: usize| unsafe { _mm512_loadu_si512(vectors.add(start).cast()) };
    if layout.code_bits == 8 {
        return vector(i * VECTOR_BYTES);
    }
    let half = layout.num_quads() / 2;
    let nibbles = vector(i % half * VECTOR_BYTES);
    let nibbles = if i < half { nibbles } else { _mm512_srli_epi16::<4>(nibbles) };
    let nibbles = _mm512_and_si512(nibbles, _mm512_set1_epi8(15));
    if layout.high_bits() == 0 {
        return nibbles;
    }
    // Brings the quad's bits to bit 4; what comes over from a neighbouring byte is masked off.
    let high = vector(layout.high_bits_start());
    let start = layout.high_bits() * i;
    let high = if start < 4 {
        _mm512_sll_epi16(high, _mm_cvtsi32_si128(4 - start as i32))
    } else {
        _mm512_srl_epi16(high, _mm_cvtsi32_si128(start as i32 - 4))
    };
    let mask = _mm512_set1_epi8(((1 << layout.high_bits()) - 1) << 4);
    _mm512_or_si512(nibbles, _mm512_and_si512(high, mask))
}

/// Scales and minimums of a group.
///
/// # Safety
/// `header` leads to a super-block, `factors` to one of its groups.
#[target_feature(enable = "avx512f")]
unsafe fn scales_and_mins(
    layout: GroupLayout,
    header: *const u8,
    factors: *const u8,
) -> (__m512, __m512) {
    let load = |i: usize| {
        // SAFETY: inside the header and the factors.
        unsafe {
            let halves = _mm256_loadu_si256(header.add(i * SCALES_BYTES).cast());
            let shared = _mm512_cvtph_ps(halves);
            if layout.num_groups == 1 {
                return shared;
            }
            let factors = _mm_loadu_si128(factors.add(i * PANEL_ROWS).cast());
            _mm512_mul_ps(shared, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(factors)))
        }
    };
    let scales = load(0);
    let mins = match layout.min {
        Min::Stored => load(1),
        Min::ZeroPoint(code) => _mm512_mul_ps(scales, _mm512_set1_ps(-f32::from(code))),
    };
    (scales, mins)
}

/// Plain weights times plain activations: sums over the even columns and over the odd ones.
///
/// One chain of additions per row would take four cycles a column, which is slower than memory.
#[target_feature(enable = "avx512f")]
fn number_tile<N: Number, const ROWS: usize>(tile: &Tile<'_>) {
    let column_bytes = PANEL_ROWS * N::DTYPE.block_bytes();
    assert!(tile.weights.len() >= number_panel_bytes(N::DTYPE, tile.num_steps, PANEL_ROWS));
    assert!(tile.x.len() >= tile.num_steps * ROWS);
    let (weights, x) = (tile.weights.as_ptr(), tile.x.as_ptr().cast::<f32>());
    let mut even = [_mm512_setzero_ps(); ROWS];
    let mut odd = [_mm512_setzero_ps(); ROWS];
    for k in (0..tile.num_steps & !1).step_by(2) {
        // SAFETY: columns `k` and `k + 1` are inside the panel and the block, as asserted above.
        unsafe {
            let weights = weights.add(k * column_bytes);
            prefetch(weights, 2 * column_bytes);
            let columns = N::pair(weights);
            add_column::<ROWS>(&mut even, columns[0], x.add(k * ROWS));
            add_column::<ROWS>(&mut odd, columns[1], x.add((k + 1) * ROWS));
        }
    }
    if tile.num_steps % 2 == 1 {
        let k = tile.num_steps - 1;
        // SAFETY: as above.
        unsafe {
            add_column::<ROWS>(&mut even, N::last(weights.add(k * column_bytes)), x.add(k * ROWS));
        }
    }
    write::<ROWS>(tile, std::array::from_fn(|row| _mm512_add_ps(even[row], odd[row])));
}

/// Adds to every row's sums those of one column.
///
/// # Safety
/// `x` points to `ROWS` numbers.
#[target_feature(enable = "avx512f")]
unsafe fn add_column<const ROWS: usize>(sums: &mut [__m512; ROWS], column: __m512, x: *const f32) {
    for (row, sum) in sums.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        let x = unsafe { x.add(row).read() };
        *sum = _mm512_fmadd_ps(column, _mm512_set1_ps(x), *sum);
    }
}

/// Writes a tile's results.
#[target_feature(enable = "avx512f")]
pub(super) fn write<const ROWS: usize>(tile: &Tile<'_>, sums: [__m512; ROWS]) {
    // By index, so that the sums stay in registers.
    #[allow(clippy::needless_range_loop)]
    for row in 0..ROWS {
        // SAFETY: the kernel's caller keeps everybody else off the tile.
        unsafe { write_row(tile, row, 0, sums[row]) };
    }
}

/// Writes the results of row `row` and panel `panel` of a tile.
///
/// # Safety
/// Nobody else uses the row's lanes meanwhile.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn write_row(tile: &Tile<'_>, row: usize, panel: usize, sums: __m512) {
    let (out, first) = (&tile.out, panel * PANEL_ROWS);
    let num_lanes = PANEL_ROWS.min(out.num_lanes - first);
    let mask = (0xffff_u32 >> (PANEL_ROWS - num_lanes)) as __mmask16;
    // SAFETY: the caller's promise; the mask keeps loads and stores to the lanes that there are.
    unsafe {
        let lanes = out.lanes(row)[first..].as_mut_ptr();
        let mut base = _mm512_setzero_ps();
        if out.accumulate {
            base = _mm512_maskz_loadu_ps(mask, lanes);
        }
        if let Some(bias) = out.bias {
            let bias = &bias[first..first + num_lanes];
            base = _mm512_add_ps(base, _mm512_maskz_loadu_ps(mask, bias.as_ptr()));
        }
        _mm512_mask_storeu_ps(lanes, mask, _mm512_add_ps(base, sums));
    }
}

/// A plain type of weight.
trait Number {
    const DTYPE: Dtype;

    /// Two neighbouring columns of a panel.
    ///
    /// # Safety
    /// `weights` points to them, and the processor has AVX-512.
    unsafe fn pair(weights: *const u8) -> [__m512; 2];

    /// The last column of an odd number of them.
    ///
    /// # Safety
    /// As for `pair`.
    unsafe fn last(weights: *const u8) -> __m512;
}

struct F32;
struct F16;
struct Bf16;

impl Number for F32 {
    const DTYPE: Dtype = Dtype::F32;

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn pair(weights: *const u8) -> [__m512; 2] {
        // SAFETY: the caller's promise.
        unsafe { [Self::last(weights), Self::last(weights.add(64))] }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn last(weights: *const u8) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_ps(weights.cast()) }
    }
}

impl Number for F16 {
    const DTYPE: Dtype = Dtype::F16;

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn pair(weights: *const u8) -> [__m512; 2] {
        // SAFETY: the caller's promise.
        unsafe { [Self::last(weights), Self::last(weights.add(32))] }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn last(weights: *const u8) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(weights.cast())) }
    }
}

impl Number for Bf16 {
    const DTYPE: Dtype = Dtype::BF16;

    /// A bf16 is the upper half of an f32.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn pair(weights: *const u8) -> [__m512; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let words = _mm512_loadu_si512(weights.cast());
            let upper = _mm512_and_si512(words, _mm512_set1_epi32(0xffff_0000_u32.cast_signed()));
            [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)), _mm512_castsi512_ps(upper)]
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn last(weights: *const u8) -> __m512 {
        // SAFETY: the caller's promise; the column that is missing is there as zeros.
        unsafe { Self::pair(weights)[0] }
    }
}
