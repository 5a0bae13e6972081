//! Kernels for weights in bf16 and AVX-512's dot products of pairs of them.

use std::arch::x86_64::*;

use super::{
    activations::{Form, Part},
    avx512,
    format::{PANEL_ROWS, VECTOR_BYTES},
    tile::{Tile, TileKernel},
};

/// Number `n - 1` takes `n` rows of activations.
pub(super) const KERNELS: &[TileKernel] = &[
    tile::<1>, tile::<2>, tile::<3>, tile::<4>, tile::<5>, tile::<6>, tile::<7>, tile::<8>,
    tile::<9>, tile::<10>, tile::<11>, tile::<12>,
];

/// One panel, of two registers of outputs: 24 sums, two vectors of weights and a broadcast word of
/// activations fill the registers. With one register of outputs loads, not products, set the pace:
/// two a cycle are as many as a processor starts, and every product takes a load of its own.
#[target_feature(enable = "avx512f,avx512bf16")]
fn tile<const ROWS: usize>(tile: &Tile<'_>) {
    assert!(tile.weights.len() >= tile.num_steps * 2 * VECTOR_BYTES);
    assert!(tile.x.len() >= tile.num_steps * ROWS);
    let (mut weights, mut x) = (tile.weights.as_ptr(), tile.x.as_ptr());
    let mut low = [_mm512_setzero_ps(); ROWS];
    let mut high = [_mm512_setzero_ps(); ROWS];
    for step in 0..tile.num_steps {
        tile.ahead.fetch(step);
        // SAFETY: the pointers walk through the panel and the block, which are long enough for this
        // many steps, as asserted above.
        unsafe {
            let pairs = [0, VECTOR_BYTES].map(|at| _mm512_loadu_si512(weights.add(at).cast()));
            for row in 0..ROWS {
                let x = as_bf16(_mm512_set1_epi32(x.add(row).read().cast_signed()));
                low[row] = _mm512_dpbf16_ps(low[row], as_bf16(pairs[0]), x);
                high[row] = _mm512_dpbf16_ps(high[row], as_bf16(pairs[1]), x);
            }
            weights = weights.add(2 * VECTOR_BYTES);
            x = x.add(ROWS);
        }
    }
    for row in 0..ROWS {
        // SAFETY: the kernel's caller keeps everybody else off the tile.
        unsafe {
            avx512::write_row(tile, row, 0, low[row]);
            if tile.out.num_lanes > PANEL_ROWS {
                avx512::write_row(tile, row, 1, high[row]);
            }
        }
    }
}

/// Rounds a part to nearest even, into [`Form::Bf16Pairs`].
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) fn round(part: &Part<'_>, out: &mut [u32]) {
    /// Numbers, and pairs of them, at a time.
    const LEN: usize = 32;
    let num_rows = part.num_rows();
    assert!(out.len() >= num_rows * Form::Bf16Pairs.row_words(part.num_columns()));
    for row in 0..num_rows {
        for (i, x) in part.row(row).chunks(LEN).enumerate() {
            let mut numbers = [0.0_f32; LEN];
            numbers[..x.len()].copy_from_slice(x);
            let mut pairs = [0_u32; LEN / 2];
            // SAFETY: 32 numbers in, 16 pairs out, and a register of bf16 is but 64 bytes.
            unsafe {
                let [low, high] = [0, LEN / 2].map(|i| _mm512_loadu_ps(numbers[i..].as_ptr()));
                let rounded: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
                _mm512_storeu_si512(pairs.as_mut_ptr().cast(), rounded);
            }
            let places = out[i * (LEN / 2) * num_rows + row..].iter_mut().step_by(num_rows);
            let num_pairs = x.len().div_ceil(2);
            places.zip(&pairs[..num_pairs]).for_each(|(place, pair)| *place = *pair);
        }
    }
}

#[target_feature(enable = "avx512f")]
fn as_bf16(pairs: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes of which any are valid.
    unsafe { std::mem::transmute(pairs) }
}
