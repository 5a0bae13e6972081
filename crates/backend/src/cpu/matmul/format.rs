//! How panels store quantised weights.
//!
//! A panel is [`PANEL_ROWS`] rows of a matrix, cut into groups of columns that share a scale:
//!
//! ```text
//! panel   group 0 | group 1 | ...                            streamed from front to back
//! group   scales[16] | mins[16], if stored | codes
//! codes   64-byte vectors: 16 rows x 4 neighbouring columns, one byte a code
//!         4-bit codes: vector i holds columns 4 i.. in its low and, half a group later,
//!         columns group_len / 2 + 4 i.. in its high nibbles
//! ```
//!
//! So one vector register times one broadcast word of four activations gives a step of 16 dot
//! products, and no sum ever crosses lanes. A weight is `scale * code + min`.

use half::f16;

use crate::{Dtype, quant::Group};

/// Rows of a panel: the 32-bit lanes of an AVX-512 register.
pub(super) const PANEL_ROWS: usize = 16;

/// Bytes of one vector of codes.
pub(super) const VECTOR_BYTES: usize = 64;

/// How a quantised panel stores its groups.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct GroupLayout {
    /// Columns that share a scale.
    pub(super) group_len: usize,
    /// 4 or 8.
    pub(super) code_bits: usize,
    /// Whether scales are f32; else f16, where the source's are.
    pub(super) wide_scales: bool,
    pub(super) min: Min,
}

/// Where a group's minimum comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Min {
    /// Stored beside the scale, in the same type.
    Stored,
    /// `-zero_point * scale`: the code of zero is the same in all groups.
    ZeroPoint(u8),
}

/// A quantised format that kernels are compiled for.
pub(super) trait Format {
    const LAYOUT: GroupLayout;
}

/// Declares formats: name, group length, bits of a code, width of scales, minimum.
macro_rules! formats {
    ($($name:ident: $group_len:literal, $bits:literal, $wide:literal, $min:expr;)*) => {$(
        pub(super) struct $name;

        impl Format for $name {
            const LAYOUT: GroupLayout = GroupLayout {
                group_len: $group_len,
                code_bits: $bits,
                wide_scales: $wide,
                min: $min,
            };
        }
    )*};
}

formats! {
    Q4Zero: 32, 4, false, Min::ZeroPoint(8);
    Q4One: 32, 4, false, Min::Stored;
    Q5Zero: 32, 8, false, Min::ZeroPoint(16);
    Q5One: 32, 8, false, Min::Stored;
    Q8Zero: 32, 8, false, Min::ZeroPoint(128);
    Q4K: 32, 4, true, Min::Stored;
    Q5K: 32, 8, true, Min::Stored;
    Q6K: 16, 8, true, Min::ZeroPoint(32);
}

impl GroupLayout {
    /// The layout of panels of `dtype`; `None` if its weights are plain numbers.
    pub(super) const fn of(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F32 | Dtype::F16 | Dtype::BF16 => None,
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

    /// Bytes of the 16 scales of a group.
    pub(super) const fn scales_bytes(self) -> usize {
        PANEL_ROWS * if self.wide_scales { 4 } else { 2 }
    }

    /// Bytes before the codes of a group.
    pub(super) const fn header_bytes(self) -> usize {
        match self.min {
            Min::Stored => 2 * self.scales_bytes(),
            Min::ZeroPoint(_) => self.scales_bytes(),
        }
    }

    /// Vectors of codes in a group.
    pub(super) const fn num_vectors(self) -> usize {
        self.group_len * self.code_bits * PANEL_ROWS / 8 / VECTOR_BYTES
    }

    /// Bytes of a group of 16 rows.
    pub(super) const fn group_bytes(self) -> usize {
        self.header_bytes() + self.num_vectors() * VECTOR_BYTES
    }

    /// Writes row `lane` of a group.
    pub(super) fn write_row(self, bytes: &mut [u8], lane: usize, group: Group, codes: &[u8]) {
        let (scales, rest) = bytes.split_at_mut(self.scales_bytes());
        self.write_scale(scales, lane, group.scale);
        let (mins, vectors) = rest.split_at_mut(self.header_bytes() - self.scales_bytes());
        if self.min == Min::Stored {
            self.write_scale(mins, lane, group.min);
        }
        let quads = codes.as_chunks::<4>().0;
        for (i, vector) in vectors.chunks_exact_mut(VECTOR_BYTES).enumerate() {
            let word = &mut vector[lane * 4..lane * 4 + 4];
            if self.code_bits == 4 {
                let (low, high) = (quads[i], quads[i + quads.len() / 2]);
                word.copy_from_slice(&std::array::from_fn::<u8, 4, _>(|j| low[j] | high[j] << 4));
            } else {
                word.copy_from_slice(&quads[i]);
            }
        }
    }

    fn write_scale(self, bytes: &mut [u8], lane: usize, value: f32) {
        if self.wide_scales {
            bytes[lane * 4..lane * 4 + 4].copy_from_slice(&value.to_ne_bytes());
        } else {
            let half = f16::from_f32(value).to_ne_bytes();
            bytes[lane * 2..lane * 2 + 2].copy_from_slice(&half);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panels_are_no_larger_than_their_source_where_codes_are_whole() {
        for dtype in [Dtype::Q4_0, Dtype::Q4_1, Dtype::Q8_0] {
            let layout = GroupLayout::of(dtype).unwrap();
            assert_eq!(layout.group_bytes(), PANEL_ROWS * dtype.block_bytes(), "{dtype}");
        }
    }

    #[test]
    fn nibbles_of_a_vector_are_half_a_group_apart() {
        let layout = Q4One::LAYOUT;
        let mut bytes = vec![0; layout.group_bytes()];
        let codes: Vec<u8> = (0..32).map(|i| i / 2).collect();
        layout.write_row(&mut bytes, 3, Group { scale: 0.5, min: -2.0 }, &codes);
        assert_eq!(bytes[6..8], [0x00, 0x38], "f16 0.5");
        assert_eq!(bytes[32 + 6..32 + 8], [0x00, 0xc0], "f16 -2");
        // Vector 1, row 3: columns 4..8 have codes 2 2 3 3, columns 20..24 have 10 10 11 11.
        assert_eq!(bytes[64 + 64 + 12..64 + 64 + 16], [0xa2, 0xa2, 0xb3, 0xb3]);
    }
}
