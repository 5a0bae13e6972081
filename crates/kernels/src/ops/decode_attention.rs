//! Attention of rows with one new token over their paged context.
//!
//! Every warp streams its own 16 positions of a tile through its own ring in shared memory, scores
//! them for the eight heads of a group at once (keys as the left operand of the tensor cores), and
//! keeps a running softmax. Warps meet only at the end of a piece.

use super::plan_attention::{GROUP_HEADS, MIN_UNITS, TILE_LEN, head_groups};
use crate::{Budget, DevicePtr, Gpu, Kernel, KernelError, KernelSpec, Launch, Source};

/// A specialisation of the decode kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeAttention {
    head_dim: u32,
    block_size: u32,
    warps: u32,
    /// Tiles in a warp's ring.
    stages: u32,
    num_ctas: u32,
}

/// Arguments of [`DecodeAttention`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct DecodeAttentionParams {
    /// `[num_tokens, qkv_len]`, bf16.
    pub qkv: DevicePtr,
    /// `[num_blocks, num_kv_heads, block_size, head_dim]`, bf16.
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

impl DecodeAttention {
    /// The specialisation that suits this GPU.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] if `head_dim` is not a multiple of 16 up to 256.
    pub fn new(gpu: &Gpu, head_dim: u32, block_size: u32) -> Result<Self, KernelError> {
        if !head_dim.is_multiple_of(16) || !(16..=256).contains(&head_dim) || block_size == 0 {
            let reason = format!(
                "heads of {head_dim} elements in blocks of {block_size} tokens: \
                 heads must be multiples of 16 up to 256"
            );
            return Err(KernelError::Unsupported { kernel: "decode_attention", reason });
        }
        let shape = |warps, stages| Self { head_dim, block_size, warps, stages, num_ctas: 0 };
        // Two blocks on an SM, so that one loads while the other adds up; else what fits.
        let fits = |shape: &Self, blocks: u32| {
            let smem = shape.dynamic_smem();
            smem <= gpu.smem_per_block && gpu.blocks_per_sm(smem) >= blocks
        };
        let choices = [(4, 2), (2, 2), (4, 1), (2, 1)];
        let found = choices.iter().find_map(|(warps, blocks)| {
            let stages = (2..=Self::MAX_STAGES).rev();
            stages.map(|stages| shape(*warps, stages)).find(|shape| fits(shape, *blocks))
        });
        let mut found = found.ok_or_else(|| KernelError::Unsupported {
            kernel: "decode_attention",
            reason: format!("heads of {head_dim} elements need more shared memory"),
        })?;
        let resident = gpu.blocks_per_sm(found.dynamic_smem()).min(2);
        found.num_ctas = gpu.num_sms * resident;
        Ok(found)
    }

    const MAX_STAGES: u32 = 6;

    /// Blocks of every launch.
    pub const fn num_ctas(&self) -> u32 {
        self.num_ctas
    }

    /// Floats of `partials`: two slots a block, of sums, maxima and denominators.
    pub const fn partial_floats(&self) -> usize {
        2 * self.num_ctas as usize * (GROUP_HEADS * (self.head_dim + 2)) as usize
    }

    /// Words of `arrivals`.
    pub const fn arrival_words(max_rows: u32, num_heads: u32, num_kv_heads: u32) -> usize {
        max_rows as usize * head_groups(num_heads, num_kv_heads) as usize
    }

    const fn dynamic_smem(&self) -> u32 {
        // Rows are 16 bytes longer than a head, so that eight of them fall into different banks.
        let ring = self.warps * self.stages * 2 * 16 * (2 * self.head_dim + 16);
        // Half of the warps leave their sums for the other half; every warp its softmax.
        let sums = self.warps / 2 * GROUP_HEADS * self.head_dim * 4;
        ring + sums + self.warps * GROUP_HEADS * 2 * 4
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
            defines: vec![
                ("HEAD_DIM", self.head_dim),
                ("BLOCK_SIZE", self.block_size),
                ("WARPS", self.warps),
                ("STAGES", self.stages),
                ("TILE_LEN", TILE_LEN),
                ("MIN_UNITS", MIN_UNITS),
            ],
            dynamic_smem: self.dynamic_smem(),
            params_bytes: size_of::<DecodeAttentionParams>(),
            budget: Budget { registers: 232, static_smem: 64 },
        }
    }

    fn launch(&self, _: &DecodeAttentionParams) -> Launch {
        Launch::linear(self.num_ctas, 32 * self.warps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specialisations_fit_their_gpu() {
        for gpu in [Gpu::H200, Gpu::A100, Gpu::RTX_3090] {
            for head_dim in (16..=256).step_by(16) {
                let kernel = DecodeAttention::new(&gpu, head_dim, 16).unwrap();
                let resident = kernel.num_ctas / gpu.num_sms;
                assert!(resident * (kernel.dynamic_smem() + 1024) <= gpu.smem_per_sm);
                assert!(kernel.dynamic_smem() <= gpu.smem_per_block);
            }
        }
        let kernel = DecodeAttention::new(&Gpu::H200, 128, 16).unwrap();
        assert_eq!((kernel.warps, kernel.stages, kernel.num_ctas), (4, 3, 264));
    }

    #[test]
    fn odd_heads_are_refused() {
        for head_dim in [0, 8, 100, 272] {
            let error = DecodeAttention::new(&Gpu::H200, head_dim, 16).unwrap_err().to_string();
            assert!(error.contains(&head_dim.to_string()), "{error}");
        }
    }
}
