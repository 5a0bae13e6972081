//! Attention of rows with one new token over the prefixes that they share.
//!
//! Query rows (row, head of the group) of one prefix and key/value head are packed into tiles, so
//! that its keys and values are read once for a tile instead of once for every row. A query tile of
//! a prefix and key/value head is a strip; all strips' tiles of the context form one line of units,
//! of which every block takes an equal stretch, as in [`super::plan_attention`]. A piece of a strip
//! leaves its sums in a slot; [`super::decode_attention`] adds them to what rows see behind the
//! prefix.
//!
//! # Source
//! Cascade attention as in FlashInfer (Ye et al., 2024) and Hydragen (Juravsky et al., 2024).

use super::{plan_attention::TILE_LEN, prefill_attention::PrefillAttention};
use crate::{DevicePtr, Gpu, Kernel, KernelError, KernelSpec, KvShape, Launch, Source};

/// A specialisation of the kernel for shared prefixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixAttention {
    /// Has the same tiles of queries and keys.
    tiles: PrefillAttention,
    num_ctas: u32,
}

/// Arguments of [`PrefixAttention`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct PrefixAttentionParams {
    /// `[num_tokens, qkv_len]`, bf16.
    pub qkv: DevicePtr,
    /// Strips as in `csrc/kv_cache.cuh`.
    pub keys: DevicePtr,
    /// As `keys`.
    pub values: DevicePtr,
    pub blocks: DevicePtr,
    /// `[num_rows + 1]`.
    pub block_starts: DevicePtr,
    /// `[num_rows + 1]`.
    pub row_starts: DevicePtr,
    /// How many prefixes and how many of their rows, then three words for each prefix: tokens, a
    /// multiple of [`TILE_LEN`]; its first entry in `prefix_rows`; its entries.
    pub prefixes: DevicePtr,
    /// Two words for each row that shares a prefix: row, prefix.
    pub prefix_rows: DevicePtr,
    /// Of this step.
    pub plan: DevicePtr,
    /// In the plan: [`super::plan_attention::PlanLayout::prefix_spans_at`].
    pub spans: DevicePtr,
    /// [`PrefixAttention::part_floats`] of f32, written.
    pub parts: DevicePtr,
    pub num_heads: u32,
    pub num_kv_heads: u32,
    /// Multiplies scores before the softmax.
    pub scale: f32,
    /// Zero.
    pub reserved: u32,
}

impl PrefixAttention {
    /// Query rows of the smallest tile on any GPU.
    pub const MIN_TILE: u32 = 64;

    /// The specialisation that suits this GPU.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] if tensor cores cannot take such heads.
    pub fn new(gpu: &Gpu, cache: KvShape) -> Result<Self, KernelError> {
        Ok(Self { tiles: PrefillAttention::new(gpu, cache)?, num_ctas: gpu.num_sms })
    }

    /// Blocks of every launch.
    pub const fn num_ctas(&self) -> u32 {
        self.num_ctas
    }

    /// Query rows of a tile. A group of more heads cannot be packed.
    pub const fn tile(&self) -> u32 {
        self.tiles.tile()
    }

    /// Most strips of a step with so many rows and prefixes.
    pub const fn strips(&self, num_rows: u32, num_prefixes: u32, heads: (u32, u32)) -> u32 {
        let (num_heads, num_kv_heads) = heads;
        let rows_per_tile = self.tile() / (num_heads / num_kv_heads);
        (num_rows / rows_per_tile + num_prefixes) * num_kv_heads
    }

    /// Floats of `parts`: slots are numbered by strip plus block, see `csrc/prefix_plan.cuh`.
    pub const fn part_floats(&self, strips: u32) -> usize {
        let slot = self.tile() * (self.tiles.cache().head_dim + 2);
        (strips + self.num_ctas) as usize * slot as usize
    }
}

impl Kernel for PrefixAttention {
    type Params = PrefixAttentionParams;

    fn spec(&self) -> KernelSpec {
        let mut spec = self.tiles.spec();
        spec.source = Source {
            file: "prefix_attention.cu",
            text: include_str!("../../csrc/prefix_attention.cu"),
        };
        spec.entry = "prefix_attention";
        spec.defines.push(("TILE_LEN", TILE_LEN));
        spec.params_bytes = size_of::<PrefixAttentionParams>();
        spec
    }

    fn launch(&self, _: &PrefixAttentionParams) -> Launch {
        Launch::linear(self.num_ctas, 2 * self.tile())
    }
}
