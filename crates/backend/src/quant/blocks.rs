//! Blocks of 32 elements under one half-precision scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.
//!
//! ```text
//! Q4_0  d | nibbles[16]                  Q5_0  d | high[4] | nibbles[16]
//! Q4_1  d | m | nibbles[16]              Q5_1  d | m | high[4] | nibbles[16]
//! Q8_0  d | signed bytes[32]
//!
//! nibbles[i] holds element i in its low and element i + 16 in its high half;
//! bit i of the little-endian word `high` is bit 4 of element i.
//! ```

use half::f16;

use super::Group;

type Codes = [u8; 32];

pub(super) fn unpack_q4_0(block: &[u8; 18], codes: &mut Codes) -> [Group; 1] {
    let scale = half_at(block, 0);
    unpack_nibbles(&block[2..], codes);
    [Group { scale, min: -8.0 * scale }]
}

pub(super) fn unpack_q4_1(block: &[u8; 20], codes: &mut Codes) -> [Group; 1] {
    unpack_nibbles(&block[4..], codes);
    [Group { scale: half_at(block, 0), min: half_at(block, 2) }]
}

pub(super) fn unpack_q5_0(block: &[u8; 22], codes: &mut Codes) -> [Group; 1] {
    let scale = half_at(block, 0);
    unpack_nibbles(&block[6..], codes);
    add_high_bits([block[2], block[3], block[4], block[5]], codes);
    [Group { scale, min: -16.0 * scale }]
}

pub(super) fn unpack_q5_1(block: &[u8; 24], codes: &mut Codes) -> [Group; 1] {
    unpack_nibbles(&block[8..], codes);
    add_high_bits([block[4], block[5], block[6], block[7]], codes);
    [Group { scale: half_at(block, 0), min: half_at(block, 2) }]
}

pub(super) fn unpack_q8_0(block: &[u8; 34], codes: &mut Codes) -> [Group; 1] {
    let scale = half_at(block, 0);
    for (code, byte) in codes.iter_mut().zip(&block[2..]) {
        // Adding 128 to a signed byte flips its sign bit.
        *code = byte ^ 0x80;
    }
    [Group { scale, min: -128.0 * scale }]
}

/// The half-precision number at byte `at`.
pub(super) fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn unpack_nibbles(nibbles: &[u8], codes: &mut Codes) {
    let (low, high) = codes.split_at_mut(16);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(nibbles) {
        *low = byte & 15;
        *high = byte >> 4;
    }
}

fn add_high_bits(high: [u8; 4], codes: &mut Codes) {
    let high = u32::from_le_bytes(high);
    for (i, code) in codes.iter_mut().enumerate() {
        *code |= ((high >> i) as u8 & 1) << 4;
    }
}

#[cfg(test)]
mod tests {
    use crate::{Dtype, quant::dequantize_row};

    /// A block of `head` and zeros, with `changes` made to bytes after the head.
    fn block(head: &[u8], len: usize, changes: &[(usize, u8)]) -> Vec<u8> {
        let mut block = head.to_vec();
        block.resize(len, 0);
        for (at, byte) in changes {
            block[*at] = *byte;
        }
        block
    }

    fn check(dtype: Dtype, block: &[u8], expected: &[(usize, f32)]) {
        let mut out = [f32::NAN; 32];
        dequantize_row(dtype, block, &mut out);
        for (at, value) in expected {
            assert_eq!(out[*at], *value, "{dtype}, element {at}");
        }
    }

    // Halves: 0x3c00 = 1, 0x4000 = 2, 0x3800 = 0.5, 0xbe00 = -1.5.

    #[test]
    fn four_bits() {
        let q4_0 = block(&[0x00, 0x38], 18, &[(2, 0xf1), (17, 0x8c)]);
        check(Dtype::Q4_0, &q4_0, &[(0, -3.5), (16, 3.5), (15, 2.0), (31, 0.0), (1, -4.0)]);
        let q4_1 = block(&[0x00, 0x38, 0x00, 0xbe], 20, &[(4, 0xf1), (19, 0x8c)]);
        check(Dtype::Q4_1, &q4_1, &[(0, -1.0), (16, 6.0), (15, 4.5), (31, 2.5), (1, -1.5)]);
    }

    #[test]
    fn five_bits() {
        let q5_0 = block(&[0x00, 0x40], 22, &[(2, 0x01), (5, 0x80), (6, 0xf1), (21, 0x8c)]);
        check(Dtype::Q5_0, &q5_0, &[(0, 2.0), (16, -2.0), (15, -8.0), (31, 16.0), (1, -32.0)]);
        let head = [0x00, 0x3c, 0x00, 0xbe];
        let q5_1 = block(&head, 24, &[(4, 0x01), (7, 0x80), (8, 0xf1), (23, 0x8c)]);
        check(Dtype::Q5_1, &q5_1, &[(0, 15.5), (16, 13.5), (15, 10.5), (31, 22.5), (1, -1.5)]);
    }

    #[test]
    fn eight_bits() {
        let q8_0 = block(&[0x00, 0x38], 34, &[(2, 0x80), (3, 0x7f), (33, 0xff)]);
        check(Dtype::Q8_0, &q8_0, &[(0, -64.0), (1, 63.5), (31, -0.5), (2, 0.0)]);
    }
}
