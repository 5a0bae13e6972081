//! Causal attention over the paged KV cache.
//!
//! A task takes one row, one key/value head and a tile of the row's queries, and goes through the
//! context in tiles of [`KV_TILE`] positions with a running softmax. All query heads of the group
//! and all queries of the tile share what was loaded of keys and values:
//!
//! ```text
//!               positions  0 .. 63   64 .. 127   128 ..         1024 ..
//! rows of a     query 0    xxxxxxxx  xxxx           |              |
//! task: queries query 0    xxxxxxxx  xxxx           |              |
//! times heads   query 1    xxxxxxxx  xxxxx          |              |
//! of a group    query 1    xxxxxxxx  xxxxx          |              |
//!                          <- tile ->               <--- split --->
//! ```
//!
//! Every [`SPLIT`] positions the running softmax starts afresh, and the parts are joined in order.
//! A long context with few queries is thus spread over all threads.
//!
//! Invariant: what is summed in which order depends on a query's own position and on nothing else:
//! tiles and splits begin at absolute positions, and a query goes through exactly those that it
//! sees. So its output has the same bits in any batch, however its prefill was cut.
//!
//! # Source
//! Milakov and Gimelshein: "Online normalizer calculation for softmax", 2018. Dao et al.:
//! "FlashAttention", 2022; splits as in "Flash-Decoding", 2023, but at fixed positions.

mod paged;
mod products;
mod running;
mod scratch;
mod task;

use std::ops::Range;

use paged::PagedHead;
use running::Running;
use scratch::{Scratch, with_scratch};
use task::{Task, visible};

use super::{Cores, kv::KvElement, lanes::dispatch};
use crate::{AttentionShape, KvLayout, cpu::pool::SharedMut};

/// Positions of keys or values that are worked on at a time.
const KV_TILE: usize = 64;
/// Positions after which the running softmax starts afresh; a multiple of [`KV_TILE`].
const SPLIT: usize = 1024;
/// About how many rows (queries times heads of a group) a task has.
const MAX_ROWS: usize = 64;

/// Arguments of [`attention`].
#[allow(missing_docs)]
pub(crate) struct Attention<'a, K> {
    /// `[num_tokens, qkv_len]`; only the queries are read.
    pub(crate) qkv: &'a [f32],
    /// See [`KvLayout`].
    pub(crate) keys: &'a [K],
    /// See [`KvLayout`].
    pub(crate) values: &'a [K],
    /// `[num_tokens, q_len]`.
    pub(crate) out: &'a mut [f32],
    pub(crate) attention: AttentionShape,
    /// Multiplies scores before the softmax.
    pub(crate) scale: f32,
    /// How many tokens, itself included, a token sees; `None`: all before it.
    pub(crate) window: Option<usize>,
    /// `[num_rows + 1]`.
    pub(crate) row_starts: &'a [u32],
    /// `[num_rows]`.
    pub(crate) context_lens: &'a [u32],
    /// `[num_rows + 1]`.
    pub(crate) block_starts: &'a [u32],
    pub(crate) blocks: &'a [u32],
    pub(crate) num_rows: usize,
}

/// Some of a row's queries and one key/value head.
#[derive(Clone, Debug)]
struct Share {
    row: usize,
    kv_head: usize,
    /// Within the row.
    queries: Range<usize>,
    /// Splits that these queries see.
    splits: Range<usize>,
}

/// Causal attention of every row's new tokens over its context: query `i` of `n` is at position
/// `context_len - n + i` and sees the positions up to its own.
///
/// # Panics
/// If a row's block table does not cover its context, or names a block outside the cache.
pub(crate) fn attention<K: KvElement>(cores: Cores<'_>, mut args: Attention<'_, K>) {
    let out = std::mem::take(&mut args.out);
    let shares = args.shares();
    let few = shares.len() < 4 * cores.pool.num_threads();
    if few && shares.iter().any(|share| share.splits.len() > 1) {
        spread(cores, &args, &shares, &SharedMut::new(out));
        return;
    }
    let out = SharedMut::new(out);
    cores.pool.run(shares.len(), |i| {
        let task = args.task(&shares[i]);
        // A thread's shares are neighbours, unless it has to help another out.
        let next = shares.get(i + 1).map(|next| args.task(next));
        with_scratch(task.num_rows(), task.head_stride(), |mut scratch| {
            scratch.total.clear();
            for split in shares[i].splits.clone() {
                run_split(cores, &task, split, next.as_ref(), &mut scratch);
                scratch.total.join(&scratch.part);
            }
            write_out(&task, &scratch.total, &out);
        });
    });
}

/// As the main path, with a task for every split: first all parts, then their sums.
fn spread<K: KvElement>(
    cores: Cores<'_>,
    args: &Attention<'_, K>,
    shares: &[Share],
    out: &SharedMut<'_, f32>,
) {
    let mut parts = Vec::new();
    let mut first_parts = Vec::with_capacity(shares.len());
    let mut num_floats = 0;
    for share in shares {
        first_parts.push(parts.len());
        let task = args.task(share);
        let len = Running::num_floats(task.num_rows(), task.head_stride());
        for split in share.splits.clone() {
            parts.push((share, split, num_floats..num_floats + len));
            num_floats += len;
        }
    }
    let mut memory = vec![0.0; num_floats];
    let shared = SharedMut::new(&mut memory);
    cores.pool.run(parts.len(), |i| {
        let (share, split, place) = &parts[i];
        let task = args.task(share);
        with_scratch(task.num_rows(), task.head_stride(), |mut scratch| {
            run_split(cores, &task, *split, None, &mut scratch);
            // SAFETY: every part has a place of its own.
            let place = unsafe { shared.slice(place.clone()) };
            scratch.part.copy_to(place);
        });
    });
    cores.pool.run(shares.len(), |i| {
        let task = args.task(&shares[i]);
        with_scratch(task.num_rows(), task.head_stride(), |mut scratch| {
            scratch.total.clear();
            for (_, _, place) in &parts[first_parts[i]..][..shares[i].splits.len()] {
                // SAFETY: the parts are complete; every share reads its own.
                scratch.part.copy_from(unsafe { shared.slice(place.clone()) });
                scratch.total.join(&scratch.part);
            }
            write_out(&task, &scratch.total, out);
        });
    });
}

fn run_split<K: KvElement>(
    cores: Cores<'_>,
    task: &Task<'_, K>,
    split: usize,
    next: Option<&Task<'_, K>>,
    scratch: &mut Scratch<'_>,
) {
    let positions = split * SPLIT..(split + 1) * SPLIT;
    dispatch(cores.simd, task::Split { task, positions, next, scratch });
}

/// Writes a share's finished rows to their places.
fn write_out<K>(task: &Task<'_, K>, total: &Running<'_>, out: &SharedMut<'_, f32>) {
    let head_dim = task.attention.head_dim;
    for row in 0..task.num_rows() {
        let start = task.out_start(row);
        // SAFETY: every query head belongs to one share.
        let out = unsafe { out.slice(start..start + head_dim) };
        total.finish(row, out);
    }
}

impl<'a, K: KvElement> Attention<'a, K> {
    /// All the work, cut into shares.
    fn shares(&self) -> Vec<Share> {
        let group = self.attention.num_heads / self.attention.num_kv_heads;
        let queries_per_share = (MAX_ROWS / group).max(1);
        let mut shares = Vec::new();
        for row in 0..self.num_rows {
            let num_queries = self.tokens(row).len();
            for first in (0..num_queries).step_by(queries_per_share) {
                let queries = first..num_queries.min(first + queries_per_share);
                let start = self.first_position(row);
                let positions = visible(start + queries.start, self.window).start
                    ..visible(start + queries.end - 1, self.window).end;
                let splits = positions.start / SPLIT..positions.end.div_ceil(SPLIT);
                for kv_head in 0..self.attention.num_kv_heads {
                    let (queries, splits) = (queries.clone(), splits.clone());
                    shares.push(Share { row, kv_head, queries, splits });
                }
            }
        }
        shares
    }

    /// A row's tokens.
    fn tokens(&self, row: usize) -> Range<usize> {
        self.row_starts[row] as usize..self.row_starts[row + 1] as usize
    }

    /// Position of a row's first new token.
    fn first_position(&self, row: usize) -> usize {
        let (context, new) = (self.context_lens[row] as usize, self.tokens(row).len());
        assert!(new <= context, "row {row}: {new} new tokens in a context of {context}");
        context - new
    }

    fn task(&self, share: &Share) -> Task<'a, K> {
        let row = share.row;
        let blocks = self.block_starts[row] as usize..self.block_starts[row + 1] as usize;
        let paged = |cache| PagedHead {
            cache,
            blocks: &self.blocks[blocks.clone()],
            layout: KvLayout::new(K::DTYPE, self.attention),
            kv_head: share.kv_head,
        };
        Task {
            qkv: self.qkv,
            keys: paged(self.keys),
            values: paged(self.values),
            attention: self.attention,
            scale: self.scale,
            window: self.window,
            first_token: self.tokens(row).start + share.queries.start,
            first_position: self.first_position(row) + share.queries.start,
            num_queries: share.queries.len(),
        }
    }
}

#[cfg(test)]
mod tests;
