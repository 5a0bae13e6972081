//! Kernels for weights in bf16 and AVX-512's dot products of pairs of them.

use std::arch::x86_64::*;

use super::{
    activations::{Form, Part},
    avx512,
    format::VECTOR_BYTES,
    tile::{Tile, TileKernel, prefetch},
};

/// Number `n - 1` takes `n` rows of activations.
pub(super) const KERNELS: &[TileKernel] = &[
    tile::<1>, tile::<2>, tile::<3>, tile::<4>, tile::<5>, tile::<6>, tile::<7>, tile::<8>,
    tile::<9>, tile::<10>, tile::<11>, tile::<12>,
];

/// Sums over the even pairs of columns and over the odd ones: one chain of additions per row would
/// be slower than memory.
#[target_feature(enable = "avx512f,avx512bf16")]
fn tile<const ROWS: usize>(tile: &Tile<'_>) {
    assert!(tile.weights.len() >= tile.num_steps * VECTOR_BYTES);
    assert!(tile.x.len() >= tile.num_steps * ROWS);
    let (weights, x) = (tile.weights.as_ptr(), tile.x.as_ptr());
    let mut even = [_mm512_setzero_ps(); ROWS];
    let mut odd = [_mm512_setzero_ps(); ROWS];
    for k in (0..tile.num_steps & !1).step_by(2) {
        // SAFETY: pairs `k` and `k + 1` are inside the panel and the block, as asserted above.
        unsafe {
            let weights = weights.add(k * VECTOR_BYTES);
            prefetch(weights, 2 * VECTOR_BYTES);
            add_pair::<ROWS>(&mut even, weights, x.add(k * ROWS));
            add_pair::<ROWS>(&mut odd, weights.add(VECTOR_BYTES), x.add((k + 1) * ROWS));
        }
    }
    if tile.num_steps % 2 == 1 {
        let k = tile.num_steps - 1;
        // SAFETY: as above.
        unsafe { add_pair::<ROWS>(&mut even, weights.add(k * VECTOR_BYTES), x.add(k * ROWS)) };
    }
    avx512::write::<ROWS>(tile, std::array::from_fn(|row| _mm512_add_ps(even[row], odd[row])));
}

/// Adds to every row's sums those of one pair of columns.
///
/// # Safety
/// `weights` points to 16 pairs, `x` to `ROWS` of them.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn add_pair<const ROWS: usize>(
    sums: &mut [__m512; ROWS],
    weights: *const u8,
    x: *const u32,
) {
    // SAFETY: the caller's promise.
    let pairs = as_bf16(unsafe { _mm512_loadu_si512(weights.cast()) });
    for (row, sum) in sums.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        let x = unsafe { x.add(row).read() }.cast_signed();
        *sum = _mm512_dpbf16_ps(*sum, pairs, as_bf16(_mm512_set1_epi32(x)));
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
