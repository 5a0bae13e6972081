//! How panels store quantised weights.
//!
//! A panel is [`PANEL_ROWS`] rows of a matrix, cut into groups of columns that share a scale and a
//! minimum; a weight is `scale * code + min`.
//!
//! ```text
//! panel         super-block 0 | super-block 1 | ...         streamed from front to back
//! super-block   scales[16] f16 | mins[16] f16, if stored | groups
//! group         factors of scales[16] i8 | factors of mins[16] i8, if stored | codes
//!               factors only where a super-block has several groups: a group's scale is the
//!               super-block's times its factor, and its min likewise
//! codes         vectors of 64 bytes: 16 rows x 4 neighbouring columns (a quad), one byte a code
//!         8 bits   vector i is quad i
//!         4 bits   vector i is quad i in its low, quad i + half in its high nibbles
//!         5, 6     as 4, then one vector of the bits above: of quad i from bit i or 2 i on
//! ```
//!
//! So one register times one broadcast word of four activations gives a step of 16 dot products,
//! and no sum ever crosses lanes. Panels are as small as their source, or within 3 % of it.

use half::f16;

use crate::{Dtype, quant::Group};

/// Rows of a panel, but of panels for products of bf16: the 32-bit lanes of an AVX-512 register.
pub(super) const PANEL_ROWS: usize = 16;

/// Bytes of one vector of codes.
pub(super) const VECTOR_BYTES: usize = 64;

/// Bytes of 16 scales or mins.
pub(super) const SCALES_BYTES: usize = 2 * PANEL_ROWS;

/// How a quantised panel stores its groups.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct GroupLayout {
    /// Columns that share a scale.
    pub(super) group_len: usize,
    /// 4, 5, 6 or 8.
    pub(super) code_bits: usize,
    /// Groups of a super-block.
    pub(super) num_groups: usize,
    pub(super) min: Min,
}

/// Where a group's minimum comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Min {
    /// Stored beside the scale.
    Stored,
    /// `-zero_point * scale`: the code of zero is the same in all groups.
    ZeroPoint(u8),
}

/// A quantised format that kernels are compiled for.
pub(super) trait Format {
    const LAYOUT: GroupLayout;
}

/// Declares formats: name, group length, bits of a code, groups of a super-block, minimum.
macro_rules! formats {
    (
        $($name:ident: $group_len:literal, $code_bits:literal, $num_groups:literal, $min:expr;)*
    ) => {$(
        pub(super) struct $name;

        impl Format for $name {
            const LAYOUT: GroupLayout = GroupLayout {
                group_len: $group_len,
                code_bits: $code_bits,
                num_groups: $num_groups,
                min: $min,
            };
        }
    )*};
}

formats! {
    Q4Zero: 32, 4, 1, Min::ZeroPoint(8);
    Q4One: 32, 4, 1, Min::Stored;
    Q5Zero: 32, 5, 1, Min::ZeroPoint(16);
    Q5One: 32, 5, 1, Min::Stored;
    Q8Zero: 32, 8, 1, Min::ZeroPoint(128);
    Q4K: 32, 4, 8, Min::Stored;
    Q5K: 32, 5, 8, Min::Stored;
    Q6K: 16, 6, 16, Min::ZeroPoint(32);
}

/// Bytes of a panel of plain numbers.
///
/// Those of bf16 are in pairs, as products of bf16 want them: a row's numbers of columns 0 and 1,
/// the next row's, ..., then all rows' of columns 2 and 3; an odd last column has zeros beside it.
pub(super) const fn number_panel_bytes(dtype: Dtype, cols: usize, panel_rows: usize) -> usize {
    let cols = if matches!(dtype, Dtype::BF16) { cols.next_multiple_of(2) } else { cols };
    cols * panel_rows * dtype.block_bytes()
}

impl GroupLayout {
    /// The layout of panels of `dtype`; `None` if its weights are plain numbers.
    pub(super) const fn of(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F8E4M3 => None,
            Dtype::Q4_0 => Some(Q4Zero::LAYOUT),
            Dtype::Q4_1 => Some(Q4One::LAYOUT),
            Dtype::Q5_0 => Some(Q5Zero::LAYOUT),
            Dtype::Q5_1 => Some(Q5One::LAYOUT),
            Dtype::Q8_0 => Some(Q8Zero::LAYOUT),
            Dtype::Q4K => Some(Q4K::LAYOUT),
            Dtype::Q5K => Some(Q5K::LAYOUT),
            Dtype::Q6K => Some(Q6K::LAYOUT),
        }
    }

    /// Bytes before the groups of a super-block.
    pub(super) const fn header_bytes(self) -> usize {
        match self.min {
            Min::Stored => 2 * SCALES_BYTES,
            Min::ZeroPoint(_) => SCALES_BYTES,
        }
    }

    /// Bytes before the codes of a group.
    pub(super) const fn factors_bytes(self) -> usize {
        match self.min {
            _ if self.num_groups == 1 => 0,
            Min::Stored => 2 * PANEL_ROWS,
            Min::ZeroPoint(_) => PANEL_ROWS,
        }
    }

    /// Quads of columns in a group.
    pub(super) const fn num_quads(self) -> usize {
        self.group_len / 4
    }

    /// Bits of a code above a nibble, where they are stored apart.
    pub(super) const fn high_bits(self) -> usize {
        if self.code_bits == 8 { 0 } else { self.code_bits - 4 }
    }

    /// Where in a group's codes the vector of high bits starts.
    pub(super) const fn high_bits_start(self) -> usize {
        self.num_quads() / 2 * VECTOR_BYTES
    }

    /// Bytes of a group of 16 rows.
    pub(super) const fn group_bytes(self) -> usize {
        let codes_bytes = match self.code_bits {
            4 => self.high_bits_start(),
            8 => self.num_quads() * VECTOR_BYTES,
            _ => self.high_bits_start() + VECTOR_BYTES,
        };
        self.factors_bytes() + codes_bytes
    }

    /// Bytes of a super-block of 16 rows.
    pub(super) const fn super_block_bytes(self) -> usize {
        self.header_bytes() + self.num_groups * self.group_bytes()
    }

    /// Columns of a super-block.
    pub(super) const fn super_block_len(self) -> usize {
        self.num_groups * self.group_len
    }

    /// Writes row `lane` of a super-block into `bytes`. `scales` are those that groups have factors
    /// of, or those of the only group.
    pub(super) fn write_row(
        self,
        bytes: &mut [u8],
        lane: usize,
        scales: Group,
        row: (&[Group], &[u8]),
    ) {
        let (header, bytes) = bytes.split_at_mut(self.header_bytes());
        write_half(header, lane, scales.scale);
        if self.min == Min::Stored {
            write_half(&mut header[SCALES_BYTES..], lane, scales.min);
        }
        let groups = row.0.iter().zip(row.1.chunks_exact(self.group_len));
        for (bytes, (group, codes)) in bytes.chunks_exact_mut(self.group_bytes()).zip(groups) {
            let (factors, vectors) = bytes.split_at_mut(self.factors_bytes());
            if self.num_groups > 1 {
                factors[lane] = factor(group.scale, scales.scale);
                if self.min == Min::Stored {
                    factors[PANEL_ROWS + lane] = factor(group.min, scales.min);
                }
            }
            self.write_codes(vectors, lane, codes);
        }
    }

    fn write_codes(self, vectors: &mut [u8], lane: usize, codes: &[u8]) {
        let (num_quads, high_bits) = (self.num_quads(), self.high_bits());
        for (i, quad) in codes.as_chunks::<4>().0.iter().enumerate() {
            for (j, code) in quad.iter().enumerate() {
                let byte = 4 * lane + j;
                if self.code_bits == 8 {
                    vectors[i * VECTOR_BYTES + byte] = *code;
                    continue;
                }
                let shift = 4 * (i / (num_quads / 2));
                vectors[i % (num_quads / 2) * VECTOR_BYTES + byte] |= (code & 15) << shift;
                if high_bits > 0 {
                    vectors[self.high_bits_start() + byte] |= (code >> 4) << (high_bits * i);
                }
            }
        }
    }
}

fn write_half(bytes: &mut [u8], lane: usize, value: f32) {
    bytes[lane * 2..lane * 2 + 2].copy_from_slice(&f16::from_f32(value).to_ne_bytes());
}

/// The whole number that `part` is of `unit`.
fn factor(part: f32, unit: f32) -> u8 {
    let factor = if unit == 0.0 { 0.0 } else { part / unit };
    (factor as i8).cast_unsigned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panels_are_about_as_small_as_their_source() {
        for (dtype, extra) in [
            (Dtype::Q4_0, 0),
            (Dtype::Q4_1, 0),
            (Dtype::Q5_0, 0),
            (Dtype::Q5_1, 0),
            (Dtype::Q8_0, 0),
            // Six-bit factors take a byte.
            (Dtype::Q4K, 4),
            (Dtype::Q5K, 4),
            (Dtype::Q6K, 0),
        ] {
            let layout = GroupLayout::of(dtype).unwrap();
            assert_eq!(layout.super_block_len(), dtype.block_len(), "{dtype}");
            let bytes = PANEL_ROWS * (dtype.block_bytes() + extra);
            assert_eq!(layout.super_block_bytes(), bytes, "{dtype}");
        }
    }

    #[test]
    fn nibbles_of_a_vector_are_half_a_group_apart() {
        let layout = Q4One::LAYOUT;
        let mut bytes = vec![0; layout.super_block_bytes()];
        let codes: Vec<u8> = (0..32).map(|i| i / 2).collect();
        let group = Group { scale: 0.5, min: -2.0 };
        layout.write_row(&mut bytes, 3, group, (&[group], &codes));
        assert_eq!(bytes[6..8], [0x00, 0x38], "f16 0.5");
        assert_eq!(bytes[32 + 6..32 + 8], [0x00, 0xc0], "f16 -2");
        // Vector 1, row 3: columns 4..8 have codes 2 2 3 3, columns 20..24 have 10 10 11 11.
        assert_eq!(bytes[64 + 64 + 12..64 + 64 + 16], [0xa2, 0xa2, 0xb3, 0xb3]);
    }

    #[test]
    fn bits_above_the_nibbles_and_factors_have_places_of_their_own() {
        let layout = Q6K::LAYOUT;
        let mut bytes = vec![0; layout.super_block_bytes()];
        let mut codes = [0; 256];
        codes[16 + 4 * 3 + 1] = 0b10_0101; // group 1, quad 3: high nibble of vector 1
        let unit = Group { scale: 0.25, min: -8.0 };
        let mut groups = [unit; 16];
        groups[1] = Group { scale: 0.25 * -3.0, min: 32.0 * 0.75 };
        layout.write_row(&mut bytes, 2, unit, (&groups, &codes));
        let group = &bytes[32 + 16 + 128 + 64..];
        assert_eq!(group[2].cast_signed(), -3);
        assert_eq!(group[16 + 64 + 4 * 2 + 1], 0x50);
        assert_eq!(group[16 + 128 + 4 * 2 + 1], 0b1000_0000);
    }
}
