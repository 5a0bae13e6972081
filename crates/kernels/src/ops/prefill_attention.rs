//! Causal attention of rows with several new tokens over their paged context.
//!
//! Query rows (token, head of the group) are packed, so that a short chunk still fills a tile and
//! keys are loaded once for all heads that share them. Grid: tiles of the plan times key/value
//! heads; blocks beyond the plan's tiles leave at once.

use super::plan_attention::PlanLayout;
use crate::{Budget, DevicePtr, Gpu, Kernel, KernelError, KernelSpec, Launch, Source};

/// A specialisation of the prefill kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillAttention {
    head_dim: u32,
    block_size: u32,
    warps: u32,
    /// Positions of a tile of keys.
    keys: u32,
}

/// Arguments of [`PrefillAttention`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct PrefillAttentionParams {
    /// `[num_tokens, qkv_len]`, bf16.
    pub qkv: DevicePtr,
    /// `[num_blocks, num_kv_heads, block_size, head_dim]`, bf16.
    pub keys: DevicePtr,
    /// As `keys`.
    pub values: DevicePtr,
    /// `[num_tokens, num_heads * head_dim]`, bf16. Rows of several new tokens are written.
    pub out: DevicePtr,
    pub blocks: DevicePtr,
    /// `[num_rows + 1]`.
    pub block_starts: DevicePtr,
    /// `[num_rows + 1]`.
    pub row_starts: DevicePtr,
    /// `[num_rows]`.
    pub context_lens: DevicePtr,
    /// Of this step and window.
    pub plan: DevicePtr,
    pub num_tokens: u32,
    pub num_rows: u32,
    /// Of the plan's layout, as is the next.
    pub max_rows: u32,
    pub num_ctas: u32,
    pub num_heads: u32,
    pub num_kv_heads: u32,
    /// As in the plan.
    pub window: u32,
    /// Multiplies scores before the softmax.
    pub scale: f32,
}

impl PrefillAttention {
    /// The specialisation that suits this GPU.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] if `head_dim` is not a multiple of 16 up to 256.
    pub fn new(gpu: &Gpu, head_dim: u32, block_size: u32) -> Result<Self, KernelError> {
        let unsupported = |reason: String| KernelError::Unsupported {
            kernel: "prefill_attention",
            reason: format!("heads of {head_dim} elements, blocks of {block_size}: {reason}"),
        };
        if !head_dim.is_multiple_of(16) || !(16..=256).contains(&head_dim) || block_size == 0 {
            return Err(unsupported("heads must be multiples of 16 up to 256".into()));
        }
        let long = head_dim > 128;
        let choices = if long { [(8, 32), (4, 32), (4, 16)] } else { [(8, 64), (4, 64), (4, 32)] };
        let shapes = choices.map(|(warps, keys)| Self { head_dim, block_size, warps, keys });
        let fits = |shape: &&Self| shape.dynamic_smem() <= gpu.smem_per_block;
        let found = shapes.iter().find(fits);
        found.copied().ok_or_else(|| unsupported("they need more shared memory".into()))
    }

    /// Query rows of a tile: a warp takes 16.
    pub const fn tile(&self) -> u32 {
        16 * self.warps
    }

    const fn dynamic_smem(&self) -> u32 {
        // Two tiles of keys and values; long heads keep their queries there as well.
        let pitch = 2 * self.head_dim + 16;
        let queries = if self.head_dim > 128 { self.tile() } else { 0 };
        (2 * 2 * self.keys + queries) * pitch
    }
}

impl Kernel for PrefillAttention {
    type Params = PrefillAttentionParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source {
                file: "prefill_attention.cu",
                text: include_str!("../../csrc/prefill_attention.cu"),
            },
            entry: "prefill_attention",
            defines: vec![
                ("HEAD_DIM", self.head_dim),
                ("BLOCK_SIZE", self.block_size),
                ("WARPS", self.warps),
                ("KEYS", self.keys),
            ],
            dynamic_smem: self.dynamic_smem(),
            params_bytes: size_of::<PrefillAttentionParams>(),
            budget: Budget { registers: 255, static_smem: 0 },
        }
    }

    fn launch(&self, params: &PrefillAttentionParams) -> Launch {
        let group = params.num_heads / params.num_kv_heads;
        let tiles =
            PlanLayout::prefill_tiles(params.num_tokens, params.num_rows, group, self.tile());
        Launch { grid: [tiles, params.num_kv_heads, 1], block: [32 * self.warps, 1, 1] }
    }
}
