//! Kernels for AVX-512 with VNNI: one register holds one column, or four, of a panel.

use std::arch::x86_64::*;

use super::{
    format::{
        Format, GroupLayout, Min, PANEL_ROWS, Q4K, Q4One, Q4Zero, Q5K, Q5One, Q5Zero, Q6K, Q8Zero,
        VECTOR_BYTES,
    },
    tile::{Tile, TileKernel},
};
use crate::Dtype;

/// How far ahead of their use weights are fetched.
const PREFETCH_BYTES: usize = 2048;

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
    let x_group_words = (2 + layout.group_len / 4) * ROWS;
    assert!(tile.weights.len() >= tile.num_steps * layout.group_bytes());
    assert!(tile.x.len() >= tile.num_steps * x_group_words);
    let nibble = _mm512_set1_epi8(15);
    let mut sums = [_mm512_setzero_ps(); ROWS];
    for g in 0..tile.num_steps {
        // SAFETY: group `g` is inside the panel and the block, as asserted above.
        unsafe {
            let weights = tile.weights.as_ptr().add(g * layout.group_bytes());
            let x = tile.x.as_ptr().add(g * x_group_words).cast::<f32>();
            prefetch(weights, layout.group_bytes());
            let (scales, mins) = scales_and_mins(layout, weights);
            let vectors = weights.add(layout.header_bytes());
            let words = x.add(2 * ROWS).cast::<i32>();
            let mut dots = [_mm512_setzero_si512(); ROWS];
            for i in 0..layout.num_vectors() {
                let codes = _mm512_loadu_si512(vectors.add(i * VECTOR_BYTES).cast());
                if layout.code_bits == 4 {
                    let high = _mm512_and_si512(_mm512_srli_epi16::<4>(codes), nibble);
                    let high_words = words.add((i + layout.num_vectors()) * ROWS);
                    add_dots(&mut dots, _mm512_and_si512(codes, nibble), words.add(i * ROWS));
                    add_dots(&mut dots, high, high_words);
                } else {
                    add_dots(&mut dots, codes, words.add(i * ROWS));
                }
            }
            for row in 0..ROWS {
                let dot = _mm512_cvtepi32_ps(dots[row]);
                let scaled = _mm512_mul_ps(dot, _mm512_set1_ps(*x.add(row)));
                sums[row] = _mm512_fmadd_ps(scaled, scales, sums[row]);
                let x_sum = _mm512_set1_ps(*x.add(ROWS + row));
                sums[row] = _mm512_fmadd_ps(mins, x_sum, sums[row]);
            }
        }
    }
    write(tile, sums);
}

/// Adds to every row's dots those of four columns.
///
/// # Safety
/// `words` points to `ROWS` words.
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn add_dots<const ROWS: usize>(
    dots: &mut [__m512i; ROWS],
    codes: __m512i,
    words: *const i32,
) {
    for (row, dot) in dots.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        let word = unsafe { words.add(row).read() };
        *dot = _mm512_dpbusd_epi32(*dot, codes, _mm512_set1_epi32(word));
    }
}

/// Scales and minimums of the group at `header`.
///
/// # Safety
/// `header` points to a header of this layout.
#[target_feature(enable = "avx512f")]
unsafe fn scales_and_mins(layout: GroupLayout, header: *const u8) -> (__m512, __m512) {
    let load = |start: usize| {
        // SAFETY: inside the header.
        unsafe {
            if layout.wide_scales {
                _mm512_loadu_ps(header.add(start).cast())
            } else {
                _mm512_cvtph_ps(_mm256_loadu_si256(header.add(start).cast()))
            }
        }
    };
    let scales = load(0);
    let mins = match layout.min {
        Min::Stored => load(layout.scales_bytes()),
        Min::ZeroPoint(code) => _mm512_mul_ps(scales, _mm512_set1_ps(-f32::from(code))),
    };
    (scales, mins)
}

/// Plain weights times plain activations.
#[target_feature(enable = "avx512f")]
fn number_tile<N: Number, const ROWS: usize>(tile: &Tile<'_>) {
    assert!(tile.weights.len() >= tile.num_steps * PANEL_ROWS * N::BYTES);
    assert!(tile.x.len() >= tile.num_steps * ROWS);
    let mut sums = [_mm512_setzero_ps(); ROWS];
    for k in 0..tile.num_steps {
        // SAFETY: column `k` is inside the panel and the block, as asserted above.
        unsafe {
            let weights = tile.weights.as_ptr().add(k * PANEL_ROWS * N::BYTES);
            let x = tile.x.as_ptr().cast::<f32>().add(k * ROWS);
            prefetch(weights, PANEL_ROWS * N::BYTES);
            let column = N::load(weights);
            for (row, sum) in sums.iter_mut().enumerate() {
                *sum = _mm512_fmadd_ps(column, _mm512_set1_ps(*x.add(row)), *sum);
            }
        }
    }
    write(tile, sums);
}

/// Fetches the `num_bytes` bytes that lie [`PREFETCH_BYTES`] after `weights`.
#[target_feature(enable = "avx512f")]
fn prefetch(weights: *const u8, num_bytes: usize) {
    for line in (0..num_bytes).step_by(64) {
        // A prefetch may point anywhere, so past the end of the panels too.
        let ahead = weights.wrapping_add(PREFETCH_BYTES + line);
        _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
    }
}

#[target_feature(enable = "avx512f")]
fn write<const ROWS: usize>(tile: &Tile<'_>, sums: [__m512; ROWS]) {
    let out = &tile.out;
    let mask = (0xffff_u32 >> (PANEL_ROWS - out.num_lanes)) as __mmask16;
    for (row, sum) in sums.into_iter().enumerate() {
        // SAFETY: the kernel's caller keeps everybody else off the tile; the mask keeps loads and
        // stores to the lanes that there are.
        unsafe {
            let lanes = out.lanes(row).as_mut_ptr();
            let mut base = _mm512_setzero_ps();
            if out.accumulate {
                base = _mm512_maskz_loadu_ps(mask, lanes);
            }
            if let Some(bias) = out.bias {
                assert!(bias.len() >= out.num_lanes);
                base = _mm512_add_ps(base, _mm512_maskz_loadu_ps(mask, bias.as_ptr()));
            }
            _mm512_mask_storeu_ps(lanes, mask, _mm512_add_ps(base, sum));
        }
    }
}

/// A plain type of weight.
trait Number {
    const BYTES: usize;

    /// Sixteen numbers.
    ///
    /// # Safety
    /// `weights` points to as many, and the processor has AVX-512.
    unsafe fn load(weights: *const u8) -> __m512;
}

struct F32;
struct F16;
struct Bf16;

impl Number for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load(weights: *const u8) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_ps(weights.cast()) }
    }
}

impl Number for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(weights: *const u8) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(weights.cast())) }
    }
}

impl Number for Bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(weights: *const u8) -> __m512 {
        // SAFETY: the caller's promise. A bf16 is the upper half of an f32.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(weights.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }
}
