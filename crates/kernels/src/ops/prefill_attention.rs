//! Causal attention of rows with several new tokens over their paged context.
//!
//! Query rows (token, head of the group) are packed, so that a short chunk still fills a tile and
//! keys are loaded once for all heads that share them. Grid: tiles of the plan times key/value
//! heads; blocks beyond the plan's tiles leave at once.

use super::plan_attention::PlanLayout;
use crate::{Budget, DevicePtr, Gpu, Kernel, KernelError, KernelSpec, KvShape, Launch, Source};

/// A specialisation of the prefill kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillAttention {
    cache: KvShape,
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
    /// Strips as in `csrc/kv_cache.cuh`.
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
    /// [`KernelError::Unsupported`] if tensor cores cannot take such heads.
    pub fn new(gpu: &Gpu, cache: KvShape) -> Result<Self, KernelError> {
        const NAME: &str = "prefill_attention";
        cache.check(NAME)?;
        let long = cache.head_dim > 128;
        let choices = if long { [(8, 32), (4, 32), (4, 16)] } else { [(8, 64), (4, 64), (4, 32)] };
        let shapes = choices.map(|(warps, keys)| Self { cache, warps, keys });
        let fits = |shape: &&Self| shape.dynamic_smem() <= gpu.smem_per_block;
        shapes.iter().find(fits).copied().ok_or_else(|| KernelError::Unsupported {
            kernel: NAME,
            reason: format!("heads of {} elements need more shared memory", cache.head_dim),
        })
    }

    /// The same kernel with smaller tiles, for rows of few query rows each. A query's output has
    /// the same bits whatever the tile is.
    pub const fn with_small_tiles(self) -> Self {
        Self { warps: 4, ..self }
    }

    pub(super) const fn cache(&self) -> KvShape {
        self.cache
    }

    /// Query rows of a tile: a warp takes 16.
    pub const fn tile(&self) -> u32 {
        16 * self.warps
    }

    const fn dynamic_smem(&self) -> u32 {
        let pitch = 2 * self.cache.head_dim + 16;
        let tile = 2 * self.keys * pitch;
        // Two tiles of keys and values; if scaled, their scales as well, and one in bf16.
        let tiles = match self.cache.numbers.has_scales() {
            false => 2 * tile,
            true => {
                let token = self.cache.head_bytes() + self.cache.scale_bytes();
                2 * 2 * self.keys * token + tile
            }
        };
        // Long heads keep their queries there as well.
        let queries = if self.cache.head_dim > 128 { self.tile() } else { 0 };
        tiles + queries * pitch
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
            defines: [("WARPS", self.warps), ("KEYS", self.keys)]
                .into_iter()
                .chain(self.cache.defines())
                .collect(),
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
