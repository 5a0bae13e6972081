//! One task of attention: some queries of a row, one key/value head, one split of the context.

use std::ops::Range;

use super::{
    KV_TILE,
    paged::{Ahead, PagedHead},
    products::{WeighRows, score, weigh},
    scratch::Scratch,
};
use crate::{
    AttentionShape,
    cpu::kernels::{
        exp::exp,
        kv::KvElement,
        lanes::{Kernel, Lanes, MAX_LANES},
    },
};

/// Some queries of a row and one key/value head.
///
/// Its rows are the queries times the heads of the group: row `q * group + h`.
pub(super) struct Task<'a, K> {
    pub(super) qkv: &'a [f32],
    pub(super) keys: PagedHead<'a, K>,
    pub(super) values: PagedHead<'a, K>,
    pub(super) attention: AttentionShape,
    pub(super) scale: f32,
    pub(super) window: Option<usize>,
    /// The first query's token.
    pub(super) first_token: usize,
    /// The first query's position.
    pub(super) first_position: usize,
    pub(super) num_queries: usize,
}

/// Positions that the token at `position` sees.
pub(super) fn visible(position: usize, window: Option<usize>) -> Range<usize> {
    let end = position + 1;
    window.map_or(0, |window| end.saturating_sub(window.max(1)))..end
}

impl<K> Task<'_, K> {
    pub(super) fn num_rows(&self) -> usize {
        self.num_queries * self.group()
    }

    /// Elements of a head, with room to fill the last register.
    pub(super) fn head_stride(&self) -> usize {
        self.attention.head_dim.next_multiple_of(MAX_LANES)
    }

    /// Where the output of `row` begins.
    pub(super) fn out_start(&self, row: usize) -> usize {
        let head = self.keys.kv_head * self.group() + row % self.group();
        let token = self.first_token + row / self.group();
        token * self.attention.q_len() + head * self.attention.head_dim
    }

    fn query(&self, row: usize) -> &[f32] {
        let head = self.keys.kv_head * self.group() + row % self.group();
        let token = self.first_token + row / self.group();
        let start = token * self.attention.qkv_len() + head * self.attention.head_dim;
        &self.qkv[start..start + self.attention.head_dim]
    }

    /// Query heads that share the key/value head.
    fn group(&self) -> usize {
        self.attention.num_heads / self.attention.num_kv_heads
    }

    /// What a row sees of the tile at `tile_start`, relative to it.
    fn visible_in_tile(&self, row: usize, tile_start: usize) -> Range<usize> {
        let visible = visible(self.first_position + row / self.group(), self.window);
        let relative = |position: usize| position.saturating_sub(tile_start).min(KV_TILE);
        relative(visible.start)..relative(visible.end)
    }

    /// Where the first tile begins that any row sees.
    fn first_tile(&self) -> usize {
        visible(self.first_position, self.window).start / KV_TILE * KV_TILE
    }

    /// Where the positions end that any row sees.
    fn end(&self) -> usize {
        self.first_position + self.num_queries
    }

    /// The tile at `tile_start`, which must begin before [`Task::end`].
    fn tile(&self, tile_start: usize) -> Tile {
        // A query sees the tile unless it comes before the tile, or its window after it.
        let first = tile_start.saturating_sub(self.first_position);
        let end = self.window.map_or(self.num_queries, |window| {
            let last_position = tile_start + KV_TILE + window.max(1) - 2;
            (last_position + 1).saturating_sub(self.first_position).min(self.num_queries)
        });
        let rows = first * self.group()..end * self.group();
        let start = self.visible_in_tile(rows.start, tile_start).start;
        let end = self.visible_in_tile(rows.end - 1, tile_start).end;
        Tile { start: tile_start, rows, seen: start..end }
    }
}

/// [`KV_TILE`] positions, and who sees what of them.
struct Tile {
    /// The first position.
    start: usize,
    /// The rows that see any of it; they are neighbours.
    rows: Range<usize>,
    /// What they see, relative to `start`. Nothing else is read: it may hold anything, even NaN.
    seen: Range<usize>,
}

impl Tile {
    /// The absolute positions of what is seen.
    fn positions(&self) -> Range<usize> {
        self.start + self.seen.start..self.start + self.seen.end
    }
}

impl<'a, K: KvElement> Task<'a, K> {
    /// Keys and values of the tile at `start`.
    fn ahead(&self, start: usize) -> Ahead<'a, K> {
        Ahead::new(self.keys, self.values, self.tile(start).positions())
    }
}

/// A [`Task`] on one split of the context. Leaves the split's running softmax in `scratch.part`.
pub(super) struct Split<'s, 'm, 'a, K> {
    pub(super) task: &'s Task<'a, K>,
    pub(super) positions: Range<usize>,
    /// What this thread will probably do next.
    pub(super) next: Option<&'s Task<'a, K>>,
    pub(super) scratch: &'s mut Scratch<'m>,
}

impl<K: KvElement> Kernel for Split<'_, '_, '_, K> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Self { task, positions, next, scratch } = self;
        scratch.part.clear();
        load_queries(l, task, scratch);
        if task.head_stride() != task.attention.head_dim {
            scratch.tile.fill(0.0); // The padding of every head.
        }
        let starts = positions.start.max(task.first_tile())..positions.end.min(task.end());
        for start in starts.step_by(KV_TILE) {
            let mut ahead = if start + KV_TILE < task.end() {
                task.ahead(start + KV_TILE)
            } else {
                let next = next.unwrap_or(task);
                next.ahead(next.first_tile())
            };
            add_tile(l, task, task.tile(start), &mut ahead, scratch);
        }
    }
}

/// Queries times the scale, padded with zeros.
#[inline(always)]
fn load_queries<L: Lanes, K: KvElement>(l: L, task: &Task<'_, K>, scratch: &mut Scratch<'_>) {
    let head_stride = task.head_stride();
    for (row, to) in scratch.queries.chunks_exact_mut(head_stride).enumerate() {
        let from = task.query(row);
        to[from.len()..].fill(0.0);
        for (from, to) in from.chunks(L::N).zip(to.chunks_mut(L::N)) {
            let scaled = l.mul(l.load_part(from), l.splat(task.scale));
            l.store_part(&mut to[..from.len()], scaled);
        }
    }
}

/// Adds a tile to the running softmax of the rows that see it.
#[inline(always)]
fn add_tile<L: Lanes, K: KvElement>(
    l: L,
    task: &Task<'_, K>,
    tile: Tile,
    ahead: &mut Ahead<'_, K>,
    scratch: &mut Scratch<'_>,
) {
    let head_stride = task.head_stride();
    let positions = tile.positions();
    let to = &mut scratch.tile[tile.seen.start * head_stride..];
    task.keys.load(l, positions.clone(), (to, head_stride), ahead);
    for block in tile.seen.start / L::N..tile.seen.end.div_ceil(L::N) {
        ahead.fetch_some();
        score(l, (scratch.queries, scratch.tile), tile.rows.clone(), block, scratch.scores);
    }
    for row in tile.rows.clone() {
        ahead.fetch_some();
        soften(l, row, task.visible_in_tile(row, tile.start), scratch);
    }
    let to = &mut scratch.tile[tile.seen.start * head_stride..];
    task.values.load(l, positions, (to, head_stride), ahead);
    ahead.fetch_rest();
    let mut row = tile.rows.start;
    while row < tile.rows.end {
        row += weigh_some(l, task, tile.start, row..tile.rows.end, scratch);
    }
}

/// Turns a row's scores into weights relative to the greatest score so far, and brings what was
/// summed before to the same terms.
#[inline(always)]
fn soften<L: Lanes>(l: L, row: usize, visible: Range<usize>, scratch: &mut Scratch<'_>) {
    let scores = &mut scratch.scores[row * KV_TILE..][..KV_TILE];
    scores[..visible.start].fill(f32::NEG_INFINITY);
    scores[visible.end..].fill(f32::NEG_INFINITY);
    let mut max = l.splat(f32::NEG_INFINITY);
    for scores in scores.chunks_exact(L::N) {
        max = l.max(max, l.load_part(scores));
    }
    let (before, max) = (scratch.part.max[row], l.max_lane(max));
    let max = if before > max { before } else { max };
    let mut sum = l.splat(0.0);
    for scores in scores.chunks_exact_mut(L::N) {
        let weights = exp(l, l.sub(l.load_part(scores), l.splat(max)));
        sum = l.add(sum, weights);
        l.store_part(scores, weights);
    }
    let mut total = scratch.part.sum[row];
    if max != before {
        let mut shrink = [0.0; MAX_LANES];
        let factor = exp(l, l.splat(before - max));
        l.store_part(&mut shrink, factor);
        total *= shrink[0];
        let head_stride = scratch.tile.len() / KV_TILE;
        let values = &mut scratch.part.values[row * head_stride..][..head_stride];
        for values in values.chunks_exact_mut(L::N) {
            l.store_part(values, l.mul(l.load_part(values), factor));
        }
    }
    scratch.part.max[row] = max;
    scratch.part.sum[row] = total + l.sum(sum);
}

/// Adds the weighted values to the first few of `rows`; returns how many.
///
/// Rows are taken together over the positions that all of them see. What only some see is added
/// row by row before and after, so that a row's sum never has a term that it does not see.
#[inline(always)]
fn weigh_some<L: Lanes, K: KvElement>(
    l: L,
    task: &Task<'_, K>,
    tile_start: usize,
    rows: Range<usize>,
    scratch: &mut Scratch<'_>,
) -> usize {
    // As many sums as fit the registers, beside the values: AVX-512 has 32 registers, AVX2 16.
    let at_once = if L::N == MAX_LANES { 4 } else { 2 };
    let num = rows.len().min(at_once);
    let seen = |row| task.visible_in_tile(row, tile_start);
    let common = seen(rows.start + num - 1).start..seen(rows.start).end;
    let (weights, tile, values) = (&*scratch.scores, &*scratch.tile, &mut *scratch.part.values);
    if common.is_empty() {
        let positions = seen(rows.start);
        weigh(l, (weights, tile), &WeighRows { first: rows.start, num: 1, positions }, values);
        return 1;
    }
    for row in rows.start..rows.start + num {
        let positions = seen(row).start..common.start;
        weigh(l, (weights, tile), &WeighRows { first: row, num: 1, positions }, values);
    }
    let positions = common.clone();
    weigh(l, (weights, tile), &WeighRows { first: rows.start, num, positions }, values);
    for row in rows.start..rows.start + num {
        let positions = common.end..seen(row).end;
        weigh(l, (weights, tile), &WeighRows { first: row, num: 1, positions }, values);
    }
    num
}
