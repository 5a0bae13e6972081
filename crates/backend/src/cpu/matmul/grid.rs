//! How the tiles of a segment are shared among threads.

use std::ops::Range;

use super::{
    activations::RowBlocks,
    packed::Segment,
    tile::{Ahead, OutTile, Tile, TileKernel},
};
use crate::cpu::pool::SharedMut;

/// Bytes of activations that stay in a thread's second-level cache while panels pass by.
const CACHED_ACTIVATIONS_BYTES: usize = 512 << 10;

/// Bytes of weights that stay there too while blocks of activations pass by.
const CACHED_WEIGHTS_BYTES: usize = 128 << 10;

/// One segment of a matmul.
pub(super) struct SegmentRun<'a> {
    pub(super) segment: &'a Segment,
    /// Number `n - 1` takes blocks of `n` rows.
    pub(super) kernels: &'static [TileKernel],
    /// Most panels that they take at once.
    pub(super) panels_at_once: usize,
    /// They take turns in fetching the next panel: see [`Ahead`].
    pub(super) spread_fetching: bool,
    /// See [`Tile::num_steps`].
    pub(super) num_steps: usize,
    /// Words of a row of activations.
    pub(super) row_words: usize,
    /// All blocks of activations.
    pub(super) x: &'a [u32],
    pub(super) blocks: RowBlocks,
    /// `[stride]`.
    pub(super) bias: Option<&'a [f32]>,
    /// `[num_rows, stride]`.
    pub(super) out: &'a SharedMut<'a, f32>,
    pub(super) stride: usize,
    pub(super) accumulate: bool,
}

/// Panels and blocks cut into chunks; a task is a chunk of panels times a chunk of blocks.
pub(super) struct Grid {
    num_panel_chunks: usize,
    num_block_chunks: usize,
}

impl Grid {
    pub(super) fn new(run: &SegmentRun<'_>, num_threads: usize) -> Self {
        /// A task shorter than this is not worth another thread's attention.
        const MIN_TASK_NS: usize = 3000;
        const TASKS_PER_THREAD: usize = 8;
        let (num_panels, num_blocks) = (run.segment.num_panels(), run.blocks.num_blocks());
        let num_tasks = run.estimate_ns() / MIN_TASK_NS;
        // Whole rounds for all threads, so that nobody waits for a last odd task.
        let num_tasks = match num_tasks / num_threads {
            0 => num_tasks.max(1),
            rounds => rounds.min(TASKS_PER_THREAD) * num_threads,
        };
        let num_panel_chunks = num_tasks.min(num_panels);
        let num_block_chunks = num_tasks.div_ceil(num_panel_chunks).min(num_blocks);
        Self { num_panel_chunks, num_block_chunks }
    }

    pub(super) fn num_tasks(&self) -> usize {
        self.num_panel_chunks * self.num_block_chunks
    }
}

impl SegmentRun<'_> {
    /// About how long one thread takes: the longer of reading the weights and of computing.
    fn estimate_ns(&self) -> usize {
        const WEIGHT_BYTES_PER_NS: usize = 20;
        const ACTIVATION_BYTES_PER_NS: usize = 16;
        let panel_bytes = self.segment.panel_bytes();
        let x_bytes = self.blocks.num_rows() * self.row_words * 4;
        let panel_ns = (panel_bytes / WEIGHT_BYTES_PER_NS).max(x_bytes / ACTIVATION_BYTES_PER_NS);
        panel_ns * self.segment.num_panels()
    }

    /// Computes the tiles of task `task` of `grid`.
    ///
    /// Of the activations as much as the second-level cache holds, then of the weights as much as
    /// stays in it beside them, are taken through each other, block by block. So weights come from
    /// memory once, and a row's outputs are written in runs. Where fetching is spread, it is one
    /// panel, which stays in the first-level cache.
    pub(super) fn task(&self, grid: &Grid, task: usize) {
        let panels = self.segment.num_panels();
        let panels = cut(panels, task / grid.num_block_chunks, grid.num_panel_chunks);
        let blocks = self.blocks.num_blocks();
        let blocks = cut(blocks, task % grid.num_block_chunks, grid.num_block_chunks);
        let block_bytes = self.blocks.rows(0).len() * self.row_words * 4;
        let panel_bytes = self.segment.panel_bytes();
        let kept_bytes = if self.spread_fetching { panel_bytes } else { CACHED_WEIGHTS_BYTES };
        for blocks in batches(blocks, CACHED_ACTIVATIONS_BYTES / block_bytes) {
            for panels in batches(panels.clone(), kept_bytes / panel_bytes) {
                for block in blocks.clone() {
                    let tiles = batches(panels.clone(), self.panels_at_once);
                    tiles.for_each(|panels| self.tile(panels, block, &blocks));
                }
            }
        }
    }

    /// The tile of `panels` and `block`, which is one of `blocks` that meet these panels now.
    fn tile(&self, panels: Range<usize>, block: usize, blocks: &Range<usize>) {
        let panel_rows = self.segment.panel_rows;
        let lane_start = panels.start * panel_rows;
        let num_lanes = (panels.len() * panel_rows).min(self.segment.num_rows - lane_start);
        let column = self.segment.first_row + lane_start;
        let rows = self.blocks.rows(block);
        let weights = self.segment.panels(panels);
        let ahead = if self.spread_fetching && blocks.len() > 1 {
            Ahead::half_of_next(weights, block - blocks.start)
        } else {
            Ahead::following(weights)
        };
        let tile = Tile {
            weights,
            x: &self.x[rows.start * self.row_words..rows.end * self.row_words],
            num_steps: self.num_steps,
            ahead,
            out: OutTile {
                out: self.out,
                first: rows.start * self.stride + column,
                stride: self.stride,
                num_lanes,
                bias: self.bias.map(|bias| &bias[column..column + num_lanes]),
                accumulate: self.accumulate,
            },
        };
        // SAFETY: `MatmulScratch` checked that the processor has the level's instructions; each
        // tile is computed by the one task whose chunks hold its panel and its block.
        unsafe { self.kernels[rows.len() - 1](&tile) };
    }
}

/// Chunk `chunk` of `0..len` cut into `num_chunks`.
fn cut(len: usize, chunk: usize, num_chunks: usize) -> Range<usize> {
    chunk * len / num_chunks..(chunk + 1) * len / num_chunks
}

/// `range` in pieces of `max_len`, but of one at least.
fn batches(range: Range<usize>, max_len: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(max_len.max(1)).map(move |start| start..end.min(start + max_len.max(1)))
}
