//! Attention of rows with one new token over their paged context.
//!
//! Every warp streams its own positions of a tile through its own ring in shared memory, scores
//! them for the eight heads of a group at once (keys as the left operand of the tensor cores), and
//! keeps its part of the softmax. Warps meet only at the end of a piece.

use super::{
    fp8_split::{Fp8Split, SplitRows},
    plan_attention::{GROUP_HEADS, TILE_LEN, head_groups},
};
use crate::{
    Budget, DevicePtr, Gpu, Kernel, KernelError, KernelSpec, KvNumbers, KvShape, Launch, Source,
};

/// A specialisation of the decode kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeAttention {
    cache: KvShape,
    softmax: Softmax,
    warps: u32,
    /// Positions of a warp's turn.
    subtile: u32,
    /// Turns in a warp's ring.
    stages: u32,
    num_ctas: u32,
    leaves_codes: bool,
    behind_prefixes: bool,
}

/// What the weights of a softmax are relative to while its scores are still coming.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Softmax {
    /// The greatest score so far.
    Online,
    /// A number that is fixed for each head; where that was too far off, the row is computed again.
    Unified,
}

/// Arguments of [`DecodeAttention`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct DecodeAttentionParams {
    /// `[num_tokens, qkv_len]`, bf16.
    pub qkv: DevicePtr,
    /// Strips as in `csrc/kv_cache.cuh`.
    pub keys: DevicePtr,
    /// As `keys`.
    pub values: DevicePtr,
    /// `[num_tokens, num_heads * head_dim]`, bf16. Decode rows are written; those without context
    /// get zeros.
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
    /// [`DecodeAttention::partial_floats`] of f32: sums of pieces.
    pub partials: DevicePtr,
    /// `[max_rows * head_groups]` words, zero before the first launch and after every one.
    pub arrivals: DevicePtr,
    /// `[num_heads]`, f32, of this layer: what weights are relative to if the softmax is unified,
    /// as powers of 2. Null: 1.
    pub unified: DevicePtr,
    /// A word that counts rows and head groups that were computed again.
    pub recomputed: DevicePtr,
    /// Where `out` is also left as codes; null, or of a kernel that can do so.
    pub split: SplitRows,
    /// In the plan, as are the next; used behind prefixes alone, as are the next three.
    pub prefix_spans: DevicePtr,
    pub row_prefixes: DevicePtr,
    /// What [`super::prefix_attention::PrefixAttention`] left.
    pub prefix_parts: DevicePtr,
    /// Its query rows of a tile.
    pub prefix_tile: u32,
    /// Zero.
    pub reserved: u32,
    pub num_rows: u32,
    /// Of the plan's layout.
    pub max_rows: u32,
    pub num_heads: u32,
    pub num_kv_heads: u32,
    /// As in the plan.
    pub window: u32,
    /// Multiplies scores before the softmax.
    pub scale: f32,
}

/// Warps of a block, blocks on a multiprocessor and most stages of a ring, the best first: two
/// blocks, so that one loads while the other adds up; else what fits.
const CHOICES: [(u32, u32, u32); 6] =
    [(6, 2, 3), (4, 2, 6), (3, 2, 6), (2, 2, 6), (4, 1, 6), (2, 1, 6)];

impl DecodeAttention {
    /// The specialisation that suits this GPU.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] if tensor cores cannot take such heads.
    pub fn new(gpu: &Gpu, cache: KvShape, softmax: Softmax) -> Result<Self, KernelError> {
        const NAME: &str = "decode_attention";
        cache.check(NAME)?;
        let subtile = 16;
        let shape = |warps, stages| Self {
            cache,
            softmax,
            warps,
            subtile,
            stages,
            num_ctas: 0,
            leaves_codes: false,
            behind_prefixes: false,
        };
        // More warps only where widening numbers keeps them busy.
        let choices = if cache.numbers.has_scales() { &CHOICES[..] } else { &CHOICES[1..] };
        let found = choices.iter().find_map(|(warps, blocks, most_stages)| {
            let mut shapes = (2..=*most_stages).rev().map(|stages| shape(*warps, stages));
            shapes.find(|shape| {
                let smem = shape.dynamic_smem();
                smem <= gpu.smem_per_block && gpu.blocks_per_sm(smem) >= *blocks
            })
        });
        let mut found = found.ok_or_else(|| KernelError::Unsupported {
            kernel: NAME,
            reason: format!("heads of {} elements need more shared memory", cache.head_dim),
        })?;
        let resident = gpu.blocks_per_sm(found.dynamic_smem()).min(2);
        found.num_ctas = gpu.num_sms * resident;
        Ok(found)
    }

    /// The same, but that it can leave its output as codes, as [`Fp8Split`] makes them; `None` if
    /// the dims of a head are not what shares a scale, or registers are too few.
    pub fn leaving_codes(self) -> Option<Self> {
        let is_full = self.cache.numbers == KvNumbers::Int4 && self.softmax == Softmax::Unified;
        let shares_scales = self.cache.head_dim == Fp8Split::COLS;
        (shares_scales && !is_full).then_some(Self { leaves_codes: true, ..self })
    }

    /// The same, but for steps whose rows may share prefixes, which [`super::prefix_attention`] has
    /// seen to by then. Its softmax is online, since the parts of prefixes are.
    pub fn behind_prefixes(self) -> Self {
        Self { behind_prefixes: true, leaves_codes: false, softmax: Softmax::Online, ..self }
    }

    /// Whether it can leave its output as codes.
    pub const fn leaves_codes(&self) -> bool {
        self.leaves_codes
    }

    /// What it reads.
    pub const fn cache(&self) -> KvShape {
        self.cache
    }

    /// Blocks of every launch.
    pub const fn num_ctas(&self) -> u32 {
        self.num_ctas
    }

    /// Floats of `partials`: two slots a block, of sums, maxima and denominators.
    pub const fn partial_floats(&self) -> usize {
        2 * self.num_ctas as usize * (GROUP_HEADS * (self.cache.head_dim + 2)) as usize
    }

    /// Words of `arrivals`.
    pub const fn arrival_words(max_rows: u32, num_heads: u32, num_kv_heads: u32) -> usize {
        max_rows as usize * head_groups(num_heads, num_kv_heads) as usize
    }

    const fn dynamic_smem(&self) -> u32 {
        // Rows are 16 bytes longer than a head, so that eight of them fall into different banks,
        // where chunks of 16 bytes are not put in another order for that.
        let padding = if self.cache.head_bytes().is_multiple_of(128) { 0 } else { 16 };
        let scales = 2 * self.subtile * self.cache.scale_bytes();
        let stage = 2 * self.subtile * (self.cache.head_bytes() + padding) + scales;
        let ring = self.warps * self.stages * stage;
        // Every warp leaves its sums and its softmax; rows of sums are four longer than a head.
        ring + self.warps * GROUP_HEADS * (self.cache.head_dim + 4 + 2) * 4
    }
}

impl Kernel for DecodeAttention {
    type Params = DecodeAttentionParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source {
                file: "decode_attention.cu",
                text: include_str!("../../csrc/decode_attention.cu"),
            },
            entry: "decode_attention",
            defines: [
                ("UNIFIED", u32::from(self.softmax == Softmax::Unified)),
                ("WARPS", self.warps),
                ("SUBTILE", self.subtile),
                ("STAGES", self.stages),
                ("TILE_LEN", TILE_LEN),
                ("SPLIT", u32::from(self.leaves_codes)),
                ("CASCADE", u32::from(self.behind_prefixes)),
            ]
            .into_iter()
            .chain(self.cache.defines())
            .collect(),
            dynamic_smem: self.dynamic_smem(),
            params_bytes: size_of::<DecodeAttentionParams>(),
            budget: Budget { registers: 248, static_smem: 128 },
        }
    }

    fn launch(&self, _: &DecodeAttentionParams) -> Launch {
        Launch::linear(self.num_ctas, 32 * self.warps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::KvNumbers;

    fn cache(numbers: KvNumbers, head_dim: u32) -> KvShape {
        KvShape { numbers, head_dim, block_size: 16 }
    }

    #[test]
    fn specialisations_fit_their_gpu() {
        for gpu in [Gpu::H200, Gpu::A100, Gpu::RTX_3090] {
            for head_dim in (16..=256).step_by(16) {
                let cache = cache(KvNumbers::Bf16, head_dim);
                let kernel = DecodeAttention::new(&gpu, cache, Softmax::Online).unwrap();
                let resident = kernel.num_ctas / gpu.num_sms;
                assert!(resident * (kernel.dynamic_smem() + 1024) <= gpu.smem_per_sm);
                assert!(kernel.dynamic_smem() <= gpu.smem_per_block);
            }
        }
        let kernel =
            DecodeAttention::new(&Gpu::H200, cache(KvNumbers::Bf16, 128), Softmax::Unified)
                .unwrap();
        assert_eq!((kernel.warps, kernel.stages, kernel.num_ctas), (4, 3, 264));
        let kernel = DecodeAttention::new(&Gpu::H200, cache(KvNumbers::Fp8, 128), Softmax::Online);
        let kernel = kernel.unwrap();
        assert_eq!((kernel.warps, kernel.stages, kernel.num_ctas), (6, 3, 264));
        // 100 KB a multiprocessor: four warps would take 768 bytes more than half of it.
        let kernel =
            DecodeAttention::new(&Gpu::RTX_3090, cache(KvNumbers::Fp8, 128), Softmax::Online);
        let kernel = kernel.unwrap();
        assert_eq!((kernel.warps, kernel.stages, kernel.num_ctas), (3, 2, 164));
    }

    #[test]
    fn odd_heads_are_refused() {
        for (numbers, head_dim) in [
            (KvNumbers::Bf16, 0),
            (KvNumbers::Bf16, 8),
            (KvNumbers::Bf16, 100),
            (KvNumbers::Bf16, 272),
            (KvNumbers::Int8, 80),
        ] {
            let cache = cache(numbers, head_dim);
            let error = DecodeAttention::new(&Gpu::H200, cache, Softmax::Online).unwrap_err();
            assert!(error.to_string().contains(&head_dim.to_string()), "{error}");
        }
    }
}
