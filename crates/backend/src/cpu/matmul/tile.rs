//! What a kernel computes: a panel of weights, or two, times a few rows of activations.

use super::format::PANEL_ROWS;
use crate::cpu::pool::SharedMut;

/// How far ahead of their use kernels fetch weights: a memory's latency times its bandwidth.
const PREFETCH_BYTES: usize = 8192;

/// Bytes of a line of the caches.
const LINE_BYTES: usize = 64;

/// Operands of a kernel: 16 outputs of each panel for each of a few rows of activations.
pub(super) struct Tile<'a> {
    /// One panel, or as many as the kernel takes: see [`super::format`] for groups; `[cols, 16]`
    /// for plain numbers.
    pub(super) weights: &'a [u8],
    /// One block of rows: see [`super::activations`].
    pub(super) x: &'a [u32],
    /// Groups of a row, or columns for plain numbers.
    pub(super) num_steps: usize,
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub(super) ahead: Ahead,
    pub(super) out: OutTile<'a>,
}

/// Weights that kernels with products of bf16 ask memory for while they compute; the other kernels,
/// which compute longer on fewer bytes, fetch [`PREFETCH_BYTES`] ahead.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(super) struct Ahead {
    start: *const u8,
    bytes_per_step: usize,
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

impl Ahead {
    /// What follows `weights`, for those who meet one block of activations only.
    pub(super) fn following(weights: &[u8]) -> Self {
        Self {
            start: weights.as_ptr().wrapping_add(PREFETCH_BYTES),
            bytes_per_step: 2 * LINE_BYTES,
        }
    }

    /// A half of the panel behind `panel`: the first two blocks that meet a panel share the
    /// fetching of the next, so that memory works while more than one block computes. Later blocks
    /// ask for what is there already.
    pub(super) fn half_of_next(panel: &[u8], block: usize) -> Self {
        let offset = panel.len() + block.min(1) * panel.len() / 2;
        Self { start: panel.as_ptr().wrapping_add(offset), bytes_per_step: LINE_BYTES }
    }

    /// Asks for what step `step` is to ask for: two lines, of which the second is the next step's
    /// first if they share. That costs less than to look whether they do.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn fetch(self, step: usize) {
        let first = self.start.wrapping_add(step * self.bytes_per_step);
        fetch_line(first);
        fetch_line(first.wrapping_add(LINE_BYTES));
    }
}

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
    for line in (0..num_bytes).step_by(LINE_BYTES) {
        fetch_line(weights.wrapping_add(PREFETCH_BYTES + line));
    }
}

/// Fetches a line of the cache; any address will do, past the end of the panels too.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn fetch_line(address: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: every x86-64 processor has the instruction, and it touches no memory as far as the
    // program can see.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
}
