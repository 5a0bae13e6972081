//! A KV cache on the host, read as the head of `csrc/kv_cache.cuh` describes it.

use half::{bf16, f16};
use inflight_kernels::{KvNumbers, KvShape};

use crate::memory::{Dice, Memory};

/// Keys or values of some blocks. What nobody wrote is no number.
#[derive(Clone)]
pub(crate) struct Cache {
    pub(crate) shape: KvShape,
    num_kv_heads: u32,
    pub(crate) bytes: Memory<u8>,
}

/// Where a token's head is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) block: u32,
    pub(crate) kv_head: u32,
    /// Of the token in its block.
    pub(crate) offset: u32,
}

impl Cache {
    pub(crate) fn new(shape: KvShape, num_kv_heads: u32, num_blocks: u32) -> Self {
        let bytes = Memory::unwritten((num_blocks * num_kv_heads) as usize * strip_bytes(shape));
        Self { shape, num_kv_heads, bytes }
    }

    fn strip(&self, place: Place) -> usize {
        (place.block * self.num_kv_heads + place.kv_head) as usize * strip_bytes(self.shape)
    }

    fn codes_at(&self, place: Place) -> usize {
        self.strip(place) + (place.offset * self.shape.head_bytes()) as usize
    }

    fn scales_at(&self, place: Place) -> usize {
        let numbers = self.shape.block_size * self.shape.head_bytes();
        self.strip(place) + (numbers + place.offset * self.shape.scale_bytes()) as usize
    }

    /// Writes a head: any codes, with scales that leave numbers from -1 to 1.
    pub(crate) fn write_any(&mut self, place: Place, dice: &mut Dice) {
        let (codes, scales) = (self.codes_at(place), self.scales_at(place));
        let KvShape { numbers, head_dim, .. } = self.shape;
        let bytes = self.bytes.as_mut_slice();
        match numbers {
            KvNumbers::Bf16 => {
                for (i, x) in dice.bf16s(head_dim as usize, 1.0).iter().enumerate() {
                    bytes[codes + 2 * i..][..2].copy_from_slice(&x.to_le_bytes());
                }
                return;
            }
            KvNumbers::Fp8 => fill(bytes, codes, head_dim, || match dice.next() as u8 {
                0x7f | 0xff => 0, // No numbers.
                code => code,
            }),
            KvNumbers::Int8 => {
                fill(bytes, codes, head_dim, || (dice.below(255) as i32 - 127) as u8);
            }
            KvNumbers::Int4 => fill(bytes, codes, head_dim / 2, || dice.next() as u8),
        }
        for word in bytes[scales..][..self.shape.scale_bytes() as usize].chunks_mut(4) {
            let size = 1.0 + dice.number() * 0.5;
            match numbers {
                KvNumbers::Int4 => {
                    word[..2].copy_from_slice(&f16::from_f32(size / 15.0).to_le_bytes());
                    word[2..].copy_from_slice(&f16::from_f32(dice.number() - size).to_le_bytes());
                }
                KvNumbers::Fp8 => word.copy_from_slice(&(size / 448.0).to_le_bytes()),
                _ => word.copy_from_slice(&(size / 127.0).to_le_bytes()),
            }
        }
    }

    /// A token's head as it is stored, but for its scales.
    pub(crate) fn codes(&self, place: Place) -> &[u8] {
        &self.bytes.as_slice()[self.codes_at(place)..][..self.shape.head_bytes() as usize]
    }

    /// A token's head.
    pub(crate) fn read(&self, place: Place) -> Vec<f64> {
        let bytes = self.bytes.as_slice();
        let codes = self.codes(place);
        let scales = || {
            let words =
                bytes[self.scales_at(place)..][..self.shape.scale_bytes() as usize].chunks(4);
            words.map(|word| word.try_into().expect("four bytes"))
        };
        let scale = || f64::from(f32::from_le_bytes(scales().next().expect("a scale")));
        match self.shape.numbers {
            KvNumbers::Bf16 => {
                codes.chunks(2).map(|x| f64::from(bf16::from_le_bytes([x[0], x[1]]))).collect()
            }
            KvNumbers::Fp8 => codes.iter().map(|code| e4m3(*code) * scale()).collect(),
            KvNumbers::Int8 => codes.iter().map(|code| f64::from(*code as i8) * scale()).collect(),
            KvNumbers::Int4 => {
                let groups = codes.chunks(KvNumbers::GROUP as usize / 2).zip(scales());
                let numbers = groups.flat_map(|(bytes, [a, b, c, d]): (_, [u8; 4])| {
                    let [factor, least] =
                        [[a, b], [c, d]].map(|x| f64::from(f16::from_le_bytes(x)));
                    let codes = bytes.iter().map(|x| x & 15).chain(bytes.iter().map(|x| x >> 4));
                    codes.map(move |code| f64::from(code) * factor + least)
                });
                numbers.collect()
            }
        }
    }
}

fn strip_bytes(shape: KvShape) -> usize {
    let scales = (shape.block_size * shape.scale_bytes()).next_multiple_of(16);
    (shape.block_size * shape.head_bytes() + scales) as usize
}

fn fill(bytes: &mut [u8], at: usize, len: u32, mut code: impl FnMut() -> u8) {
    bytes[at..][..len as usize].iter_mut().for_each(|byte| *byte = code());
}

/// A number of a sign, four bits of exponent with a bias of 7, and three of mantissa.
///
/// # Source
/// Micikevicius et al.: "FP8 formats for deep learning", 2022, table 1.
pub(crate) fn e4m3(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa / 8.0 * 2_f64.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2_f64.powi(exponent - 7),
    };
    if code >> 7 == 0 { magnitude } else { -magnitude }
}
