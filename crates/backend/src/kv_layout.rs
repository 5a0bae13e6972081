//! Types of the KV cache's numbers and where they lie, the same on every device.

use std::fmt;

use crate::{AttentionShape, e4m3};

/// How the KV cache's numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// 32 bits.
    F32,
    /// 16 bits, 11 of them significant.
    F16,
    /// 16 bits, eight of them significant.
    Bf16,
    /// Codes of eight bits with four significant, e4m3, and a scale for every token and head.
    Fp8,
    /// Whole numbers from -127 to 127, and a scale for every token and head.
    Int8,
    /// Whole numbers from 0 to 15, and for every [`KvDtype::GROUP`] of them in a token's head a
    /// factor and the least number, both of 16 bits.
    Int4,
}

impl KvDtype {
    /// Numbers of [`KvDtype::Int4`] that share a factor.
    pub const GROUP: usize = 32;

    /// Bytes of a token's head, its scales left out.
    pub const fn head_bytes(self, head_dim: usize) -> usize {
        match self {
            Self::F32 => head_dim.saturating_mul(4),
            Self::F16 | Self::Bf16 => head_dim.saturating_mul(2),
            Self::Fp8 | Self::Int8 => head_dim,
            // A group's second half lies in the upper bits of its first.
            Self::Int4 => head_dim.div_ceil(Self::GROUP) * (Self::GROUP / 2),
        }
    }

    /// Bytes of a token's scales.
    pub const fn scale_bytes(self, head_dim: usize) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 0,
            Self::Fp8 | Self::Int8 => size_of::<f32>(),
            Self::Int4 => head_dim.div_ceil(Self::GROUP) * 2 * size_of::<u16>(),
        }
    }

    /// The greatest code of a type that has one scale for a token's head.
    pub const fn greatest_code(self) -> Option<f32> {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 | Self::Int4 => None,
            Self::Fp8 => Some(e4m3::GREATEST),
            Self::Int8 => Some(127.0),
        }
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        })
    }
}

/// Keys (or values) of one layer: blocks of strips, a strip being one head's share of a block.
///
/// ```text
/// cache   [num_blocks] blocks
/// block   [num_kv_heads] strips
/// strip   [block_size, head_dim] numbers; of types of eight bits, then [block_size] f32: scales;
///         of four bits, then [block_size, groups] pairs of f16: factors and least numbers
/// ```
///
/// A scale is the greatest magnitude of a token's head over the greatest code, so that writing a
/// token touches no other token's numbers. Scales are padded to a multiple of 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub struct KvLayout {
    pub dtype: KvDtype,
    pub num_kv_heads: usize,
    pub block_size: usize,
    pub head_dim: usize,
}

impl KvLayout {
    /// The cache of a layer.
    pub const fn new(dtype: KvDtype, attention: AttentionShape) -> Self {
        let AttentionShape { num_kv_heads, head_dim, block_size, .. } = attention;
        Self { dtype, num_kv_heads, block_size, head_dim }
    }

    /// Bytes of a token's head, its scales left out.
    pub const fn head_bytes(&self) -> usize {
        self.dtype.head_bytes(self.head_dim)
    }

    /// Bytes of a token's scales.
    pub const fn scale_bytes(&self) -> usize {
        self.dtype.scale_bytes(self.head_dim)
    }

    /// Bytes of a strip's numbers: its scales begin there.
    pub const fn codes_bytes(&self) -> usize {
        self.block_size.saturating_mul(self.head_bytes())
    }

    /// Bytes of a strip.
    pub const fn strip_bytes(&self) -> usize {
        let scales = self.block_size.saturating_mul(self.scale_bytes()).next_multiple_of(16);
        self.codes_bytes().saturating_add(scales)
    }

    /// Bytes of a block of keys, or of values.
    pub const fn block_bytes(&self) -> usize {
        self.num_kv_heads.saturating_mul(self.strip_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strips_hold_their_scales() {
        let attention =
            AttentionShape { num_heads: 32, num_kv_heads: 8, head_dim: 128, block_size: 16 };
        let bytes = |dtype| KvLayout::new(dtype, attention).block_bytes();
        assert_eq!(bytes(KvDtype::Bf16), 8 * 16 * 128 * 2);
        assert_eq!(bytes(KvDtype::F32), 8 * 16 * 128 * 4);
        assert_eq!(bytes(KvDtype::Int8), 8 * 16 * (128 + 4));
        assert_eq!(bytes(KvDtype::Fp8), bytes(KvDtype::Int8));
        assert_eq!(bytes(KvDtype::Int4), 8 * 16 * (64 + 4 * 4));
        let odd = KvLayout { dtype: KvDtype::Int8, num_kv_heads: 1, block_size: 3, head_dim: 16 };
        assert_eq!((odd.codes_bytes(), odd.strip_bytes()), (48, 64));
    }
}
