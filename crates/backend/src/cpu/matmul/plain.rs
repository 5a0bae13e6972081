//! Kernels without special instructions: the fallback, and the ones that show what the others do.

use half::{bf16, f16};

use super::{
    format::{
        Format, GroupLayout, Min, PANEL_ROWS, Q4K, Q4One, Q4Zero, Q5K, Q5One, Q5Zero, Q6K, Q8Zero,
        VECTOR_BYTES,
    },
    tile::{Tile, TileKernel},
};
use crate::Dtype;

type Lanes = [f32; PANEL_ROWS];

/// See [`super::kernels::kernels`].
pub(super) fn kernels(dtype: Dtype) -> &'static [TileKernel] {
    match dtype {
        Dtype::F32 => &const { numbers::<F32>() },
        Dtype::F16 => &const { numbers::<F16>() },
        Dtype::BF16 => &const { numbers::<Bf16>() },
        Dtype::Q4_0 => &const { groups::<Q4Zero>() },
        Dtype::Q4_1 => &const { groups::<Q4One>() },
        Dtype::Q5_0 => &const { groups::<Q5Zero>() },
        Dtype::Q5_1 => &const { groups::<Q5One>() },
        Dtype::Q8_0 => &const { groups::<Q8Zero>() },
        Dtype::Q4K => &const { groups::<Q4K>() },
        Dtype::Q5K => &const { groups::<Q5K>() },
        Dtype::Q6K => &const { groups::<Q6K>() },
    }
}

const fn groups<F: Format>() -> [TileKernel; 4] {
    [group_tile::<F, 1>, group_tile::<F, 2>, group_tile::<F, 3>, group_tile::<F, 4>]
}

const fn numbers<N: Number>() -> [TileKernel; 4] {
    [number_tile::<N, 1>, number_tile::<N, 2>, number_tile::<N, 3>, number_tile::<N, 4>]
}

fn group_tile<F: Format, const ROWS: usize>(tile: &Tile<'_>) {
    let layout = F::LAYOUT;
    let num_super_blocks = tile.num_steps / layout.num_groups;
    let mut sums = [[0.0; PANEL_ROWS]; ROWS];
    let super_blocks = tile.weights.chunks_exact(layout.super_block_bytes());
    let mut x = tile.x.chunks_exact((2 + layout.num_quads()) * ROWS);
    assert!(super_blocks.len() >= num_super_blocks && x.len() >= tile.num_steps);
    for super_block in super_blocks.take(num_super_blocks) {
        let (header, groups) = super_block.split_at(layout.header_bytes());
        for (group, x) in groups.chunks_exact(layout.group_bytes()).zip(&mut x) {
            let (factors, vectors) = group.split_at(layout.factors_bytes());
            let (scales, mins) = scales_and_mins(layout, header, factors);
            let (x_scales, words) = x.split_at(2 * ROWS);
            for (row, sums) in sums.iter_mut().enumerate() {
                let dots = group_dots::<F>(vectors, |i| words[i * ROWS + row].to_ne_bytes());
                let x_scale = f32::from_bits(x_scales[row]);
                let x_sum = f32::from_bits(x_scales[ROWS + row]);
                for lane in 0..PANEL_ROWS {
                    sums[lane] += dots[lane] as f32 * x_scale * scales[lane];
                    sums[lane] += mins[lane] * x_sum;
                }
            }
        }
    }
    write(tile, sums);
}

/// Dot products of 16 rows of codes with one row's; `words(i)` are the row's codes of quad `i`.
fn group_dots<F: Format>(vectors: &[u8], words: impl Fn(usize) -> [u8; 4]) -> [i32; PANEL_ROWS] {
    let mut dots = [0; PANEL_ROWS];
    for i in 0..F::LAYOUT.num_quads() {
        let (codes, x) = (quad(F::LAYOUT, vectors, i), words(i).map(u8::cast_signed));
        for (dot, codes) in dots.iter_mut().zip(codes.as_chunks::<4>().0) {
            for (code, x) in codes.iter().zip(x) {
                *dot += i32::from(*code) * i32::from(x);
            }
        }
    }
    dots
}

/// Codes of quad `i`.
fn quad(layout: GroupLayout, vectors: &[u8], i: usize) -> [u8; VECTOR_BYTES] {
    let vectors = vectors.as_chunks::<VECTOR_BYTES>().0;
    if layout.code_bits == 8 {
        return vectors[i];
    }
    let half = layout.num_quads() / 2;
    let nibbles = vectors[i % half].map(|byte| byte >> (4 * (i / half)) & 15);
    if layout.high_bits() == 0 {
        return nibbles;
    }
    let (bits, mask) = (layout.high_bits(), (1 << layout.high_bits()) - 1);
    std::array::from_fn(|j| nibbles[j] | (vectors[half][j] >> (bits * i) & mask) << 4)
}

fn scales_and_mins(layout: GroupLayout, header: &[u8], factors: &[u8]) -> (Lanes, Lanes) {
    let lanes = |i: usize| -> Lanes {
        std::array::from_fn(|lane| {
            let shared = f16_at(header, i * PANEL_ROWS + lane);
            match factors.get(i * PANEL_ROWS + lane) {
                Some(factor) => shared * f32::from(factor.cast_signed()),
                None => shared,
            }
        })
    };
    let scales = lanes(0);
    let mins = match layout.min {
        Min::Stored => lanes(1),
        Min::ZeroPoint(code) => scales.map(|scale| -f32::from(code) * scale),
    };
    (scales, mins)
}

fn number_tile<N: Number, const ROWS: usize>(tile: &Tile<'_>) {
    let mut sums = [[0.0; PANEL_ROWS]; ROWS];
    let weights = tile.weights.chunks_exact(PANEL_ROWS * N::BYTES);
    let x = tile.x.chunks_exact(ROWS);
    assert!(weights.len() >= tile.num_steps && x.len() >= tile.num_steps);
    for (weights, x) in weights.zip(x).take(tile.num_steps) {
        let weights: Lanes = std::array::from_fn(|lane| N::at(weights, lane));
        for (row, sums) in sums.iter_mut().enumerate() {
            let x = f32::from_bits(x[row]);
            sums.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += weight * x);
        }
    }
    write(tile, sums);
}

fn write<const ROWS: usize>(tile: &Tile<'_>, sums: [Lanes; ROWS]) {
    for (row, sums) in sums.into_iter().enumerate() {
        // SAFETY: the kernel's caller keeps everybody else off the tile.
        unsafe { tile.out.write(row, sums) };
    }
}

/// A plain type of weight.
trait Number {
    const BYTES: usize;

    /// Number `i` of `bytes`.
    fn at(bytes: &[u8], i: usize) -> f32;
}

struct F32;
struct F16;
struct Bf16;

impl Number for F32 {
    const BYTES: usize = 4;

    fn at(bytes: &[u8], i: usize) -> f32 {
        f32_at(bytes, i)
    }
}

impl Number for F16 {
    const BYTES: usize = 2;

    fn at(bytes: &[u8], i: usize) -> f32 {
        f16_at(bytes, i)
    }
}

impl Number for Bf16 {
    const BYTES: usize = 2;

    fn at(bytes: &[u8], i: usize) -> f32 {
        bf16::from_ne_bytes(bytes.as_chunks().0[i]).to_f32()
    }
}

fn f32_at(bytes: &[u8], i: usize) -> f32 {
    f32::from_ne_bytes(bytes.as_chunks().0[i])
}

fn f16_at(bytes: &[u8], i: usize) -> f32 {
    f16::from_ne_bytes(bytes.as_chunks().0[i]).to_f32()
}
