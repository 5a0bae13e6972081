//! The two products of attention on one tile of the context.

use std::ops::Range;

use super::KV_TILE;
use crate::cpu::kernels::lanes::{Lanes, MAX_LANES};

/// Scores of some rows with a register's worth of a tile's keys, the `block`-th:
/// `scores[row, j] = queries[row] . tile[j]`.
///
/// A score's sum has the same order whatever rows and positions are worked on beside it.
///
/// # Shapes
/// `queries` `[num_rows, head_stride]`, `tile` `[KV_TILE, head_stride]`, `scores`
/// `[num_rows, KV_TILE]`.
#[inline(always)]
pub(super) fn score<L: Lanes>(
    l: L,
    (queries, tile): (&[f32], &[f32]),
    rows: Range<usize>,
    block: usize,
    scores: &mut [f32],
) {
    let head_stride = tile.len() / KV_TILE;
    assert!(head_stride.is_multiple_of(MAX_LANES));
    let keys = &tile[block * L::N * head_stride..][..L::N * head_stride];
    for row in rows {
        let query = &queries[row * head_stride..][..head_stride];
        let mut sums = [l.splat(0.0); MAX_LANES];
        for c in (0..head_stride).step_by(L::N) {
            // SAFETY: c + N <= head_stride = query.len().
            let query = unsafe { l.load(query.as_ptr().add(c)) };
            for (j, sum) in sums.iter_mut().enumerate().take(L::N) {
                // SAFETY: (N - 1) * head_stride + c + N <= keys.len().
                let key = unsafe { l.load(keys.as_ptr().add(j * head_stride + c)) };
                *sum = l.mul_add(query, key, *sum);
            }
        }
        l.store_part(&mut scores[row * KV_TILE + block * L::N..][..L::N], l.sum_each(sums));
    }
}

/// The rows of [`weigh`], and the positions of the tile that all of them see.
pub(super) struct WeighRows {
    pub(super) first: usize,
    pub(super) num: usize,
    pub(super) positions: Range<usize>,
}

/// `values[row] += sum over j of weights[row, j] * tile[j]`, for one to four rows.
///
/// # Shapes
/// `weights` `[num_rows, KV_TILE]`, `tile` `[KV_TILE, head_stride]`, `values`
/// `[num_rows, head_stride]`.
#[inline(always)]
pub(super) fn weigh<L: Lanes>(
    l: L,
    (weights, tile): (&[f32], &[f32]),
    rows: &WeighRows,
    values: &mut [f32],
) {
    if rows.positions.is_empty() {
        return;
    }
    let head_stride = tile.len() / KV_TILE;
    let weights = &weights[rows.first * KV_TILE..][..rows.num * KV_TILE];
    let values = &mut values[rows.first * head_stride..][..rows.num * head_stride];
    let operands = Operands { weights, tile, positions: rows.positions.clone(), head_stride };
    assert!(head_stride.is_multiple_of(MAX_LANES) && operands.positions.end <= KV_TILE);
    match rows.num {
        1 => weigh_rows::<L, 1>(l, &operands, values),
        2 => weigh_rows::<L, 2>(l, &operands, values),
        3 => weigh_rows::<L, 3>(l, &operands, values),
        4 => weigh_rows::<L, 4>(l, &operands, values),
        num => unreachable!("{num} rows at a time"),
    }
}

struct Operands<'a> {
    weights: &'a [f32],
    tile: &'a [f32],
    positions: Range<usize>,
    head_stride: usize,
}

#[inline(always)]
fn weigh_rows<L: Lanes, const ROWS: usize>(l: L, operands: &Operands<'_>, values: &mut [f32]) {
    let head_stride = operands.head_stride;
    let mut column = 0;
    while column + 4 * L::N <= head_stride {
        // SAFETY: the columns lie inside a row, and `weigh` has checked the rest.
        unsafe { weigh_columns::<L, ROWS, 4>(l, operands, column, values) };
        column += 4 * L::N;
    }
    while column < head_stride {
        // SAFETY: as above; `head_stride` is a multiple of N.
        unsafe { weigh_columns::<L, ROWS, 1>(l, operands, column, values) };
        column += L::N;
    }
}

/// Some columns of some rows, all in registers.
///
/// # Safety
/// `column + COLUMNS * N <= head_stride`; positions are below KV_TILE; the slices have the shapes
/// of [`weigh`] with `ROWS` rows.
#[inline(always)]
unsafe fn weigh_columns<L: Lanes, const ROWS: usize, const COLUMNS: usize>(
    l: L,
    operands: &Operands<'_>,
    column: usize,
    values: &mut [f32],
) {
    let head_stride = operands.head_stride;
    let mut sums = [[l.splat(0.0); COLUMNS]; ROWS];
    for (r, sums) in sums.iter_mut().enumerate() {
        for (c, sum) in sums.iter_mut().enumerate() {
            // SAFETY: r < ROWS, and the caller's.
            *sum = unsafe { l.load(values.as_ptr().add(r * head_stride + column + c * L::N)) };
        }
    }
    for j in operands.positions.clone() {
        let mut value = [l.splat(0.0); COLUMNS];
        for (c, value) in value.iter_mut().enumerate() {
            let at = j * head_stride + column + c * L::N;
            // SAFETY: j < KV_TILE, and the caller's.
            *value = unsafe { l.load(operands.tile.as_ptr().add(at)) };
        }
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: r < ROWS and j < KV_TILE.
            let weight = l.splat(unsafe { *operands.weights.get_unchecked(r * KV_TILE + j) });
            for (sum, value) in sums.iter_mut().zip(value) {
                *sum = l.mul_add(weight, value, *sum);
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        for (c, sum) in sums.iter().enumerate() {
            // SAFETY: as for the load.
            unsafe { l.store(values.as_mut_ptr().add(r * head_stride + column + c * L::N), *sum) };
        }
    }
}
