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
}

impl KvDtype {
    /// Bytes of one number, its share of a scale left out.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Fp8 | Self::Int8 => 1,
        }
    }

    /// The greatest code of a type that has scales.
    pub const fn greatest_code(self) -> Option<f32> {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => None,
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
        })
    }
}

/// Keys (or values) of one layer: blocks of strips, a strip being one head's share of a block.
///
/// ```text
/// cache   [num_blocks] blocks
/// block   [num_kv_heads] strips
/// strip   [block_size, head_dim] numbers; of types of eight bits, then [block_size] f32: scales
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

    /// Bytes of a strip's numbers: its scales begin there.
    pub const fn codes_bytes(&self) -> usize {
        self.block_size.saturating_mul(self.head_dim * self.dtype.bytes())
    }

    /// Bytes of a strip.
    pub const fn strip_bytes(&self) -> usize {
        if self.dtype.greatest_code().is_none() {
            return self.codes_bytes();
        }
        let scales = self.block_size.saturating_mul(size_of::<f32>()).next_multiple_of(16);
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
        let odd = KvLayout { dtype: KvDtype::Int8, num_kv_heads: 1, block_size: 3, head_dim: 16 };
        assert_eq!((odd.codes_bytes(), odd.strip_bytes()), (48, 64));
    }
}
