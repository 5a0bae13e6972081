//! Activations as kernels want them: rows in blocks, interleaved so that one pointer serves all.
//!
//! ```text
//! rows        block 0 | block 1 | ...       as equal as can be, each at most a kernel's rows
//! plain       [cols][n] f32                 n rows of a block
//! bf16        [cols / 2][n] words           two neighbouring columns of one row
//!   for tiles [cols / 32][n][16] words      the same, zeros after the last column
//! quantised   per group   scales[n] f32 | scaled sums[n] f32 | [group_len / 4][n] words
//!             word        four neighbouring columns of one row, signed bytes
//! ```
//!
//! A group of activations is `scale * code`, scale = max |x| / 127; its scaled sum, scale times the
//! sum of the codes, meets the minimum of the weights. A row's codes depend on that row alone.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::{amx, avx512_bf16};
use super::{format::PANEL_ROWS, quantise};
use crate::cpu::{
    pool::{SharedMut, ThreadPool},
    simd::SimdLevel,
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
    /// Rounded to bf16, two neighbouring columns to a word.
    Bf16Pairs,
    /// Quantised in groups of 16 columns.
    Groups16,
    /// Quantised in groups of 32 columns.
    Groups32,
    /// As `Bf16Pairs`, for tiles.
    Bf16Tiles,
}

impl Form {
    pub(super) const ALL: [Self; 5] =
        [Self::Plain, Self::Bf16Pairs, Self::Groups16, Self::Groups32, Self::Bf16Tiles];

    /// Groups, pairs of columns, columns, or tiles of 32 columns, of a row of `cols`.
    pub(super) fn num_steps(self, cols: usize) -> usize {
        match self {
            Self::Plain => cols,
            Self::Bf16Pairs => cols.div_ceil(2),
            Self::Bf16Tiles => cols.div_ceil(32),
            Self::Groups16 => cols / 16,
            Self::Groups32 => cols / 32,
        }
    }

    /// Rows of a panel of weights that kernels for this form take: one or two registers of outputs.
    pub(super) fn panel_rows(self) -> usize {
        match self {
            Self::Plain | Self::Groups16 | Self::Groups32 | Self::Bf16Tiles => PANEL_ROWS,
            Self::Bf16Pairs => 2 * PANEL_ROWS,
        }
    }

    /// Most panels of weights that kernels for this form take at once.
    pub(super) fn panels_at_once(self) -> usize {
        match self {
            Self::Plain | Self::Bf16Pairs | Self::Groups16 | Self::Groups32 => 1,
            Self::Bf16Tiles => 2,
        }
    }

    /// Words of a row of `cols`.
    pub(super) fn row_words(self, cols: usize) -> usize {
        let step_words = match self {
            Self::Plain | Self::Bf16Pairs => 1,
            Self::Bf16Tiles => 16,
            Self::Groups16 => 2 + 16 / 4,
            Self::Groups32 => 2 + 32 / 4,
        };
        self.num_steps(cols) * step_words
    }
}

/// Memory for one form of a matmul's activations; grows to the largest and stays.
pub(super) struct Activations {
    level: SimdLevel,
    words: Vec<u32>,
}

impl Activations {
    /// Empty, to be filled by the instructions of `level`, which the processor must have.
    pub(super) fn new(level: SimdLevel) -> Self {
        Self { level, words: Vec::new() }
    }

    /// Brings `x`, `[num_rows, cols]`, into `form`.
    pub(super) fn prepare(&mut self, pool: &ThreadPool, x: &[f32], blocks: RowBlocks, form: Form) {
        /// Elements worth a task of their own.
        const MIN_TASK_LEN: usize = 1 << 12;
        let cols = x.len() / blocks.num_rows;
        let row_words = form.row_words(cols);
        let num_words = blocks.num_rows * row_words;
        if self.words.len() < num_words {
            self.words.resize(num_words, 0);
        }
        let level = self.level;
        let words = SharedMut::new(&mut self.words);
        // Two halves of a block's columns, so that two threads have equal shares of few rows.
        let middle = cols / 64 * 32;
        let halves = [0..middle, middle..cols];
        let half_len = (cols / 2 * blocks.rows(0).len()).max(1);
        pool.run_chunks(2 * blocks.num_blocks, MIN_TASK_LEN.div_ceil(half_len), |chunk| {
            for half in chunk {
                let (rows, columns) = (blocks.rows(half / 2), halves[half % 2].clone());
                let num_rows = rows.len();
                let start = rows.start * row_words + num_rows * form.row_words(columns.start);
                let len = num_rows * form.row_words(columns.len());
                // SAFETY: blocks have rows, hence words, of their own, and halves of the columns
                // have steps of their own, which follow each other.
                let out = unsafe { words.slice(start..start + len) };
                Part { x, cols, rows, columns }.write(level, form, out);
            }
        });
    }

    /// The words of all blocks; block `b` starts at its first row times [`Form::row_words`].
    pub(super) fn words(&self) -> &[u32] {
        &self.words
    }
}

/// Some columns of a block's rows.
pub(super) struct Part<'a> {
    /// `[all rows, cols]`.
    x: &'a [f32],
    cols: usize,
    rows: Range<usize>,
    columns: Range<usize>,
}

impl<'a> Part<'a> {
    /// All of `[num_rows, cols]`.
    #[cfg(test)]
    pub(super) fn whole(x: &'a [f32], num_rows: usize) -> Self {
        let cols = x.len() / num_rows;
        Self { x, cols, rows: 0..num_rows, columns: 0..cols }
    }

    pub(super) fn num_rows(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn num_columns(&self) -> usize {
        self.columns.len()
    }

    /// The part's columns of its row `row`.
    #[inline(always)]
    pub(super) fn row(&self, row: usize) -> &'a [f32] {
        let start = (self.rows.start + row) * self.cols;
        &self.x[start + self.columns.start..start + self.columns.end]
    }

    /// Brings the part into `form`, as kernels of `level` want it.
    fn write(&self, level: SimdLevel, form: Form, out: &mut [u32]) {
        match form {
            Form::Plain => self.interleave(out),
            // SAFETY: only a set of kernels that need it, on a processor that has the
            // instructions, asks for this form.
            #[cfg(target_arch = "x86_64")]
            Form::Bf16Pairs => unsafe { avx512_bf16::round(self, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Form::Bf16Tiles => unsafe { amx::round(self, out) },
            #[cfg(not(target_arch = "x86_64"))]
            Form::Bf16Pairs | Form::Bf16Tiles => {
                unreachable!("no kernel of this architecture wants it")
            }
            Form::Groups16 => quantise::part::<16>(level, self, out),
            Form::Groups32 => quantise::part::<32>(level, self, out),
        }
    }

    /// `[rows, columns]` to `[columns, rows]`.
    fn interleave(&self, out: &mut [u32]) {
        for row in 0..self.num_rows() {
            for (column, x) in out.chunks_exact_mut(self.num_rows()).zip(self.row(row)) {
                column[row] = x.to_bits();
            }
        }
    }
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
}
