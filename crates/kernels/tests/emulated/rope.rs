//! `rope_and_cache.cu`: heads rotated, and written as the cache keeps them.

use half::bf16;
use inflight_kernels::{
    Arch, KvNumbers, KvShape,
    ops::rope_and_cache::{RopeAndCache, RopeAndCacheParams, Rotation},
};

use crate::{
    attention::NULL,
    emulator::{Emulated, Order},
    kv::{Cache, Place},
    memory::{Dice, Memory},
};

const NUM_HEADS: usize = 3;
const NUM_KV_HEADS: usize = 2;
const ALL_HEADS: usize = NUM_HEADS + 2 * NUM_KV_HEADS;
/// Of tokens; the last is padding.
const SLOTS: [u32; 4] = [37, 5, 16, u32::MAX];
const POSITIONS: [u32; 4] = [6, 0, 3, 0];
const MAX_POSITIONS: usize = 7;
const EPS: f32 = 1e-6;

/// All inputs of a launch; what `qkv` was comes from parts, or is there.
struct Inputs {
    cache: KvShape,
    rotation: Rotation,
    qkv: Vec<bf16>,
    /// `[2, num_tokens, ...]`; empty: it is in `qkv`.
    parts: Vec<f32>,
    bias: Vec<f32>,
    table: Vec<f32>,
    /// Of queries, then of keys.
    norms: [Vec<f32>; 2],
}

impl Inputs {
    fn new(cache: KvShape, rotation: Rotation, has_parts: bool) -> Self {
        let mut dice = Dice::new(5);
        let len = ALL_HEADS * cache.head_dim as usize;
        let half = rotation.dim as usize / 2;
        let angle = |i: usize| (i / half) as f64 * 10_f64.powf(-((i % half) as f64) / 8.0);
        let row = |position: usize| {
            let angles = move |i| angle(position * half + i);
            let cosines = (0..half).map(move |i| angles(i).cos() as f32);
            cosines.chain((0..half).map(move |i| angles(i).sin() as f32))
        };
        Self {
            cache,
            rotation,
            qkv: dice.bf16s(SLOTS.len() * len, 2.0),
            parts: dice.f32s(if has_parts { 2 * SLOTS.len() * len } else { 0 }, 2.0),
            bias: dice.f32s(len, 1.0),
            table: (0..MAX_POSITIONS).flat_map(row).collect(),
            norms: [(); 2].map(|()| dice.f32s(cache.head_dim as usize, 2.0)),
        }
    }

    /// A head as it is, by the definition.
    ///
    /// # Source
    /// Su et al.: "RoFormer", 2021, equation 34.
    fn expected(&self, token: usize, head: usize) -> Vec<f64> {
        let dim = self.cache.head_dim as usize;
        let len = ALL_HEADS * dim;
        let element = |i: usize| {
            let at = head * dim + i;
            let parts = self.parts.chunks(SLOTS.len() * len).map(|part| part[token * len + at]);
            match self.parts.is_empty() {
                true => f64::from(self.qkv[token * len + at]),
                false => parts.chain([self.bias[at]]).map(f64::from).sum(),
            }
        };
        let mut x: Vec<f64> = (0..dim).map(element).collect();
        if head >= NUM_HEADS + NUM_KV_HEADS {
            return x;
        }
        if self.rotation.qk_norm {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / dim as f64;
            let norm = &self.norms[usize::from(head >= NUM_HEADS)];
            for (x, weight) in x.iter_mut().zip(norm) {
                *x *= f64::from(*weight) / (mean + f64::from(EPS)).sqrt();
            }
        }
        let rotated = self.rotation.dim as usize;
        let half = rotated / 2;
        let turn = &self.table[POSITIONS[token] as usize * rotated..];
        let before = x.clone();
        for i in 0..half {
            let (cos, sin) = (f64::from(turn[i]), f64::from(turn[half + i]));
            let pair = if self.rotation.interleaved { [2 * i, 2 * i + 1] } else { [i, half + i] };
            let [a, b] = pair.map(|at| before[at]);
            x[pair[0]] = a * cos - b * sin;
            x[pair[1]] = a * sin + b * cos;
        }
        x
    }
}

/// How far the cache's numbers may be off: half a step of what their scales allow.
pub(crate) fn half_step(numbers: KvNumbers, head: &[f64], i: usize) -> f64 {
    let greatest = |numbers: &[f64]| numbers.iter().fold(0.0_f64, |a, x| a.max(x.abs()));
    match numbers {
        KvNumbers::Bf16 => head[i].abs() / 256.0,
        // Four bits of a number, but for those so small that steps no longer shrink.
        KvNumbers::Fp8 => (head[i].abs() / 16.0).max(greatest(head) / 448.0 / 1024.0),
        KvNumbers::Int8 => greatest(head) / 127.0 / 2.0,
        KvNumbers::Int4 => {
            let group = &head[i / 32 * 32..][..32];
            let (least, most) = group
                .iter()
                .fold((f64::MAX, f64::MIN), |(least, most), x| (least.min(*x), most.max(*x)));
            // The factor and the least number are f16, so the greatest may be past the last code.
            (most - least) / 15.0 / 2.0 + (most - least + least.abs()) / 1024.0
        }
    }
}

fn check(inputs: &Inputs) {
    let kernel = RopeAndCache::new(inputs.cache, inputs.rotation).unwrap();
    let Some(kernel) = Emulated::new(kernel, Arch::SM_90A) else { return };
    let mut qkv = Memory::new(&inputs.qkv);
    let mut parts = Memory::new(&inputs.parts);
    let mut bias = Memory::new(&inputs.bias);
    let mut table = Memory::new(&inputs.table);
    let [mut q_norm, mut k_norm] = inputs.norms.each_ref().map(|norm| Memory::new(norm));
    let [mut keys, mut values] =
        [(); 2].map(|()| Cache::new(inputs.cache, NUM_KV_HEADS as u32, 64 / 16));
    let (mut positions, mut slots) = (Memory::new(&POSITIONS), Memory::new(&SLOTS));
    let has_parts = !inputs.parts.is_empty();
    let params = RopeAndCacheParams {
        qkv: qkv.address(),
        parts: if has_parts { parts.address() } else { NULL },
        bias: if has_parts { bias.address() } else { NULL },
        rotary_table: table.address(),
        q_norm: q_norm.address(),
        k_norm: k_norm.address(),
        keys: keys.bytes.address(),
        values: values.bytes.address(),
        positions: positions.address(),
        slot_mapping: slots.address(),
        num_tokens: SLOTS.len() as u32,
        num_heads: NUM_HEADS as u32,
        num_kv_heads: NUM_KV_HEADS as u32,
        rotary_dim: inputs.rotation.dim,
        eps: EPS,
        num_parts: if has_parts { 2 } else { 0 },
        is_settled: u32::from(has_parts),
        reserved: 0,
    };
    // SAFETY: memory is of the sizes that parameters say.
    unsafe { kernel.launch(&params, Order::Shuffled(3)) };
    let dim = inputs.cache.head_dim as usize;
    for (token, slot) in SLOTS.iter().enumerate() {
        for head in 0..ALL_HEADS {
            let expected = inputs.expected(token, head);
            let found: Vec<f64> = if head < NUM_HEADS {
                let at = (token * ALL_HEADS + head) * dim;
                qkv.as_slice()[at..][..dim].iter().map(|x| f64::from(*x)).collect()
            } else if *slot == u32::MAX {
                continue;
            } else {
                let of_keys = head - NUM_HEADS;
                let place = Place {
                    block: slot / inputs.cache.block_size,
                    kv_head: (of_keys % NUM_KV_HEADS) as u32,
                    offset: slot % inputs.cache.block_size,
                };
                if of_keys < NUM_KV_HEADS { keys.read(place) } else { values.read(place) }
            };
            let numbers = if head < NUM_HEADS { KvNumbers::Bf16 } else { inputs.cache.numbers };
            for i in 0..dim {
                let allowed = 1.02 * half_step(numbers, &expected, i) + 1e-5;
                assert!(
                    (found[i] - expected[i]).abs() <= allowed,
                    "token {token}, head {head}, {i}: {}, not {} within {allowed}",
                    found[i],
                    expected[i]
                );
            }
        }
    }
    check_others(&keys, &inputs.cache);
}

/// Slots that no token has are left alone.
fn check_others(cache: &Cache, shape: &KvShape) {
    let untouched = (0..64).filter(|slot| !SLOTS.contains(slot));
    for slot in untouched {
        let (block, offset) = (slot / shape.block_size, slot % shape.block_size);
        let codes = cache.codes(Place { block, kv_head: 0, offset });
        assert!(codes.iter().all(|byte| *byte == u8::MAX), "slot {slot}");
    }
}

#[test]
fn halves_and_neighbours_turn() {
    let cache = KvShape { numbers: KvNumbers::Bf16, head_dim: 64, block_size: 16 };
    for interleaved in [false, true] {
        let rotation = Rotation { dim: 64, interleaved, qk_norm: false };
        check(&Inputs::new(cache, rotation, false));
    }
    // A part of a head that lanes do not fill, normalised before; parts are added up first.
    let cache = KvShape { head_dim: 96, ..cache };
    let rotation = Rotation { dim: 64, interleaved: false, qk_norm: true };
    check(&Inputs::new(cache, rotation, true));
}

#[test]
fn heads_are_rounded_to_the_nearest_of_smaller_numbers() {
    for numbers in [KvNumbers::Fp8, KvNumbers::Int8, KvNumbers::Int4] {
        let cache = KvShape { numbers, head_dim: 64, block_size: 16 };
        check(&Inputs::new(cache, Rotation { dim: 32, interleaved: false, qk_norm: true }, false));
    }
}
