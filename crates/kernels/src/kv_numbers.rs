//! What the KV cache is, to the kernels that read and write it.

use crate::KernelError;

/// Number types that kernels are specialised for; see `csrc/kv_cache.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvNumbers {
    /// Two bytes.
    Bf16,
    /// Codes of e4m3 and an f32 scale for every token and head.
    Fp8,
    /// Whole numbers from -127 to 127 and an f32 scale for every token and head.
    Int8,
    /// Whole numbers from 0 to 15 and, for every [`KvNumbers::GROUP`] of them in a token's head, a
    /// factor and the least number, f16 both.
    Int4,
}

impl KvNumbers {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Bf16, Self::Fp8, Self::Int8, Self::Int4];

    /// Numbers of four bits that share a factor.
    pub const GROUP: u32 = 32;

    /// Whether tokens have scales.
    pub const fn has_scales(self) -> bool {
        !matches!(self, Self::Bf16)
    }

    /// The macro `KV` of the sources.
    pub(crate) const fn code(self) -> u32 {
        match self {
            Self::Bf16 => 0,
            Self::Fp8 => 1,
            Self::Int8 => 2,
            Self::Int4 => 3,
        }
    }
}

/// What kernels are specialised for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvShape {
    /// Types of the numbers.
    pub numbers: KvNumbers,
    /// Elements of a head.
    pub head_dim: u32,
    /// Tokens of a block.
    pub block_size: u32,
}

impl KvShape {
    /// Bytes of a head's numbers.
    pub const fn head_bytes(&self) -> u32 {
        match self.numbers {
            KvNumbers::Bf16 => 2 * self.head_dim,
            KvNumbers::Fp8 | KvNumbers::Int8 => self.head_dim,
            KvNumbers::Int4 => self.head_dim / 2,
        }
    }

    /// Bytes of a token's scales.
    pub const fn scale_bytes(&self) -> u32 {
        match self.numbers {
            KvNumbers::Bf16 => 0,
            KvNumbers::Fp8 | KvNumbers::Int8 => 4,
            KvNumbers::Int4 => self.head_dim.div_ceil(KvNumbers::GROUP) * 4,
        }
    }

    /// The macros that `csrc/kv_cache.cuh` asks for.
    pub(crate) fn defines(&self) -> [(&'static str, u32); 3] {
        let Self { numbers, head_dim, block_size } = *self;
        [("KV", numbers.code()), ("HEAD_DIM", head_dim), ("BLOCK_SIZE", block_size)]
    }

    /// Whether tensor cores can take heads of this size.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] if `head_dim` is not a multiple of 16, or for numbers of eight
    /// or four bits of 32, up to 256.
    pub(crate) fn check(&self, kernel: &'static str) -> Result<(), KernelError> {
        let Self { numbers, head_dim, block_size } = *self;
        let unit = if numbers.has_scales() { 32 } else { 16 };
        if head_dim.is_multiple_of(unit) && (unit..=256).contains(&head_dim) && block_size > 0 {
            return Ok(());
        }
        let reason = format!(
            "heads of {head_dim} elements in blocks of {block_size} tokens, KV cache of \
             {numbers:?}: heads must be multiples of {unit} up to 256"
        );
        Err(KernelError::Unsupported { kernel, reason })
    }
}
