//! Kernels without special instructions: the fallback, and the ones that show what the others do.

use half::{bf16, f16};

use super::{
    format::{
        Format, GroupLayout, Min, PANEL_ROWS, Q4K, Q4One, Q4Zero, Q5K, Q5One, Q5Zero, Q6K, Q8Zero,
        VECTOR_BYTES, number_panel_bytes,
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
        Dtype::F8E4M3 => unreachable!("packed as bf16"),
    }
}

const fn groups<F: Format>() -> [TileKernel; 4] {
    [group_tile::<F, 1>, group_tile::<F, 2>, group_tile::<F, 3>, group_tile::<F, 4>]
}

/// Sums of more than two rows would not stay in the registers of most processors.
const fn numbers<N: Number>() -> [TileKernel; 2] {
    [number_tile::<N, 1>, number_tile::<N, 2>]
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
            let dots = group_dots::<F, ROWS>(vectors, words);
            for (row, (sums, dots)) in sums.iter_mut().zip(dots).enumerate() {
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

/// Dot products of 16 rows of codes with those of every row of activations.
#[inline(always)]
fn group_dots<F: Format, const ROWS: usize>(
    vectors: &[u8],
    words: &[u32],
) -> [[i32; PANEL_ROWS]; ROWS] {
    let mut dots = [[0; PANEL_ROWS]; ROWS];
    for (i, words) in words.chunks_exact(ROWS).enumerate() {
        let codes = quad(F::LAYOUT, vectors, i);
        for (dots, word) in dots.iter_mut().zip(words) {
            let x = word.to_ne_bytes().map(|code| i32::from(code.cast_signed()));
            for lane in 0..PANEL_ROWS {
                let product = |j: usize| (codes[lane] >> (8 * j) & 255) as i32 * x[j];
                dots[lane] += product(0) + product(1) + product(2) + product(3);
            }
        }
    }
    dots
}

/// Codes of quad `i`: a word a row, the first column in its low byte.
#[inline(always)]
fn quad(layout: GroupLayout, vectors: &[u8], i: usize) -> [u32; PANEL_ROWS] {
    let vectors = vectors.as_chunks::<VECTOR_BYTES>().0;
    let vector = |i: usize| -> [u32; PANEL_ROWS] {
        let words = vectors[i].as_chunks::<4>().0;
        std::array::from_fn(|lane| u32::from_le_bytes(words[lane]))
    };
    if layout.code_bits == 8 {
        return vector(i);
    }
    let half = layout.num_quads() / 2;
    let nibbles = vector(i % half).map(|word| word >> (4 * (i / half)) & 0x0f0f_0f0f);
    if layout.high_bits() == 0 {
        return nibbles;
    }
    // Brings the quad's bits to bit 4; what comes over from a neighbouring byte is masked off.
    let high = vector(half);
    let (start, mask) = (layout.high_bits() * i, ((1 << layout.high_bits()) - 1) * 0x1010_1010);
    std::array::from_fn(|lane| {
        let shifted = if start < 4 { high[lane] << (4 - start) } else { high[lane] >> (start - 4) };
        nibbles[lane] | shifted & mask
    })
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
    let pairs = tile.weights.chunks(2 * PANEL_ROWS * N::DTYPE.block_bytes());
    let x = &tile.x.as_chunks::<ROWS>().0[..tile.num_steps];
    assert!(tile.weights.len() >= number_panel_bytes(N::DTYPE, tile.num_steps, PANEL_ROWS));
    for (pair, x) in pairs.zip(x.chunks(2)) {
        for (i, x) in x.iter().enumerate() {
            let weights: Lanes = std::array::from_fn(|lane| N::number(pair, i, lane));
            for row in 0..ROWS {
                let x = f32::from_bits(x[row]);
                for lane in 0..PANEL_ROWS {
                    sums[row][lane] += weights[lane] * x;
                }
            }
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
    const DTYPE: Dtype;

    /// The number of lane `lane` in column `i`, 0 or 1, of a pair.
    fn number(pair: &[u8], i: usize, lane: usize) -> f32;
}

struct F32;
struct F16;
struct Bf16;

impl Number for F32 {
    const DTYPE: Dtype = Dtype::F32;

    #[inline(always)]
    fn number(pair: &[u8], i: usize, lane: usize) -> f32 {
        f32::from_ne_bytes(pair.as_chunks().0[i * PANEL_ROWS + lane])
    }
}

impl Number for F16 {
    const DTYPE: Dtype = Dtype::F16;

    #[inline(always)]
    fn number(pair: &[u8], i: usize, lane: usize) -> f32 {
        f16_at(pair, i * PANEL_ROWS + lane)
    }
}

impl Number for Bf16 {
    const DTYPE: Dtype = Dtype::BF16;

    #[inline(always)]
    fn number(pair: &[u8], i: usize, lane: usize) -> f32 {
        bf16::from_ne_bytes(pair.as_chunks().0[2 * lane + i]).to_f32()
    }
}

fn f16_at(bytes: &[u8], i: usize) -> f32 {
    f16::from_ne_bytes(bytes.as_chunks().0[i]).to_f32()
}
