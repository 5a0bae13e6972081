//! Matrix products of few rows on tensor cores, bound by reading the weights.

use crate::{Budget, DevicePtr, Element, Gpu, Kernel, KernelError, KernelSpec, Launch, Source};

/// `out = x * weight^T (+ bias)`, or `out += ...`, for up to as many rows of `x` as it is made for.
///
/// A row's sums have the same order whatever the number of rows is.
///
/// Two blocks, a cluster, share a tile where tiles are fewer than multiprocessors. Larger clusters
/// leave some idle: an H200's multiprocessors come in groups of unequal size, so that of clusters
/// of four only 30 run at once.
///
/// # Source
/// FlashDecoding++ (Hong et al., 2023) pads `x` to 8 rows rather than 64 and keeps several steps of
/// the weights under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlatGemm {
    padded_rows: u32,
    out: Element,
    accumulate: bool,
    stages: u32,
    split: u32,
}

/// What a product computes, for [`FlatGemm::new`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlatShape {
    /// Most rows of `x`, at most [`FlatGemm::MAX_ROWS`].
    pub num_rows: u32,
    /// Rows of the weights.
    pub rows: u32,
    /// Type of the output.
    pub out: Element,
    /// Whether the output is added to.
    pub accumulate: bool,
}

/// How much of a multiprocessor's shared memory a block takes. Which is faster, measuring tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ring {
    /// All: most is under way.
    Whole,
    /// Half: the next kernel's first blocks can begin beside the last of this one.
    Half,
}

/// Arguments of [`FlatGemm`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct FlatGemmParams {
    /// `[num_rows, cols]`, bf16.
    pub x: DevicePtr,
    /// `[rows, cols]`, bf16.
    pub weight: DevicePtr,
    /// `[rows]`, f32; 0 without.
    pub bias: DevicePtr,
    /// `[num_rows, rows]`.
    pub out: DevicePtr,
    pub num_rows: u32,
    /// A multiple of 8.
    pub rows: u32,
    /// A multiple of 8.
    pub cols: u32,
}

impl FlatGemm {
    /// Most rows of `x`: with more, reading `x` again for every tile costs too much.
    pub const MAX_ROWS: u32 = 32;
    const WARPS: u32 = 4;
    /// Rows of the weights that a block takes.
    const TILE_ROWS: u32 = 16 * Self::WARPS;
    const TILE_COLS: u32 = 128;

    /// The kernel for products of this shape.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] unless `num_rows` is 1 to 32.
    pub fn new(gpu: &Gpu, shape: FlatShape, ring: Ring) -> Result<Self, KernelError> {
        let FlatShape { num_rows, rows, out, accumulate } = shape;
        if !(1..=Self::MAX_ROWS).contains(&num_rows) {
            let reason = format!("{num_rows} rows: it takes 1 to {}", Self::MAX_ROWS);
            return Err(KernelError::Unsupported { kernel: "flat_gemm", reason });
        }
        let padded_rows = num_rows.next_power_of_two().max(8);
        let tiles = rows.div_ceil(Self::TILE_ROWS);
        let split = if gpu.arch.is_hopper_or_later() && tiles <= gpu.num_sms { 2 } else { 1 };
        let smem = match ring {
            Ring::Whole => gpu.smem_per_block,
            Ring::Half => gpu.smem_per_sm / 2 - 1024,
        };
        let stages = smem / Self::stage_bytes(padded_rows);
        Ok(Self { padded_rows, out, accumulate, stages, split })
    }

    const fn stage_bytes(padded_rows: u32) -> u32 {
        2 * Self::TILE_COLS * (Self::TILE_ROWS + padded_rows)
    }
}

impl Kernel for FlatGemm {
    type Params = FlatGemmParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source { file: "flat_gemm.cu", text: include_str!("../../csrc/flat_gemm.cu") },
            entry: "flat_gemm",
            defines: vec![
                ("M", self.padded_rows),
                ("WARPS", Self::WARPS),
                ("STAGES", self.stages),
                ("SPLIT", self.split),
                ("OUT_IS_BF16", self.out.is_bf16()),
                ("ACCUMULATE", u32::from(self.accumulate)),
            ],
            dynamic_smem: self.stages * Self::stage_bytes(self.padded_rows),
            params_bytes: size_of::<FlatGemmParams>(),
            // Fewer than two blocks on an SM could have.
            budget: Budget { registers: 168, static_smem: 0 },
        }
    }

    fn launch(&self, params: &FlatGemmParams) -> Launch {
        let tiles = params.rows.div_ceil(Self::TILE_ROWS);
        Launch { grid: [self.split, tiles, 1], block: [32 * Self::WARPS, 1, 1] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(gpu: &Gpu, num_rows: u32, rows: u32, ring: Ring) -> Result<FlatGemm, KernelError> {
        let shape = FlatShape { num_rows, rows, out: Element::F32, accumulate: false };
        FlatGemm::new(gpu, shape, ring)
    }

    #[test]
    fn rows_are_padded_to_a_power_of_two_and_limited() {
        for (num_rows, padded) in [(1, 8), (8, 8), (9, 16), (24, 32), (32, 32)] {
            let kernel = kernel(&Gpu::H200, num_rows, 64, Ring::Half).unwrap();
            assert_eq!(kernel.padded_rows, padded);
        }
        for num_rows in [0, 33] {
            assert!(kernel(&Gpu::H200, num_rows, 64, Ring::Half).is_err());
        }
    }

    #[test]
    fn one_whole_ring_or_two_halves_fit_a_multiprocessor() {
        for gpu in [Gpu::H200, Gpu::A100, Gpu::RTX_3090] {
            for (ring, blocks_per_sm) in [(Ring::Whole, 1), (Ring::Half, 2)] {
                for num_rows in [8, 16, 32] {
                    let kernel = kernel(&gpu, num_rows, 4096, ring).unwrap();
                    let smem = kernel.spec().dynamic_smem;
                    assert!(kernel.stages >= 2 && smem <= gpu.smem_per_block);
                    assert_eq!(gpu.blocks_per_sm(smem), blocks_per_sm, "{gpu:?} {ring:?}");
                }
            }
        }
    }

    #[test]
    fn few_tiles_are_shared_by_two_blocks_where_blocks_form_clusters() {
        for (gpu, rows, split) in [
            (Gpu::H200, 4096, 2),
            (Gpu::H200, 6144, 2),
            (Gpu::H200, 28672, 1),
            (Gpu::A100, 4096, 1),
        ] {
            assert_eq!(kernel(&gpu, 32, rows, Ring::Half).unwrap().split, split);
        }
    }
}
