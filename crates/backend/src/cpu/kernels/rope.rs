//! Rotary position embedding, and writing keys and values to the KV cache.
//!
//! # Source
//! Su et al.: "RoFormer: enhanced transformer with rotary position embedding", 2021, section 3.4.

use std::ops::Range;

use super::{
    Cores,
    kv::{KvElement, places},
    lanes::{Kernel, Lanes, dispatch},
    norm::normalize,
};
use crate::{AttentionShape, KvLayout, cpu::pool::SharedMut};

/// Arguments of [`rope_and_cache`].
#[allow(missing_docs)]
pub(crate) struct RopeAndCache<'a, K> {
    /// `[num_tokens, qkv_len]`: queries, keys, values. Queries and keys are changed in place.
    pub(crate) qkv: &'a mut [f32],
    /// `[max_positions, rotary_dim]`: `rotary_dim / 2` cosines, then as many sines.
    pub(crate) rotary_table: &'a [f32],
    pub(crate) rotary_dim: usize,
    pub(crate) interleaved: bool,
    /// `[head_dim]` each: RMSNorm of every query and key head before rotation.
    pub(crate) qk_norm: Option<(&'a [f32], &'a [f32])>,
    pub(crate) eps: f32,
    pub(crate) attention: AttentionShape,
    /// `[num_tokens]`.
    pub(crate) positions: &'a [u32],
    /// `[num_tokens]`, all different: no two tokens share a place.
    pub(crate) slot_mapping: &'a [u32],
    /// See [`KvLayout`].
    pub(crate) keys: &'a mut [K],
    /// See [`KvLayout`].
    pub(crate) values: &'a mut [K],
}

/// Normalises (if asked) and rotates queries and keys; writes keys and values to the KV cache.
///
/// # Panics
/// If a position lies outside the rotary table or a slot outside the cache.
pub(crate) fn rope_and_cache<K: KvElement>(cores: Cores<'_>, args: RopeAndCache<'_, K>) {
    debug_assert!(all_different(args.slot_mapping), "two tokens share a slot of the KV cache");
    let len = args.attention.qkv_len();
    let rotation = Rotation {
        table: args.rotary_table,
        dim: args.rotary_dim,
        interleaved: args.interleaved,
        qk_norm: args.qk_norm,
        eps: args.eps,
        attention: args.attention,
    };
    let (qkv, keys, values) =
        (SharedMut::new(args.qkv), SharedMut::new(args.keys), SharedMut::new(args.values));
    cores.for_rows(args.slot_mapping.len(), len, |tokens| {
        // SAFETY: tokens of different tasks are different.
        let qkv = unsafe { qkv.slice(tokens.start * len..tokens.end * len) };
        let positions = &args.positions[tokens.clone()];
        dispatch(cores.simd, Rotate { rotation, positions, qkv });
        for (qkv, slot) in qkv.chunks_exact(len).zip(&args.slot_mapping[tokens]) {
            let (key, value) = key_and_value(&args.attention, qkv);
            // SAFETY: no two tokens share a slot, and nobody else uses the cache meanwhile.
            unsafe {
                write_slot(&args.attention, *slot, key, &keys);
                write_slot(&args.attention, *slot, value, &values);
            }
        }
    });
}

/// All key heads of one token, and all value heads.
fn key_and_value<'a>(attention: &AttentionShape, qkv: &'a [f32]) -> (&'a [f32], &'a [f32]) {
    let key_and_value = &qkv[attention.q_len()..];
    key_and_value.split_at(key_and_value.len() / 2)
}

/// Converts one token's heads and writes each to its place in the cache.
///
/// # Safety
/// No other thread uses the slot's elements.
unsafe fn write_slot<K: KvElement>(
    attention: &AttentionShape,
    slot: u32,
    heads: &[f32],
    cache: &SharedMut<'_, K>,
) {
    let layout = KvLayout::new(K::DTYPE, *attention);
    let strip_len = layout.strip_bytes() / size_of::<K>();
    let (block, offset) = (slot as usize / layout.block_size, slot as usize % layout.block_size);
    let [codes, scales] = places::<K>(&layout, offset);
    for (i, head) in heads.chunks_exact(layout.head_dim).enumerate() {
        let start = (block * layout.num_kv_heads + i) * strip_len;
        let at = |place: &Range<usize>| start + place.start..start + place.end;
        // SAFETY: the caller's; the scales are the slot's as well.
        let (codes, scales) = unsafe { (cache.slice(at(&codes)), cache.slice(at(&scales))) };
        K::write_head(head, codes, scales);
    }
}

fn all_different(slots: &[u32]) -> bool {
    let mut sorted = slots.to_vec();
    sorted.sort_unstable();
    sorted.is_sorted_by(|a, b| a < b)
}

/// How heads are rotated.
#[derive(Clone, Copy)]
struct Rotation<'a> {
    table: &'a [f32],
    dim: usize,
    interleaved: bool,
    qk_norm: Option<(&'a [f32], &'a [f32])>,
    eps: f32,
    attention: AttentionShape,
}

struct Rotate<'a> {
    rotation: Rotation<'a>,
    positions: &'a [u32],
    qkv: &'a mut [f32],
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Rotation { table, dim, interleaved, qk_norm, eps, attention } = self.rotation;
        let head_dim = attention.head_dim;
        let tokens = self.qkv.chunks_exact_mut(attention.qkv_len());
        for (qkv, position) in tokens.zip(self.positions) {
            let turn = &table[*position as usize * dim..][..dim];
            let (cos, sin) = turn.split_at(dim / 2);
            for (i, head) in qkv.chunks_exact_mut(head_dim).enumerate() {
                if i >= attention.num_heads + attention.num_kv_heads {
                    break; // Values stay as they are.
                }
                if let Some((q_norm, k_norm)) = qk_norm {
                    let weight = if i < attention.num_heads { q_norm } else { k_norm };
                    normalize(l, head, &weight[..head_dim], eps);
                }
                if interleaved {
                    rotate_neighbours(&mut head[..dim], cos, sin);
                } else {
                    rotate_halves(l, &mut head[..dim], cos, sin);
                }
            }
        }
    }
}

/// Rotates the pairs `(x[i], x[i + len / 2])`.
#[inline(always)]
fn rotate_halves<L: Lanes>(l: L, x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = x.split_at_mut(x.len() / 2);
    let pairs = first.chunks_mut(L::N).zip(second.chunks_mut(L::N));
    for ((first, second), (cos, sin)) in pairs.zip(cos.chunks(L::N).zip(sin.chunks(L::N))) {
        let (a, b) = (l.load_part(first), l.load_part(second));
        let (cos, sin) = (l.load_part(cos), l.load_part(sin));
        l.store_part(first, l.sub(l.mul(a, cos), l.mul(b, sin)));
        l.store_part(second, l.mul_add(b, cos, l.mul(a, sin)));
    }
}

/// Rotates the pairs `(x[2 i], x[2 i + 1])`.
#[inline(always)]
fn rotate_neighbours(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    for (pair, (cos, sin)) in x.chunks_exact_mut(2).zip(cos.iter().zip(sin)) {
        let (a, b) = (pair[0], pair[1]);
        pair[0] = a * cos - b * sin;
        pair[1] = b * cos + a * sin;
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::cpu::kernels::testing::{assert_close, at_every_level, bits, normal};

    const NUM_BLOCKS: usize = 8;

    #[derive(Clone, Copy)]
    struct Case {
        attention: AttentionShape,
        rotary_dim: usize,
        interleaved: bool,
        qk_norm: bool,
    }

    impl Case {
        fn new(num_heads: usize, num_kv_heads: usize, head_dim: usize) -> Self {
            let attention = AttentionShape { num_heads, num_kv_heads, head_dim, block_size: 4 };
            Self { attention, rotary_dim: head_dim, interleaved: false, qk_norm: false }
        }

        fn table(&self) -> Vec<f32> {
            let half = self.rotary_dim / 2;
            let angle = |position: usize, i: usize| {
                position as f64 * 10_000_f64.powf(-(i as f64) / half as f64)
            };
            let row = |position| {
                let cos = (0..half).map(move |i| angle(position, i).cos() as f32);
                let sin = (0..half).map(move |i| angle(position, i).sin() as f32);
                cos.chain(sin)
            };
            (0..100).flat_map(row).collect()
        }

        fn norm_weights(&self) -> (Vec<f32>, Vec<f32>) {
            (normal(21, self.attention.head_dim), normal(22, self.attention.head_dim))
        }

        /// Runs the operator on `qkv`; gives the cache back.
        fn run<K: KvElement>(
            &self,
            cores: Cores<'_>,
            qkv: &mut [f32],
            positions: &[u32],
            slot_mapping: &[u32],
            zero: K,
        ) -> (Vec<K>, Vec<K>) {
            let attention = self.attention;
            let kv_len = NUM_BLOCKS * attention.num_kv_heads * attention.block_size;
            let mut keys = vec![zero; kv_len * attention.head_dim];
            let mut values = keys.clone();
            let (q_norm, k_norm) = self.norm_weights();
            rope_and_cache(
                cores,
                RopeAndCache {
                    qkv,
                    rotary_table: &self.table(),
                    rotary_dim: self.rotary_dim,
                    interleaved: self.interleaved,
                    qk_norm: self.qk_norm.then_some((&q_norm, &k_norm)),
                    eps: 1e-6,
                    attention,
                    positions,
                    slot_mapping,
                    keys: &mut keys,
                    values: &mut values,
                },
            );
            (keys, values)
        }

        /// One head as it should be, by complex multiplication.
        fn oracle(&self, head: &[f32], norm: &[f32], position: u32) -> Vec<f64> {
            let mut x: Vec<f64> = head.iter().map(|x| f64::from(*x)).collect();
            if self.qk_norm {
                let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
                for (x, weight) in x.iter_mut().zip(norm) {
                    *x *= f64::from(*weight) / (mean + 1e-6).sqrt();
                }
            }
            let half = self.rotary_dim / 2;
            for i in 0..half {
                let angle = f64::from(position) * 10_000_f64.powf(-(i as f64) / half as f64);
                let (a, b) = if self.interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
                let (re, im) = (x[a], x[b]);
                x[a] = re * angle.cos() - im * angle.sin();
                x[b] = re * angle.sin() + im * angle.cos();
            }
            x
        }
    }

    /// Checks queries and what is found at every token's slot of the cache.
    fn check<K: KvElement>(case: Case, zero: K, kv_tolerance: f64) {
        let attention = case.attention;
        let (positions, slots) = ([0, 1, 99, 17, 3], [9, 30, 2, 3, 0]);
        let qkv = normal(11, positions.len() * attention.qkv_len());
        let (q_norm, k_norm) = case.norm_weights();
        at_every_level(|cores| {
            let mut out = qkv.clone();
            let (keys, values) = case.run(cores, &mut out, &positions, &slots, zero);
            for (t, (position, slot)) in positions.into_iter().zip(slots).enumerate() {
                let head = |x: &[f32], i: usize| {
                    let start = t * attention.qkv_len() + i * attention.head_dim;
                    x[start..start + attention.head_dim].to_vec()
                };
                for i in 0..attention.num_heads {
                    let expected = case.oracle(&head(&qkv, i), &q_norm, position);
                    assert_close(&head(&out, i), &expected, 3e-6);
                }
                for i in 0..attention.num_kv_heads {
                    let (key, value) = (attention.num_heads + i, attention.num_heads + i);
                    let value = value + attention.num_kv_heads;
                    let (block, offset) = (slot as usize / 4, slot as usize % 4);
                    let row = (block * attention.num_kv_heads + i) * 4 + offset;
                    let row = row * attention.head_dim..(row + 1) * attention.head_dim;
                    let stored = |cache: &[K]| -> Vec<f32> {
                        cache[row.clone()].iter().map(|x| x.widen()).collect()
                    };
                    let expected = case.oracle(&head(&qkv, key), &k_norm, position);
                    assert_close(&stored(&keys), &expected, kv_tolerance);
                    let expected: Vec<f64> = head(&qkv, value).into_iter().map(f64::from).collect();
                    assert_close(&stored(&values), &expected, kv_tolerance);
                }
            }
            let written = positions.len() * attention.num_kv_heads * attention.head_dim;
            let used = |cache: &[K]| cache.iter().filter(|x| x.widen() != 0.0).count();
            assert_eq!((used(&keys), used(&values)), (written, written));
        });
    }

    #[test]
    fn heads_are_rotated_and_cached() {
        for head_dim in [8, 64, 80, 128] {
            for interleaved in [false, true] {
                for qk_norm in [false, true] {
                    let case = Case { interleaved, qk_norm, ..Case::new(6, 2, head_dim) };
                    check(case, 0.0_f32, 3e-6);
                    check(Case { rotary_dim: head_dim / 2, ..case }, 0.0_f32, 3e-6);
                }
            }
        }
    }

    #[test]
    fn the_cache_rounds_to_its_type() {
        check(Case::new(3, 3, 64), f16::ZERO, 1.0 / 2048.0 + 1e-5);
        check(Case::new(4, 1, 64), bf16::ZERO, 1.0 / 256.0 + 1e-5);
    }

    /// Rotation only depends on distance: `<R(m) q, R(n) k>` is a function of `m - n`.
    #[test]
    fn scores_depend_on_distance_alone() {
        let case = Case { interleaved: true, ..Case::new(1, 1, 32) };
        let one = normal(5, case.attention.qkv_len());
        let qkv: Vec<f32> = one.iter().chain(&one).copied().collect();
        at_every_level(|cores| {
            let score = |m: u32, n: u32| {
                let mut out = qkv.clone();
                let (keys, _) = case.run(cores, &mut out, &[m, n], &[0, 1], 0.0_f32);
                let (q, k) = (&out[..32], &keys[32..64]);
                q.iter().zip(k).map(|(q, k)| q * k).sum::<f32>()
            };
            assert!((score(7, 3) - score(54, 50)).abs() < 1e-4);
            assert!((score(7, 3) - score(7, 4)).abs() > 1e-3);
        });
    }

    #[test]
    fn a_token_does_not_depend_on_its_neighbours() {
        let case = Case { qk_norm: true, ..Case::new(9, 3, 64) };
        let len = case.attention.qkv_len();
        let qkv = normal(6, 30 * len);
        let positions: Vec<u32> = (0..30).map(|i| i * 3).collect();
        let slots: Vec<u32> = (0..30).rev().collect();
        at_every_level(|cores| {
            let mut all = qkv.clone();
            case.run(cores, &mut all, &positions, &slots, 0.0_f32);
            let mut alone = qkv[8 * len..9 * len].to_vec();
            case.run(cores, &mut alone, &positions[8..9], &slots[8..9], 0.0_f32);
            assert_eq!(bits(&alone), bits(&all[8 * len..9 * len]));
        });
    }
}
