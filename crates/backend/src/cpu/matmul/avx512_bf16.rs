//! Kernels for weights in bf16 and AVX-512's dot products of pairs of them.

use std::arch::x86_64::*;

use super::{
    activations::{Form, Part},
    avx512,
    format::{PANEL_ROWS, VECTOR_BYTES},
    tile::{Tile, TileKernel},
};

/// 32-bit words of a register.
const WORDS: usize = 16;

/// Most rows of a block.
const MAX_ROWS: usize = 12;

/// Number `n - 1` takes `n` rows of activations.
pub(super) const KERNELS: &[TileKernel; MAX_ROWS] = &[
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

/// Rounds a part to nearest even, into [`Form::Bf16Pairs`]: pairs of up to 16 rows at a time, which
/// are then put side by side.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) fn round(part: &Part<'_>, out: &mut [u32]) {
    let num_rows = part.num_rows();
    assert!(num_rows <= MAX_ROWS);
    assert!(out.len() >= num_rows * Form::Bf16Pairs.row_words(part.num_columns()));
    for start in (0..part.num_columns()).step_by(2 * WORDS) {
        let mut rows = [_mm512_setzero_si512(); WORDS];
        for (row, pairs) in rows.iter_mut().take(num_rows).enumerate() {
            *pairs = round_pairs(&part.row(row)[start..]);
        }
        let num_pairs = (part.num_columns() - start).div_ceil(2).min(WORDS);
        let out = &mut out[start / 2 * num_rows..];
        for (i, pairs) in transpose(rows).into_iter().enumerate().take(num_pairs) {
            write_words(&mut out[i * num_rows..], num_rows, pairs);
        }
    }
}

/// The first 32 numbers of `x` as pairs, zeros where it is shorter.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn round_pairs(x: &[f32]) -> __m512i {
    let mut padded = [0.0_f32; 2 * WORDS];
    let x = match x.first_chunk() {
        Some(x) => x,
        None => {
            padded[..x.len()].copy_from_slice(x);
            &padded
        }
    };
    // SAFETY: 32 numbers, and a register of bf16 is but 64 bytes.
    unsafe {
        let [low, high] = [0, WORDS].map(|i| _mm512_loadu_ps(x[i..].as_ptr()));
        std::mem::transmute(_mm512_cvtne2ps_pbh(high, low))
    }
}

/// Writes the first `num` words. What it writes behind them, where there is room, is for the next
/// call to write over.
#[inline]
#[target_feature(enable = "avx512f")]
fn write_words(out: &mut [u32], num: usize, words: __m512i) {
    let mask = if out.len() >= WORDS { u16::MAX } else { !(u16::MAX << num) };
    assert!(num <= out.len() && num <= WORDS);
    // SAFETY: the mask keeps the store inside `out`.
    unsafe { _mm512_mask_storeu_epi32(out.as_mut_ptr().cast(), mask, words) };
}

/// Word `i` of result `j` is word `j` of row `i`.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(rows: [__m512i; WORDS]) -> [__m512i; WORDS] {
    let mut quads = [_mm512_setzero_si512(); WORDS];
    for i in (0..WORDS).step_by(4) {
        let [a, b, c, d] = [rows[i], rows[i + 1], rows[i + 2], rows[i + 3]];
        let (low_ab, high_ab) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (low_cd, high_cd) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        // Quarter `q` of quad `i + j`: word `4 q + j` of four rows.
        quads[i] = _mm512_unpacklo_epi64(low_ab, low_cd);
        quads[i + 1] = _mm512_unpackhi_epi64(low_ab, low_cd);
        quads[i + 2] = _mm512_unpacklo_epi64(high_ab, high_cd);
        quads[i + 3] = _mm512_unpackhi_epi64(high_ab, high_cd);
    }
    let mut out = [_mm512_setzero_si512(); WORDS];
    for j in 0..4 {
        // Quarters 0 and 2, and 1 and 3, of two quads.
        let even = |a, b| _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b);
        let odd = |a, b| _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b);
        let [a, b, c, d] = [quads[j], quads[j + 4], quads[j + 8], quads[j + 12]];
        out[j] = even(even(a, b), even(c, d));
        out[j + 4] = even(odd(a, b), odd(c, d));
        out[j + 8] = odd(even(a, b), even(c, d));
        out[j + 12] = odd(odd(a, b), odd(c, d));
    }
    out
}

#[target_feature(enable = "avx512f")]
fn as_bf16(pairs: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes of which any are valid.
    unsafe { std::mem::transmute(pairs) }
}
