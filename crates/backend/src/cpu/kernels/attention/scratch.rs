//! Memory of one task, kept by its thread.

use std::cell::RefCell;

use super::{KV_TILE, running::Running};
use crate::cpu::kernels::lanes::MAX_LANES;

/// Memory of one task.
pub(super) struct Scratch<'a> {
    /// `[num_rows, head_stride]`: queries times the scale.
    pub(super) queries: &'a mut [f32],
    /// `[num_rows, KV_TILE]`: scores, then weights.
    pub(super) scores: &'a mut [f32],
    /// `[KV_TILE, head_stride]`: keys, then values.
    pub(super) tile: &'a mut [f32],
    /// The split's running softmax.
    pub(super) part: Running<'a>,
    /// What the splits before have seen.
    pub(super) total: Running<'a>,
}

/// A cache line, so that no register's load touches two.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; MAX_LANES]);

thread_local! {
    static MEMORY: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// Runs `use_it` with this thread's memory. What it holds is left over from other tasks.
///
/// # Shapes
/// `head_stride` is a multiple of [`MAX_LANES`].
pub(super) fn with_scratch<R>(
    num_rows: usize,
    head_stride: usize,
    use_it: impl FnOnce(Scratch<'_>) -> R,
) -> R {
    MEMORY.with_borrow_mut(|lines| {
        let rows = num_rows.next_multiple_of(MAX_LANES);
        let num_floats = rows * (3 * head_stride + KV_TILE + 4) + KV_TILE * head_stride;
        let num_lines = num_floats / MAX_LANES;
        if lines.len() < num_lines {
            lines.resize(num_lines, Line([0.0; MAX_LANES]));
        }
        let mut rest = lines.as_flattened_floats();
        let mut take = |len: usize, used: usize| {
            let (section, after) = std::mem::take(&mut rest).split_at_mut(len);
            rest = after;
            &mut section[..used]
        };
        let values_len = num_rows * head_stride;
        use_it(Scratch {
            queries: take(rows * head_stride, values_len),
            scores: take(rows * KV_TILE, num_rows * KV_TILE),
            tile: take(KV_TILE * head_stride, KV_TILE * head_stride),
            part: Running {
                max: take(rows, num_rows),
                sum: take(rows, num_rows),
                values: take(rows * head_stride, values_len),
            },
            total: Running {
                max: take(rows, num_rows),
                sum: take(rows, num_rows),
                values: take(rows * head_stride, values_len),
            },
        })
    })
}

/// Lines as the floats in them.
trait AsFloats {
    fn as_flattened_floats(&mut self) -> &mut [f32];
}

impl AsFloats for Vec<Line> {
    fn as_flattened_floats(&mut self) -> &mut [f32] {
        let len = self.len() * MAX_LANES;
        // SAFETY: a `Line` is its array and nothing else: 64 bytes, aligned to 64.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr().cast(), len) }
    }
}
