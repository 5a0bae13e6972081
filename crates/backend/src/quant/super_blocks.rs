//! Super-blocks of 256 elements whose groups have scales of their own: Q4_K, Q5_K, Q6_K.
//!
//! ```text
//! Q4_K  d | dmin | scales[12] | nibbles[128]
//! Q5_K  d | dmin | scales[12] | high[32] | nibbles[128]
//! Q6_K  nibbles[128] | high[64] | signed scales[16] | d
//! ```

use super::{Group, blocks::half_at};

type Codes = [u8; 256];

pub(super) fn unpack_q4_k(block: &[u8; 144], codes: &mut Codes) -> [Group; 8] {
    unpack_nibbles(&block[16..], codes);
    groups_of_32(block)
}

pub(super) fn unpack_q5_k(block: &[u8; 176], codes: &mut Codes) -> [Group; 8] {
    unpack_nibbles(&block[48..], codes);
    // Bit g of high[i] is bit 4 of element i of group g.
    for (g, group) in codes.chunks_exact_mut(32).enumerate() {
        for (code, high) in group.iter_mut().zip(&block[16..48]) {
            *code |= (high >> g & 1) << 4;
        }
    }
    groups_of_32(block)
}

pub(super) fn unpack_q6_k(block: &[u8; 210], codes: &mut Codes) -> [Group; 16] {
    let (nibbles, rest) = block.split_at(128);
    let (high, rest) = rest.split_at(64);
    for (half, codes) in codes.chunks_exact_mut(128).enumerate() {
        for (quarter, codes) in codes.chunks_exact_mut(32).enumerate() {
            // Quarters 0 and 1 are the low nibbles of 64 bytes, quarters 2 and 3 the high ones;
            // bits 2 q and 2 q + 1 of high[i] are bits 4 and 5 of element i of quarter q.
            let nibbles = &nibbles[64 * half + 32 * (quarter % 2)..];
            let pairs = nibbles.iter().zip(&high[32 * half..]);
            for (code, (nibble, high)) in codes.iter_mut().zip(pairs) {
                *code = (nibble >> (4 * (quarter / 2)) & 15) | (high >> (2 * quarter) & 3) << 4;
            }
        }
    }
    let d = half_at(rest, 16);
    std::array::from_fn(|g| {
        let scale = d * f32::from(rest[g].cast_signed());
        Group { scale, min: -32.0 * scale }
    })
}

/// Each 32 bytes hold a group in their low and the next group in their high halves.
fn unpack_nibbles(nibbles: &[u8], codes: &mut Codes) {
    for (codes, nibbles) in codes.chunks_exact_mut(64).zip(nibbles.chunks_exact(32)) {
        let (low, high) = codes.split_at_mut(32);
        for ((low, high), byte) in low.iter_mut().zip(high).zip(nibbles) {
            *low = byte & 15;
            *high = byte >> 4;
        }
    }
}

/// Scales and minimums of Q4_K and Q5_K, six bits each.
///
/// ```text
/// bytes 0..4    low six bits: scales 0..4    high two: bits 4 and 5 of scales 4..8
/// bytes 4..8    low six bits: mins 0..4      high two: bits 4 and 5 of mins 4..8
/// bytes 8..12   low nibble: low bits of scales 4..8    high nibble: of mins 4..8
/// ```
fn groups_of_32(block: &[u8]) -> [Group; 8] {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let packed = &block[4..16];
    std::array::from_fn(|g| {
        let (scale, min) = match g {
            0..4 => (packed[g] & 63, packed[g + 4] & 63),
            _ => (
                packed[g + 4] & 15 | packed[g - 4] >> 6 << 4,
                packed[g + 4] >> 4 | packed[g] >> 6 << 4,
            ),
        };
        Group { scale: d * f32::from(scale), min: -(dmin * f32::from(min)) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, quant::dequantize_row};

    #[test]
    fn six_bit_scales_are_put_together_from_their_parts() {
        let mut block = [0; 144];
        block[..4].copy_from_slice(&[0x00, 0x3c, 0x00, 0x40]); // d = 1, dmin = 2
        // scale 0 = 5, scale 4 = 0b10_0011 = 35; min 0 = 63, min 4 = 0b01_1001 = 25.
        block[4] = 5 | 0b10 << 6;
        block[8] = 63 | 0b01 << 6;
        block[12] = 0b0011 | 0b1001 << 4;
        let groups = groups_of_32(&block);
        assert_eq!(groups[0], Group { scale: 5.0, min: -126.0 });
        assert_eq!(groups[4], Group { scale: 35.0, min: -50.0 });
        // Element 128 + 7 is in group 4: low nibble of byte 2 * 32 + 7.
        block[16 + 64 + 7] = 0x0c;
        let mut out = [0.0; 256];
        dequantize_row(Dtype::Q4K, &block, &mut out);
        assert_eq!((out[135], out[134], out[0]), (35.0 * 12.0 - 50.0, -50.0, -126.0));
    }

    #[test]
    fn fifth_and_sixth_bits() {
        let mut block = [0; 176];
        block[..4].copy_from_slice(&[0x00, 0x3c, 0x00, 0x00]); // d = 1, dmin = 0
        block[4..8].fill(1);
        block[16 + 9] = 0b1000; // group 3, element 9
        block[48 + 32 + 9] = 0x50;
        let mut out = [0.0; 256];
        dequantize_row(Dtype::Q5K, &block, &mut out);
        assert_eq!((out[96 + 9], out[64 + 9]), (21.0, 0.0));

        let mut block = [0; 210];
        block[208..].copy_from_slice(&[0x00, 0x38]); // d = 0.5
        block[192 + 15] = 0xfe; // scale of the last group: -2
        block[127] = 0xa0; // element 255: low bits 10
        block[191] = 0b1100_0000; // and high bits 3
        dequantize_row(Dtype::Q6K, &block, &mut out);
        assert_eq!((out[255], out[254], out[0]), (-(58.0 - 32.0), 32.0, 0.0));
    }
}
