//! Cutting a prompt in the KV cache: what its last tokens attend to most is copied, head by head.
//!
//! # Source
//! Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024, section 4:
//! votes of an observation window, pooled over neighbours so that what belongs together stays.

use std::sync::Mutex;

use super::{
    Cores,
    kv::{KvElement, places, read_head},
};
use crate::{AttentionShape, KvLayout, PromptCut};

/// Votes are averaged over so many neighbours.
const POOL: usize = 5;

/// Arguments of [`cut_prompts`]: one layer.
#[allow(missing_docs)]
pub(crate) struct CutPrompts<'a, K> {
    /// `[num_tokens, qkv_len]`.
    pub(crate) qkv: &'a [f32],
    /// See [`KvLayout`].
    pub(crate) keys: &'a mut [K],
    /// See [`KvLayout`].
    pub(crate) values: &'a mut [K],
    pub(crate) attention: AttentionShape,
    pub(crate) scale: f32,
    pub(crate) row_starts: &'a [u32],
    pub(crate) block_starts: &'a [u32],
    pub(crate) blocks: &'a [u32],
    pub(crate) cuts: &'a [PromptCut],
}

/// Copies what stays of every prompt that is cut.
///
/// # Panics
/// If a cut keeps fewer tokens than decide, or a block lies outside the cache.
pub(crate) fn cut_prompts<K: KvElement>(cores: Cores<'_>, args: CutPrompts<'_, K>) {
    let layout = KvLayout::new(K::DTYPE, args.attention);
    for cut in args.cuts {
        let row = Row::new(&args, cut);
        let kept = Mutex::new(vec![Vec::new(); layout.num_kv_heads]);
        let keys = &*args.keys;
        cores.pool.run(layout.num_kv_heads, |kv_head| {
            let positions = row.choose(&layout, keys, kv_head);
            kept.lock().expect("no task panics")[kv_head] = positions;
        });
        for (kv_head, positions) in kept.into_inner().expect("all have ended").iter().enumerate() {
            for (i, &position) in positions.iter().enumerate() {
                let from = Place::of::<K>(&layout, row.blocks, kv_head, position);
                let to = Place::of::<K>(&layout, &cut.blocks, kv_head, i);
                copy(&layout, args.keys, from, to);
                copy(&layout, args.values, from, to);
            }
        }
    }
}

/// A prompt that is cut, in one layer.
struct Row<'a> {
    /// `[num_observed, qkv_len]`.
    observed: &'a [f32],
    attention: AttentionShape,
    scale: f32,
    context_len: usize,
    num_kept: usize,
    /// Its block table.
    blocks: &'a [u32],
}

impl<'a> Row<'a> {
    fn new<K>(args: &CutPrompts<'a, K>, cut: &PromptCut) -> Self {
        let len = args.attention.qkv_len();
        let end = args.row_starts[cut.row + 1] as usize;
        let blocks = args.block_starts[cut.row] as usize..args.block_starts[cut.row + 1] as usize;
        Self {
            observed: &args.qkv[(end - cut.num_observed) * len..end * len],
            attention: args.attention,
            scale: args.scale,
            context_len: cut.context_len,
            num_kept: cut.blocks.len() * args.attention.block_size,
            blocks: &args.blocks[blocks],
        }
    }

    fn num_observed(&self) -> usize {
        self.observed.len() / self.attention.qkv_len()
    }

    /// The positions that stay of a head, in order.
    fn choose<K: KvElement>(&self, layout: &KvLayout, keys: &[K], kv_head: usize) -> Vec<usize> {
        let num_observed = self.num_observed();
        let num_voted = self.context_len - num_observed;
        let votes = pooled(&self.votes(layout, keys, kv_head));
        let mut order: Vec<usize> = (0..num_voted).collect();
        let by_votes = |a: &usize, b: &usize| votes[*b].total_cmp(&votes[*a]).then(a.cmp(b));
        order.sort_unstable_by(by_votes);
        order.truncate(self.num_kept - num_observed);
        order.sort_unstable();
        order.extend(num_voted..self.context_len);
        order
    }

    /// How much those that decide attend to each position before them, `[num_voted]`.
    fn votes<K: KvElement>(&self, layout: &KvLayout, keys: &[K], kv_head: usize) -> Vec<f32> {
        let AttentionShape { num_heads, num_kv_heads, head_dim, .. } = self.attention;
        let keys = self.keys(layout, keys, kv_head);
        let num_observed = self.num_observed();
        let num_voted = self.context_len - num_observed;
        let group = num_heads / num_kv_heads;
        let mut votes = vec![0.0; num_voted];
        let mut weights = vec![0.0; self.context_len];
        for (i, token) in self.observed.chunks_exact(self.attention.qkv_len()).enumerate() {
            let seen = &mut weights[..num_voted + i + 1];
            let heads = token.chunks_exact(head_dim).skip(kv_head * group).take(group);
            for query in heads {
                for (weight, key) in seen.iter_mut().zip(keys.chunks_exact(head_dim)) {
                    *weight = dot(query, key) * self.scale;
                }
                soften(seen);
                for (vote, weight) in votes.iter_mut().zip(&*seen) {
                    *vote += weight;
                }
            }
        }
        votes
    }

    /// `[context_len, head_dim]`.
    fn keys<K: KvElement>(&self, layout: &KvLayout, keys: &[K], kv_head: usize) -> Vec<f32> {
        let mut out = vec![0.0; self.context_len * layout.head_dim];
        for (position, head) in out.chunks_exact_mut(layout.head_dim).enumerate() {
            let Place { strip, token } = Place::of::<K>(layout, self.blocks, kv_head, position);
            read_head(layout, token, &keys[strip..][..strip_len::<K>(layout)], head);
        }
        out
    }
}

/// Where a token's head lies.
#[derive(Clone, Copy)]
struct Place {
    /// Where its strip begins, in elements.
    strip: usize,
    /// In the strip.
    token: usize,
}

impl Place {
    fn of<K: KvElement>(
        layout: &KvLayout,
        blocks: &[u32],
        kv_head: usize,
        position: usize,
    ) -> Self {
        let block = blocks[position / layout.block_size] as usize;
        let strip = (block * layout.num_kv_heads + kv_head) * layout.strip_bytes();
        Self { strip: strip / size_of::<K>(), token: position % layout.block_size }
    }
}

fn strip_len<K>(layout: &KvLayout) -> usize {
    layout.strip_bytes() / size_of::<K>()
}

/// Copies a token's head and its scales.
fn copy<K: KvElement>(layout: &KvLayout, cache: &mut [K], from: Place, to: Place) {
    let places = |place: Place| places::<K>(layout, place.token);
    for (source, target) in places(from).into_iter().zip(places(to)) {
        cache.copy_within(
            from.strip + source.start..from.strip + source.end,
            to.strip + target.start,
        );
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 8;
    let mut sums = [0.0f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f32 = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a_chunks.zip(b_chunks) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    sums.iter().sum::<f32>() + rest
}

fn soften(scores: &mut [f32]) {
    let max = scores.iter().fold(f32::NEG_INFINITY, |max, score| max.max(*score));
    let mut sum = 0.0;
    for score in scores.iter_mut() {
        *score = (*score - max).exp();
        sum += *score;
    }
    let scale = 1.0 / sum;
    scores.iter_mut().for_each(|score| *score *= scale);
}

/// Averages over neighbours; those beyond the ends count as nothing.
fn pooled(votes: &[f32]) -> Vec<f32> {
    let reach = POOL / 2;
    let around = |i: usize| i.saturating_sub(reach)..(i + reach + 1).min(votes.len());
    (0..votes.len()).map(|i| votes[around(i)].iter().sum::<f32>() / POOL as f32).collect()
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;
    use crate::cpu::kernels::{Int4, Int8, kv::write_head, testing::at_every_level};

    const ATTENTION: AttentionShape =
        AttentionShape { num_heads: 4, num_kv_heads: 2, head_dim: 16, block_size: 4 };

    /// A context of 24 tokens in blocks 6, 5 .. 1: token `i`'s key of head `h` points along axis
    /// `i % 12` unless it is one of `hot[h]`, which point along axis 15; values tell the position.
    fn cache<K: KvElement>(hot: [[usize; 2]; 2]) -> (Vec<K>, Vec<K>) {
        let layout = KvLayout::new(K::DTYPE, ATTENTION);
        let len = 12 * layout.block_bytes() / size_of::<K>();
        let (mut keys, mut values) = (vec![K::default(); len], vec![K::default(); len]);
        for position in 0..24 {
            for (kv_head, hot) in hot.iter().enumerate() {
                let mut key = [0.0; 16];
                let is_hot = hot.contains(&position);
                key[if is_hot { 15 } else { position % 12 }] = 4.0;
                let blocks = [6, 5, 4, 3, 2, 1];
                let place = Place::of::<K>(&layout, &blocks, kv_head, position);
                let strip = place.strip..place.strip + strip_len::<K>(&layout);
                write_head(&layout, place.token, &key, &mut keys[strip.clone()]);
                let value = [position as f32; 16];
                write_head(&layout, place.token, &value, &mut values[strip]);
            }
        }
        (keys, values)
    }

    fn check<K: KvElement>() {
        let hot = [[3, 11], [7, 17]];
        let layout = KvLayout::new(K::DTYPE, ATTENTION);
        // The row has three tokens of which two decide; their queries look along axis 15.
        let mut qkv = vec![0.0; 3 * ATTENTION.qkv_len()];
        for token in 1..3 {
            for head in 0..4 {
                qkv[token * ATTENTION.qkv_len() + head * 16 + 15] = 5.0;
            }
        }
        at_every_level(|cores| {
            let (mut keys, mut values) = cache::<K>(hot);
            let blocks = vec![9, 7, 11];
            let cut = PromptCut { row: 0, context_len: 24, num_observed: 2, blocks };
            let args = CutPrompts {
                qkv: &qkv,
                keys: &mut keys,
                values: &mut values,
                attention: ATTENTION,
                scale: 0.25,
                row_starts: &[0, 3],
                block_starts: &[0, 6],
                blocks: &[6, 5, 4, 3, 2, 1],
                cuts: &[cut],
            };
            cut_prompts(cores, args);
            for (kv_head, hot) in hot.into_iter().enumerate() {
                let found: Vec<usize> = (0..12)
                    .map(|i| {
                        let place = Place::of::<K>(&layout, &[9, 7, 11], kv_head, i);
                        let strip = &values[place.strip..][..strip_len::<K>(&layout)];
                        let mut value = [0.0; 16];
                        read_head(&layout, place.token, strip, &mut value);
                        value[0].round() as usize
                    })
                    .collect();
                // Ten stay beside the two that decide: two that are attended to, with those around.
                let expected: Vec<usize> =
                    hot.iter().flat_map(|at| at - 2..=at + 2).chain([22, 23]).collect();
                assert_eq!(found, expected);
            }
        });
    }

    #[test]
    fn what_is_attended_to_stays_with_its_neighbours_each_head_its_own() {
        check::<f32>();
        check::<f16>();
        check::<Int8>();
        check::<Int4>();
    }

    #[test]
    fn votes_are_softmax_weights_and_pools_are_means() {
        let mut scores = [0.0, 3f32.ln(), f32::NEG_INFINITY];
        soften(&mut scores);
        assert!((scores[0] - 0.25).abs() < 1e-6 && (scores[1] - 0.75).abs() < 1e-6);
        assert_eq!(pooled(&[5.0, 0.0, 0.0, 0.0, 10.0]), [1.0, 1.0, 3.0, 2.0, 2.0]);
        assert_eq!(dot(&[1.0; 19], &[2.0; 19]), 38.0);
    }
}
