//! What a kernel computes: a panel of weights, or two, times a few rows of activations.

use super::format::PANEL_ROWS;
use crate::cpu::pool::SharedMut;

/// How far ahead of their use kernels fetch weights: a memory's latency times its bandwidth.
#[cfg(target_arch = "x86_64")]
const PREFETCH_BYTES: usize = 8192;

/// Operands of a kernel: 16 outputs of each panel for each of a few rows of activations.
pub(super) struct Tile<'a> {
    /// One panel, or as many as the kernel takes: see [`super::format`] for groups; `[cols, 16]`
    /// for plain numbers.
    pub(super) weights: &'a [u8],
    /// One block of rows: see [`super::activations`].
    pub(super) x: &'a [u32],
    /// Groups of a row, or columns for plain numbers.
    pub(super) num_steps: usize,
    pub(super) out: OutTile<'a>,
}

/// Where a tile's results go.
pub(super) struct OutTile<'a> {
    /// The whole output, of which the tile has `[rows, num_lanes]`.
    pub(super) out: &'a SharedMut<'a, f32>,
    /// Index of the tile's first element.
    pub(super) first: usize,
    /// Elements from a row to the next.
    pub(super) stride: usize,
    /// 16 a panel, but for the last panel.
    pub(super) num_lanes: usize,
    /// `[num_lanes]`.
    pub(super) bias: Option<&'a [f32]>,
    /// Add to what is there.
    pub(super) accumulate: bool,
}

/// Computes a tile of as many rows as the kernel was made for.
///
/// # Panics
/// If an operand is too short.
///
/// # Safety
/// The processor has the instructions of the kernel's level, and nobody else uses the tile's
/// elements of the output.
pub(super) type TileKernel = unsafe fn(&Tile<'_>);

impl<'a> OutTile<'a> {
    /// The lanes of row `row`.
    ///
    /// # Safety
    /// Nobody else uses them meanwhile.
    #[inline(always)]
    pub(super) unsafe fn lanes(&self, row: usize) -> &'a mut [f32] {
        let start = self.first + row * self.stride;
        // SAFETY: passed on to the caller.
        unsafe { self.out.slice(start..start + self.num_lanes) }
    }

    /// Writes the sums of row `row`, lane by lane: `(out or nothing) + bias + sums`.
    ///
    /// # Safety
    /// Nobody else uses the row's lanes meanwhile.
    #[inline(always)]
    pub(super) unsafe fn write(&self, row: usize, sums: [f32; PANEL_ROWS]) {
        // SAFETY: passed on to the caller.
        let out = unsafe { self.lanes(row) };
        for (lane, (out, sum)) in out.iter_mut().zip(sums).enumerate() {
            let base = if self.accumulate { *out } else { 0.0 };
            *out = base + self.bias.map_or(0.0, |bias| bias[lane]) + sum;
        }
    }
}

/// Fetches the `num_bytes` bytes that lie [`PREFETCH_BYTES`] after `weights` into the caches.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) fn prefetch(weights: *const u8, num_bytes: usize) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    for line in (0..num_bytes).step_by(64) {
        // A prefetch may point anywhere, so past the end of the panels too.
        let ahead = weights.wrapping_add(PREFETCH_BYTES + line);
        // SAFETY: every x86-64 processor has the instruction, and it touches no memory as far as
        // the program can see.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead.cast()) };
    }
}
