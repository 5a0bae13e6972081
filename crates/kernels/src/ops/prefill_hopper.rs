//! [`super::prefill_attention`] for Hopper: warpgroups multiply, the copy engine brings tiles.
//!
//! A KV cache of eight bits is widened to bf16 on the way, by warps that do nothing else.
//!
//! As many blocks as multiprocessors take tiles of query rows from a queue, so that one tile's end
//! hides behind the next one's beginning. A tile holds whole tokens: its rows are the largest
//! multiple of the group up to [`PrefillHopper::ROWS`].

use crate::{
    Arch, Budget, DevicePtr, Gpu, Kernel, KernelSpec, KvNumbers, KvShape, Launch, Source, TensorMap,
};

/// A specialisation of the prefill kernel for Hopper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillHopper {
    cache: KvShape,
    num_sms: u32,
}

/// Arguments of [`PrefillHopper`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct PrefillHopperParams {
    /// Of `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`, bf16, in boxes of
    /// [`PrefillHopper::tokens`], the heads of a group and [`PrefillHopper::PANEL`] elements.
    pub queries: TensorMap,
    /// Of `[num_blocks * num_kv_heads * block_size, head_dim]`, bf16, in boxes of a block and
    /// [`PrefillHopper::PANEL`] elements; unused where the cache holds numbers of eight bits.
    pub keys: TensorMap,
    /// As `keys`.
    pub values: TensorMap,
    /// Strips as in `csrc/kv_cache.cuh`; unused where the cache holds bf16.
    pub key_strips: DevicePtr,
    /// As `key_strips`.
    pub value_strips: DevicePtr,
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
    /// `[2]`, zeros; a launch leaves zeros.
    pub queue: DevicePtr,
    /// [`super::plan_attention::PlanLayout::prefill_tiles_at`].
    pub prefill_tiles_at: u32,
    pub num_heads: u32,
    pub num_kv_heads: u32,
    /// As in the plan.
    pub window: u32,
    /// Multiplies scores before the softmax.
    pub scale: f32,
    /// Most tiles of the step: [`super::plan_attention::PlanLayout::prefill_tiles`].
    pub max_tiles: u32,
}

impl PrefillHopper {
    /// Most query rows of a tile: two warpgroups of 64.
    pub const ROWS: u32 = 128;
    /// Elements along a head that a box of a [`TensorMap`] takes.
    pub const PANEL: u32 = 64;
    /// Of the warpgroups that multiply.
    const MATH_THREADS: u32 = 256;
    const STAGES: u32 = 2;

    /// The specialisation for these heads; `None` where [`super::prefill_attention`] has to do.
    pub fn new(gpu: &Gpu, cache: KvShape, group: u32) -> Option<Self> {
        let kernel = Self { cache, num_sms: gpu.num_sms };
        let fits = gpu.arch == Arch::SM_90A
            && cache.numbers != KvNumbers::Int4
            && matches!(cache.head_dim, 64 | 96 | 128 | 256)
            && cache.block_size.is_multiple_of(8)
            && kernel.keys().is_multiple_of(cache.block_size)
            && group <= Self::ROWS
            && kernel.dynamic_smem() <= gpu.smem_per_block;
        fits.then_some(kernel)
    }

    /// Tokens of a tile.
    pub const fn tokens(group: u32) -> u32 {
        Self::ROWS / group
    }

    /// Query rows of a tile.
    pub const fn tile(group: u32) -> u32 {
        Self::tokens(group) * group
    }

    /// Positions of a tile of keys: sums of long heads leave fewer registers for scores.
    const fn keys(&self) -> u32 {
        if self.cache.head_dim > 128 { 64 } else { 128 }
    }

    /// Tiles of queries in shared memory.
    const fn query_stages(&self) -> u32 {
        if self.cache.head_dim > 128 { 1 } else { 2 }
    }

    const fn dynamic_smem(&self) -> u32 {
        let row = self.cache.head_dim.next_multiple_of(Self::PANEL) * 2;
        let tiles = self.query_stages() * Self::ROWS + 2 * Self::STAGES * self.keys();
        // Tiles lie at multiples of 1024; strips, items and barriers follow.
        1024 + tiles * row + Self::STAGES * self.strips_bytes() + 256
    }

    /// Bytes of a tile of keys as the cache has it, if that has to be widened.
    const fn strips_bytes(&self) -> u32 {
        let KvShape { numbers, block_size, .. } = self.cache;
        if !numbers.has_scales() {
            return 0;
        }
        let scales = (4 * block_size).next_multiple_of(16);
        self.keys() / block_size * (block_size * self.cache.head_bytes() + scales)
    }

    /// Threads that copy and widen: more of them where registers allow.
    const fn helpers(&self) -> u32 {
        if self.cache.numbers.has_scales() && self.cache.head_dim <= 128 { 256 } else { 128 }
    }
}

impl Kernel for PrefillHopper {
    type Params = PrefillHopperParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source {
                file: "prefill_hopper.cu",
                text: include_str!("../../csrc/prefill_hopper.cu"),
            },
            entry: "prefill_hopper",
            defines: [("KEYS", self.keys()), ("QUERY_STAGES", self.query_stages())]
                .into_iter()
                .chain(self.cache.defines())
                .collect(),
            dynamic_smem: self.dynamic_smem(),
            params_bytes: size_of::<PrefillHopperParams>(),
            // At the start; the warpgroups then divide the registers anew.
            budget: Budget { registers: 168, static_smem: 0 },
        }
    }

    fn launch(&self, params: &PrefillHopperParams) -> Launch {
        let items = params.max_tiles.saturating_mul(params.num_kv_heads);
        Launch::linear(self.num_sms.min(items), self.helpers() + Self::MATH_THREADS)
    }
}
