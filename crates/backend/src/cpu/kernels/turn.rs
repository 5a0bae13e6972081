//! Turning keys that are in the KV cache to other positions.
//!
//! A rotation by one position and then by another is the rotation by their sum, so keys need not be
//! computed again.
//!
//! # Source
//! Su et al.: "RoFormer: enhanced transformer with rotary position embedding", 2021, section 3.2.2.

use super::kv::{KvElement, read_head, write_head};
use crate::{AttentionShape, BlockTurn, KvLayout};

/// Arguments of [`turn_blocks`]: one layer.
#[allow(missing_docs)]
pub(crate) struct TurnBlocks<'a, K> {
    /// See [`KvLayout`].
    pub(crate) keys: &'a mut [K],
    /// See [`KvLayout`].
    pub(crate) values: &'a mut [K],
    pub(crate) attention: AttentionShape,
    /// `[max_positions, rotary_dim]`: `rotary_dim / 2` cosines, then as many sines.
    pub(crate) rotary_table: &'a [f32],
    pub(crate) rotary_dim: usize,
    pub(crate) interleaved: bool,
    pub(crate) turns: &'a [BlockTurn],
}

/// Copies blocks of values, and of keys turned by some positions.
///
/// # Panics
/// If a turn lies outside the rotary table or a block outside the cache.
pub(crate) fn turn_blocks<K: KvElement>(args: TurnBlocks<'_, K>) {
    let TurnBlocks { keys, values, attention, rotary_table, rotary_dim, interleaved, turns } = args;
    let layout = KvLayout::new(K::DTYPE, attention);
    let strip_len = layout.strip_bytes() / size_of::<K>();
    let block_len = strip_len * layout.num_kv_heads;
    let mut head = vec![0.0; layout.head_dim];
    for &BlockTurn { from, to, by } in turns {
        let (from, to) = (from as usize * block_len, to as usize * block_len);
        values.copy_within(from..from + block_len, to);
        let turn = unit_turn(&rotary_table[by as usize * rotary_dim..][..rotary_dim]);
        for strip in (0..layout.num_kv_heads).map(|i| i * strip_len) {
            for token in 0..layout.block_size {
                read_head(&layout, token, &keys[from + strip..][..strip_len], &mut head);
                rotate(&mut head[..rotary_dim], &turn, interleaved);
                write_head(&layout, token, &head, &mut keys[to + strip..][..strip_len]);
            }
        }
    }
}

/// Cosines and sines as pairs, without a common factor.
fn unit_turn(row: &[f32]) -> Vec<(f32, f32)> {
    let (cos, sin) = row.split_at(row.len() / 2);
    let unit = |(cos, sin): (&f32, &f32)| {
        let scale = 1.0 / cos.hypot(*sin);
        (cos * scale, sin * scale)
    };
    cos.iter().zip(sin).map(unit).collect()
}

fn rotate(head: &mut [f32], turn: &[(f32, f32)], interleaved: bool) {
    for (i, (cos, sin)) in turn.iter().enumerate() {
        let (a, b) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + turn.len()) };
        (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[b] * cos + head[a] * sin);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use half::f16;

    use super::*;
    use crate::cpu::kernels::{
        Int4, Int8, RopeAndCache, rope_and_cache,
        testing::{assert_close, at_every_level, normal},
    };

    const ATTENTION: AttentionShape =
        AttentionShape { num_heads: 2, num_kv_heads: 2, head_dim: 32, block_size: 4 };
    const ROTARY_DIM: usize = 24;

    /// As YaRN has it: with a factor.
    fn table() -> Vec<f32> {
        let angle = |position: usize, i: usize| position as f64 * 100f64.powf(-(i as f64) / 12.0);
        let row = |position| {
            let cos = (0..12).map(move |i| 1.25 * angle(position, i).cos() as f32);
            cos.chain((0..12).map(move |i| 1.25 * angle(position, i).sin() as f32))
        };
        (0..200).flat_map(row).collect()
    }

    /// Four blocks; tokens at these positions are in the one with this number.
    fn cached<K: KvElement>(interleaved: bool, start: u32, block: u32) -> (Vec<K>, Vec<K>) {
        let layout = KvLayout::new(K::DTYPE, ATTENTION);
        let len = 4 * layout.block_bytes() / size_of::<K>();
        let cache = Mutex::new((vec![K::default(); len], vec![K::default(); len]));
        let positions: Vec<u32> = (start..start + 4).collect();
        let slots: Vec<u32> = (4 * block..4 * block + 4).collect();
        at_every_level(|cores| {
            let (keys, values) = &mut *cache.lock().unwrap();
            let args = RopeAndCache {
                qkv: &mut normal(3, 4 * ATTENTION.qkv_len()),
                rotary_table: &table(),
                rotary_dim: ROTARY_DIM,
                interleaved,
                qk_norm: None,
                eps: 1e-6,
                attention: ATTENTION,
                positions: &positions,
                slot_mapping: &slots,
                keys,
                values,
            };
            rope_and_cache(cores, args);
        });
        cache.into_inner().unwrap()
    }

    fn numbers<K: KvElement>(cache: &[K], block: usize) -> Vec<f32> {
        let layout = KvLayout::new(K::DTYPE, ATTENTION);
        let strip_len = layout.strip_bytes() / size_of::<K>();
        let mut all = Vec::new();
        for strip in cache.chunks_exact(strip_len).skip(2 * block).take(2) {
            for token in 0..4 {
                let mut head = vec![0.0; layout.head_dim];
                read_head(&layout, token, strip, &mut head);
                all.extend(head);
            }
        }
        all
    }

    /// Keys turned by some positions are those that are computed there.
    fn check<K: KvElement>(tolerance: f64) {
        for interleaved in [false, true] {
            let (mut keys, mut values) = cached::<K>(interleaved, 5, 1);
            turn_blocks(TurnBlocks {
                keys: &mut keys,
                values: &mut values,
                attention: ATTENTION,
                rotary_table: &table(),
                rotary_dim: ROTARY_DIM,
                interleaved,
                turns: &[BlockTurn { from: 1, to: 3, by: 150 }],
            });
            let (there, same) = cached::<K>(interleaved, 155, 3);
            let exact = |cache: &[K]| -> Vec<f64> {
                numbers(cache, 3).into_iter().map(f64::from).collect()
            };
            assert_close(&numbers(&keys, 3), &exact(&there), tolerance);
            assert_close(&numbers(&values, 3), &exact(&same), 0.0);
            assert_eq!(numbers(&keys, 1), numbers(&cached::<K>(interleaved, 5, 1).0, 1));
        }
    }

    #[test]
    fn turned_keys_are_those_of_other_positions() {
        check::<f32>(1e-5);
        check::<f16>(2.0 / 2048.0);
        // Two roundings to steps of 3 / 127, one of them turned.
        check::<Int8>(5.0 / 127.0);
        // The same of steps of 5 / 15.
        check::<Int4>(7.0 / 15.0);
    }
}
