//! Activations as kernels want them: rows in blocks, interleaved so that one pointer serves a block.
//!
//! ```text
//! rows        block 0 | block 1 | ...       as equal as can be, each at most a kernel's rows
//! plain       [cols][n] f32                 n rows of a block
//! quantised   per group   scales[n] f32 | scaled sums[n] f32 | [group_len / 4][n] words
//!             word        four neighbouring columns of one row, signed bytes
//! ```
//!
//! A group of activations is `scale * code`, scale = max |x| / 127; its scaled sum, scale times the
//! sum of the codes, meets the minimum of the weights. A row's codes depend on that row alone.

use std::ops::Range;

use super::format::GroupLayout;
use crate::{
    Dtype,
    cpu::pool::{SharedMut, ThreadPool},
};

/// Rows of activations cut into blocks.
#[derive(Clone, Copy)]
pub(super) struct RowBlocks {
    num_rows: usize,
    num_blocks: usize,
}

impl RowBlocks {
    pub(super) fn new(num_rows: usize, max_block_rows: usize) -> Self {
        Self { num_rows, num_blocks: num_rows.div_ceil(max_block_rows) }
    }

    pub(super) fn num_rows(&self) -> usize {
        self.num_rows
    }

    pub(super) fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Rows of block `block`.
    pub(super) fn rows(&self, block: usize) -> Range<usize> {
        let cut = |i| i * self.num_rows / self.num_blocks;
        cut(block)..cut(block + 1)
    }
}

/// How one type of weights wants its activations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Form {
    /// Plain f32.
    Plain,
    /// Quantised in groups of 16 columns.
    Groups16,
    /// Quantised in groups of 32 columns.
    Groups32,
}

impl Form {
    pub(super) const ALL: [Self; 3] = [Self::Plain, Self::Groups16, Self::Groups32];

    pub(super) fn of(dtype: Dtype) -> Self {
        match GroupLayout::of(dtype).map(|layout| layout.group_len) {
            None => Self::Plain,
            Some(16) => Self::Groups16,
            Some(_) => Self::Groups32,
        }
    }

    /// Groups, or columns, of a row of `cols`.
    pub(super) fn num_steps(self, cols: usize) -> usize {
        match self {
            Self::Plain => cols,
            Self::Groups16 => cols / 16,
            Self::Groups32 => cols / 32,
        }
    }

    /// Words of a row of `cols`.
    pub(super) fn row_words(self, cols: usize) -> usize {
        let step_words = match self {
            Self::Plain => 1,
            Self::Groups16 => 2 + 16 / 4,
            Self::Groups32 => 2 + 32 / 4,
        };
        self.num_steps(cols) * step_words
    }
}

/// Memory for one form of a matmul's activations; grows to the largest and stays.
#[derive(Default)]
pub(super) struct Activations {
    words: Vec<u32>,
}

impl Activations {
    /// Brings `x`, `[num_rows, cols]`, into `form`.
    pub(super) fn prepare(&mut self, pool: &ThreadPool, x: &[f32], blocks: RowBlocks, form: Form) {
        /// Elements worth a task of their own.
        const MIN_TASK_LEN: usize = 1 << 14;
        let cols = x.len() / blocks.num_rows;
        let row_words = form.row_words(cols);
        let num_words = blocks.num_rows * row_words;
        if self.words.len() < num_words {
            self.words.resize(num_words, 0);
        }
        let words = SharedMut::new(&mut self.words);
        let block_len = cols * blocks.rows(0).len().max(1);
        pool.run_chunks(blocks.num_blocks, MIN_TASK_LEN.div_ceil(block_len), |chunk| {
            for rows in chunk.map(|block| blocks.rows(block)) {
                let x = &x[rows.start * cols..rows.end * cols];
                // SAFETY: blocks have rows, hence words, of their own.
                let out = unsafe { words.slice(rows.start * row_words..rows.end * row_words) };
                match form {
                    Form::Plain => interleave(x, rows.len(), out),
                    Form::Groups16 => quantise_block::<16>(x, rows.len(), out),
                    Form::Groups32 => quantise_block::<32>(x, rows.len(), out),
                }
            }
        });
    }

    /// The words of all blocks; block `b` starts at its first row times [`Form::row_words`].
    pub(super) fn words(&self) -> &[u32] {
        &self.words
    }
}

/// `[num_rows, cols]` to `[cols, num_rows]`.
fn interleave(x: &[f32], num_rows: usize, out: &mut [u32]) {
    for (row, x) in x.chunks_exact(x.len() / num_rows).enumerate() {
        for (column, x) in out.chunks_exact_mut(num_rows).zip(x) {
            column[row] = x.to_bits();
        }
    }
}

/// Quantises `[num_rows, cols]` in groups of `LEN` columns.
fn quantise_block<const LEN: usize>(x: &[f32], num_rows: usize, out: &mut [u32]) {
    let cols = x.len() / num_rows;
    for (g, out) in out.chunks_exact_mut((2 + LEN / 4) * num_rows).enumerate() {
        let (scales, rest) = out.split_at_mut(num_rows);
        let (sums, words) = rest.split_at_mut(num_rows);
        for row in 0..num_rows {
            let group = x[row * cols + g * LEN..].first_chunk::<LEN>().expect("LEN divides cols");
            let (scale, codes) = quantise(group);
            scales[row] = scale.to_bits();
            let sum = codes.iter().map(|code| i32::from(*code)).sum::<i32>();
            sums[row] = (scale * sum as f32).to_bits();
            for (i, quad) in codes.as_chunks::<4>().0.iter().enumerate() {
                words[i * num_rows + row] = u32::from_ne_bytes(quad.map(i8::cast_unsigned));
            }
        }
    }
}

/// Nearest codes under the scale that takes the largest magnitude to 127.
///
/// A NaN or an infinity makes the scale NaN or infinite, hence the outputs too.
fn quantise<const LEN: usize>(x: &[f32; LEN]) -> (f32, [i8; LEN]) {
    /// 1.5 * 2^23: adding it leaves no bits for a fraction, and rounds to nearest even.
    const ROUNDER: f32 = 12_582_912.0;
    // Magnitudes compare as their bits do, NaN above all.
    let largest = x.iter().map(|x| (x.to_bits() & 0x7fff_ffff) as i32).fold(0, i32::max);
    let largest = f32::from_bits(largest as u32);
    let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
    // The code is in the low bits of the rounded sum.
    (largest / 127.0, x.map(|x| (x * inverse + ROUNDER).to_bits() as i8))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_as_equal_as_can_be() {
        for (num_rows, max, expected) in [(13, 12, vec![6, 7]), (8, 8, vec![8]), (1, 8, vec![1])] {
            let blocks = RowBlocks::new(num_rows, max);
            let lens: Vec<_> = (0..blocks.num_blocks()).map(|b| blocks.rows(b).len()).collect();
            assert_eq!(lens, expected);
        }
        assert_eq!(RowBlocks::new(0, 8).num_blocks(), 0);
    }

    #[test]
    fn codes_round_to_nearest_under_the_largest_magnitude() {
        let mut x = [0.0; 16];
        x[..6].copy_from_slice(&[12.7, -12.7, 0.1, -0.249, 0.26, 6.349]);
        let (scale, codes) = quantise(&x);
        assert!((scale - 0.1).abs() < 1e-8);
        assert_eq!(codes[..7], [127, -127, 1, -2, 3, 63, 0]);
        assert_eq!(quantise(&[0.0; 16]), (0.0, [0; 16]));
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
        let (scale, codes) = quantise(&x);
        assert!(scale.is_finite());
        assert!(codes.iter().all(|code| f32::from(*code) * scale <= x[3] * 2.0));
    }
}
