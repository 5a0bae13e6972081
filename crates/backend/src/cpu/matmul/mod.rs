//! Activations times weights: `out = x W^T`, for one row of activations or hundreds.
//!
//! [`format`]: how panels of 16 weight rows, or 32, are stored. [`packed`]: matrices as panels, in
//! [`memory`]. [`activations`]: rows of activations in blocks, [`quantise`]d. [`tile`]: what a
//! kernel does. [`plain`], [`avx2`], [`avx512`], [`avx512_bf16`], [`amx`]: the kernels.
//! [`kernels`]: which of them runs. [`grid`]: who computes which tiles.
//!
//! ```text
//!                 panel 0   panel 1   ...        threads share the panels, and the blocks if there
//!               +---------+---------+---         are too few, never the columns; a thread takes a
//!  block 0      |  tile   |  tile   |            few panels through all its blocks while they are
//!  (few rows)   |         |         |            in the caches, so that weights come from memory
//!  block 1      |  tile   |                      once
//! ```
//!
//! Invariant: an output is a sum in one fixed order over the columns, whatever the number of rows,
//! of threads and of blocks. So a row's results are the same bits in every batch.

mod activations;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
mod format;
mod grid;
mod kernels;
mod memory;
mod packed;
mod plain;
mod quantise;
#[cfg(test)]
mod tests;
mod tile;

pub(crate) use memory::WeightMemory;
use packed::Segment;
pub use packed::{PackedMatrix, WeightPrecision};

use super::{
    pool::{SharedMut, ThreadPool},
    simd::SimdLevel,
};
use activations::{Activations, Form, RowBlocks};
use grid::{Grid, SegmentRun};
use kernels::KernelSet;

/// Operands of [`matmul`]: `out = (out or nothing) + bias + x * weight^T`.
pub(crate) struct MatmulArgs<'a> {
    /// `[num_rows, weight.cols]`.
    pub(crate) x: &'a [f32],
    pub(crate) weight: &'a PackedMatrix,
    /// `[weight.rows]`.
    pub(crate) bias: Option<&'a [f32]>,
    /// `[num_rows, weight.rows]`.
    pub(crate) out: &'a mut [f32],
    pub(crate) num_rows: usize,
    /// Add to `out` instead of overwriting it.
    pub(crate) accumulate: bool,
}

/// Memory that matmuls use for their activations, and the instructions they use.
pub(crate) struct MatmulScratch {
    kernels: KernelSet,
    /// In the order of [`Form::ALL`].
    activations: [Activations; Form::ALL.len()],
}

impl MatmulScratch {
    /// For given instructions.
    ///
    /// # Panics
    /// If this processor lacks them.
    pub(crate) fn with_level(level: SimdLevel) -> Self {
        Self::with_kernels(KernelSet::of(level))
    }

    fn with_kernels(kernels: KernelSet) -> Self {
        let activations = std::array::from_fn(|_| Activations::new(kernels.level()));
        Self { kernels, activations }
    }

    /// Brings `x` into `form`, unless it has that form already.
    fn prepare(&mut self, pool: &ThreadPool, x: &[f32], num_rows: usize, form: Form) {
        if form != Form::Plain || num_rows > 1 {
            let blocks = self.blocks(num_rows, form);
            self.activations[form as usize].prepare(pool, x, blocks, form);
        }
    }

    /// What `prepare` made.
    fn words<'a>(&'a self, x: &'a [f32], num_rows: usize, form: Form) -> &'a [u32] {
        if form == Form::Plain && num_rows == 1 {
            return bits(x);
        }
        self.activations[form as usize].words()
    }

    fn blocks(&self, num_rows: usize, form: Form) -> RowBlocks {
        RowBlocks::new(num_rows, self.kernels.max_block_rows(form))
    }
}

/// Multiplies activations and weights; see [`MatmulArgs`].
///
/// # Panics
/// If an operand's length does not fit.
pub(crate) fn matmul(pool: &ThreadPool, args: MatmulArgs<'_>, scratch: &mut MatmulScratch) {
    let MatmulArgs { x, weight, bias, out, num_rows, accumulate } = args;
    assert!(x.len() >= num_rows * weight.cols(), "x is shorter than its shape");
    assert!(out.len() >= num_rows * weight.rows(), "out is shorter than its shape");
    assert!(bias.is_none_or(|bias| bias.len() >= weight.rows()), "bias is shorter than its shape");
    if num_rows == 0 {
        return;
    }
    let x = &x[..num_rows * weight.cols()];
    for form in Form::ALL {
        let form_of = |segment: &Segment| scratch.kernels.form(segment.dtype);
        if weight.segments().iter().any(|segment| form_of(segment) == form) {
            scratch.prepare(pool, x, num_rows, form);
        }
    }
    let out = SharedMut::new(out);
    let scratch = &*scratch;
    let runs = || {
        weight.segments().iter().map(|segment| {
            let form = scratch.kernels.form(segment.dtype);
            assert_eq!(segment.panel_rows, form.panel_rows(), "packed for other kernels");
            SegmentRun {
                segment,
                kernels: scratch.kernels.kernels(segment.dtype, form),
                panels_at_once: form.panels_at_once(),
                spread_fetching: form == Form::Bf16Pairs,
                num_steps: form.num_steps(weight.cols()),
                row_words: form.row_words(weight.cols()),
                x: scratch.words(x, num_rows, form),
                blocks: scratch.blocks(num_rows, form),
                bias,
                out: &out,
                stride: weight.rows(),
                accumulate,
            }
        })
    };
    let grid = |run: &SegmentRun<'_>| Grid::new(run, pool.num_threads());
    let num_tasks = runs().map(|run| grid(&run).num_tasks()).sum();
    pool.run(num_tasks, |mut task| {
        for run in runs() {
            let grid = grid(&run);
            if task < grid.num_tasks() {
                run.task(&grid, task);
                return scratch.kernels.end_task();
            }
            task -= grid.num_tasks();
        }
    });
}

/// The words that floats are made of.
fn bits(x: &[f32]) -> &[u32] {
    // SAFETY: same size, same alignment, and any bits are a valid u32.
    unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), x.len()) }
}
