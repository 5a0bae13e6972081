//! Blocks of the cache that are copied: `move_blocks.cu`, and `turn_blocks.cu`, which turns keys.

use inflight_kernels::{
    Arch, DevicePtr, KvNumbers, KvShape,
    ops::{
        move_blocks::{MoveBlocks, MoveBlocksParams},
        turn_blocks::{TurnBlocks, TurnBlocksParams},
    },
};

use crate::{
    attention::NULL,
    emulator::{Emulated, ORDERS, Order},
    kv::{Cache, Place},
    memory::{Dice, Memory},
    rope::half_step,
};

const NUM_BLOCKS: usize = 26;
const NUM_PARTS: usize = 3;

/// Which way blocks go.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Within,
    ToHost,
    FromHost,
}

/// Copies the first half of all blocks to the second, which is in another order.
fn check_moved(kernel: &Emulated<MoveBlocks>, part_bytes: usize, way: Way, order: Order) {
    let mut dice = Dice::new(part_bytes as u64);
    let mut bytes = |len: usize| -> Vec<u8> { (0..len).map(|_| dice.next() as u8).collect() };
    // Between the parts that are moved and the next block lies what is another's.
    let stride = NUM_PARTS * part_bytes + 32;
    let device: Vec<Vec<u8>> = (0..NUM_PARTS).map(|_| bytes(NUM_BLOCKS * part_bytes)).collect();
    let host = bytes(NUM_BLOCKS * stride);
    let half = NUM_BLOCKS / 2;
    let pairs: Vec<[usize; 2]> = (0..half).map(|i| [i, half + i * 5 % half]).collect();
    let mut parts: Vec<Memory<u8>> = device.iter().map(|part| Memory::new(part)).collect();
    let mut on_host = Memory::new(&host);
    let mut params = MoveBlocksParams {
        parts: [NULL; MoveBlocks::MAX_PARTS],
        host: if way == Way::Within { NULL } else { on_host.address() + 16 },
        host_stride: stride as u64,
        part_bytes: part_bytes as u32,
        num_parts: NUM_PARTS as u32,
        num_pairs: half as u32,
        way: way as u32,
        pairs: [[u32::MAX; 2]; MoveBlocks::MAX_PAIRS],
    };
    for (to, part) in params.parts.iter_mut().zip(&mut parts) {
        *to = part.address();
    }
    for (to, pair) in params.pairs.iter_mut().zip(&pairs) {
        *to = pair.map(|block| block as u32);
    }
    // SAFETY: memory is of the sizes that parameters say.
    unsafe { kernel.launch(&params, order) };

    let (mut device_after, mut host_after) = (device.clone(), host.clone());
    for [from, to] in pairs {
        for part in 0..NUM_PARTS {
            let on_device = |block: usize| block * part_bytes..(block + 1) * part_bytes;
            let on_host = |block: usize| {
                let start = 16 + block * stride + part * part_bytes;
                start..start + part_bytes
            };
            let bytes = match way {
                Way::FromHost => &host[on_host(from)],
                _ => &device[part][on_device(from)],
            };
            match way {
                Way::ToHost => host_after[on_host(to)].copy_from_slice(bytes),
                _ => device_after[part][on_device(to)].copy_from_slice(bytes),
            }
        }
    }
    for (part, expected) in parts.iter().zip(device_after) {
        assert!(part.as_slice() == expected, "{part_bytes} bytes, {way:?}");
    }
    assert!(on_host.as_slice() == host_after, "{part_bytes} bytes, {way:?}");
}

#[test]
fn blocks_are_moved_whole() {
    let Some(kernel) = Emulated::new(MoveBlocks, Arch::SM_80) else { return };
    // Of one vector, and of more than a block of threads has under way.
    for part_bytes in [16, 16 * (2 * 2048 + 300)] {
        for way in [Way::Within, Way::ToHost, Way::FromHost] {
            check_moved(&kernel, part_bytes, way, Order::Shuffled(1));
        }
    }
}

const MAX_POSITIONS: usize = 40;
const NUM_KV_HEADS: u32 = 2;
const NUM_LAYERS: usize = 2;
/// From, to, by how many positions.
const TURNS: [[u32; 3]; 3] = [[4, 0, 39], [1, 3, 0], [5, 2, 7]];

/// The angle of a pair, by how many positions a key is turned.
fn angle(by: usize, pair: usize, rotary_dim: usize) -> f64 {
    by as f64 * 1000_f64.powf(-2.0 * pair as f64 / rotary_dim as f64)
}

/// Cosines, then sines, of every position; times a factor, as some models have.
fn rotary_table(rotary_dim: usize) -> Vec<f32> {
    let half = rotary_dim / 2;
    let row = |position| {
        (0..rotary_dim).map(move |i| {
            let (sin, cos) = angle(position, i % half, rotary_dim).sin_cos();
            (if i < half { cos } else { sin } * 1.25) as f32
        })
    };
    (0..MAX_POSITIONS).flat_map(row).collect()
}

/// A key some positions later.
///
/// # Source
/// Su et al.: "RoFormer", 2021, equation 34.
fn turned(key: &[f64], by: usize, rotary_dim: usize, interleaved: bool) -> Vec<f64> {
    let mut after = key.to_vec();
    let half = rotary_dim / 2;
    for i in 0..half {
        let pair = if interleaved { [2 * i, 2 * i + 1] } else { [i, half + i] };
        let ([a, b], (sin, cos)) = (pair.map(|at| key[at]), angle(by, i, rotary_dim).sin_cos());
        after[pair[0]] = a * cos - b * sin;
        after[pair[1]] = a * sin + b * cos;
    }
    after
}

/// Keys and values of a layer, of blocks that all hold something.
fn layer(shape: KvShape, dice: &mut Dice) -> [Cache; 2] {
    let mut caches = [(); 2].map(|()| Cache::new(shape, NUM_KV_HEADS, 6));
    for cache in &mut caches {
        for place in all_places(shape, 0..6) {
            cache.write_any(place, dice);
        }
    }
    caches
}

fn all_places(
    shape: KvShape,
    blocks: impl IntoIterator<Item = u32>,
) -> impl Iterator<Item = Place> {
    let heads = |block| (0..NUM_KV_HEADS).map(move |kv_head| (block, kv_head));
    let tokens = move |(block, kv_head)| {
        (0..shape.block_size).map(move |offset| Place { block, kv_head, offset })
    };
    blocks.into_iter().flat_map(heads).flat_map(tokens)
}

fn check_turned(shape: KvShape, rotary_dim: usize, interleaved: bool, order: Order) -> Option<()> {
    let kernel = Emulated::new(TurnBlocks { cache: shape, interleaved }, Arch::SM_80)?;
    let mut dice = Dice::new(71);
    let mut layers: Vec<[Cache; 2]> = (0..NUM_LAYERS).map(|_| layer(shape, &mut dice)).collect();
    let before = layers.clone();
    let mut table = Memory::new(&rotary_table(rotary_dim));
    let mut parts = [[NULL; 2]; TurnBlocks::MAX_LAYERS];
    for (parts, layer) in parts.iter_mut().zip(&mut layers) {
        *parts = layer.each_mut().map(|cache| -> DevicePtr { cache.bytes.address() });
    }
    let mut turns = [[u32::MAX; 4]; TurnBlocks::MAX_TURNS];
    for (to, [a, b, by]) in turns.iter_mut().zip(TURNS) {
        *to = [a, b, by, 0];
    }
    let params = TurnBlocksParams {
        parts,
        rotary_table: table.address(),
        rotary_dim: rotary_dim as u32,
        num_layers: NUM_LAYERS as u32,
        num_turns: TURNS.len() as u32,
        num_kv_heads: NUM_KV_HEADS,
        turns,
    };
    // SAFETY: memory is of the sizes that parameters say.
    unsafe { kernel.launch(&params, order) };
    for (before, after) in before.iter().zip(&layers) {
        for [from, to, by] in TURNS {
            let places = all_places(shape, [from]).zip(all_places(shape, [to]));
            for (from, to) in places {
                let expected = turned(&before[0].read(from), by as usize, rotary_dim, interleaved);
                let found = after[0].read(to);
                for i in 0..expected.len() {
                    let allowed = 1.02 * half_step(shape.numbers, &expected, i) + 1e-5;
                    let off = (found[i] - expected[i]).abs();
                    assert!(off <= allowed, "{to:?}, {i}: {}, not {}", found[i], expected[i]);
                }
                assert_eq!(after[1].codes(to), before[1].codes(from), "values stay");
                assert_eq!(after[1].read(to), before[1].read(from), "values stay");
            }
            for place in all_places(shape, [from]) {
                assert_eq!(after[0].codes(place), before[0].codes(place), "{place:?} is read");
            }
        }
    }
    Some(())
}

#[test]
fn keys_are_turned_and_values_stay() {
    let shape = |numbers, head_dim| KvShape { numbers, head_dim, block_size: 16 };
    for order in [ORDERS[1], ORDERS[2]] {
        let found = check_turned(shape(KvNumbers::Bf16, 80), 80, true, order);
        let Some(()) = found else { return };
        check_turned(shape(KvNumbers::Int4, 96), 64, false, order);
        check_turned(shape(KvNumbers::Fp8, 128), 128, false, order);
    }
}
