//! Element types of weights and of the KV cache.

use std::fmt;

/// How the elements of a tensor are stored.
///
/// Quantised types store blocks of [`Dtype::block_len`] elements along a row.
///
/// # Source
/// Block layouts: the GGUF specification and ggml's public type table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Dtype {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
    /// 4 bits of exponent, 3 of mantissa, no infinities ("e4m3fn").
    F8E4M3,
}

impl Dtype {
    /// Elements in one block: 1 for plain types.
    pub const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 | Self::F8E4M3 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::F8E4M3 => 1,
            Self::Q4_0 => 2 + 16,
            Self::Q4_1 => 4 + 16,
            Self::Q5_0 => 2 + 4 + 16,
            Self::Q5_1 => 4 + 4 + 16,
            Self::Q8_0 => 2 + 32,
            Self::Q4K => 4 + 12 + 128,
            Self::Q5K => 4 + 12 + 32 + 128,
            Self::Q6K => 128 + 64 + 16 + 2,
        }
    }

    /// Bytes of a row of `num_elements`, or `None` when it is not a whole number of blocks or the
    /// size overflows.
    pub fn row_bytes(self, num_elements: usize) -> Option<usize> {
        if !num_elements.is_multiple_of(self.block_len()) {
            return None;
        }
        (num_elements / self.block_len()).checked_mul(self.block_bytes())
    }

    /// The number of this type that is nearest to `x`; of types that share scales, `x` itself.
    pub fn round(self, x: f32) -> f32 {
        match self {
            Self::F16 => half::f16::from_f32(x).to_f32(),
            Self::BF16 => half::bf16::from_f32(x).to_f32(),
            _ => x,
        }
    }

    /// The name used in weight files and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::F8E4M3 => "F8_E4M3",
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
