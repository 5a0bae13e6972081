//! Gated products of many rows on Hopper's tensor cores, bound by what these keep up.

use super::hopper_gemm::{HopperBoxes, HopperGemm};
use crate::{
    Arch, Budget, DevicePtr, Gpu, Kernel, KernelError, KernelSpec, Launch, Source, TensorMap,
};

/// `silu(x * gate^T) * (x * up^T)` in bf16, of numbers of bf16, or of codes of e4m3 with a scale
/// for each row of either.
///
/// Sums of codes are as exact as tensor cores have them, which is some 14 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GatedGemm {
    tile: Tile,
    has_codes: bool,
    stages: u32,
    num_sms: u32,
}

/// Arguments of [`GatedGemm`].
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
#[allow(missing_docs)]
pub struct GatedGemmParams {
    /// Numbers, or pairs of codes, as [`GatedGemm::x_boxes`] says.
    pub x: TensorMap,
    /// As `x`, as [`GatedGemm::weight_boxes`] says.
    pub weight: TensorMap,
    /// As [`GatedGemm::out_boxes`] says, rows of a box one behind the other in shared memory.
    pub out: TensorMap,
    /// Of codes: `[num_rows]`, f32.
    pub x_scales: DevicePtr,
    /// Of codes: `[2 * len]`, f32.
    pub scales: DevicePtr,
    pub num_rows: u32,
    /// Rows of gate and of up each; a multiple of 8.
    pub len: u32,
    /// A multiple of 8.
    pub cols: u32,
    /// Zero.
    pub reserved: u32,
}

/// A product's sides, for [`GatedGemm::new`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GatedShape {
    /// About so many rows of `x`; any number is taken.
    pub num_rows: u32,
    /// Rows of gate and of up each; a multiple of 8.
    pub len: u32,
    /// Whether both are codes.
    pub has_codes: bool,
}

/// What a block computes at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Tile {
    /// Of `x`.
    rows: u32,
    /// Of gate and up together.
    cols: u32,
}

impl GatedGemm {
    /// Fewest rows of `x` that it is for: below, reading the weights takes longer than
    /// multiplying, and [`HopperGemm`] reads them faster.
    pub const MIN_ROWS: u32 = HopperGemm::MAX_ROWS + 1;

    /// The kernel that is best for products of this shape.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] on a GPU other than Hopper, and unless `len` is a multiple of
    /// 8.
    pub fn new(gpu: &Gpu, shape: GatedShape) -> Result<Self, KernelError> {
        let GatedShape { num_rows, len, has_codes } = shape;
        let unsupported = |reason| KernelError::Unsupported { kernel: "gated_gemm", reason };
        if gpu.arch != Arch::SM_90A {
            return Err(unsupported(format!("it is for sm_90a, not {}", gpu.arch.name())));
        }
        if !len.is_multiple_of(8) {
            return Err(unsupported(format!("{len} rows of gate: not a multiple of 8")));
        }
        let cost = |tile: &Tile| tile.cost(gpu.num_sms, num_rows, len);
        let tile = Tile::ALL.into_iter().min_by_key(cost).expect("there are tiles");
        let mut kernel = Self { tile, has_codes, stages: 0, num_sms: gpu.num_sms };
        let stages = (gpu.smem_per_block - kernel.fixed_smem()) / tile.smem_of_stage();
        kernel.stages = stages.min(Self::MAX_STAGES);
        Ok(kernel)
    }

    const MAX_STAGES: u32 = 8;

    /// Shared memory besides the ring: outputs, scales of two tiles and their barriers.
    const fn fixed_smem(&self) -> u32 {
        let scales = if self.has_codes { 2 * 4 * self.tile.cols } else { 0 };
        2 * self.tile.rows * self.tile.out_cols() + scales + 32
    }

    /// Boxes of so many rows of `x`, and bytes of a row.
    pub fn x_boxes(&self, num_rows: usize, row_bytes: usize) -> HopperBoxes {
        HopperBoxes::of_rows(num_rows, row_bytes, self.tile.rows)
    }

    /// Boxes of weights, `len` rows of gate and of up each, of so many bytes: 8 rows of gate and 8
    /// of up in turn.
    pub fn weight_boxes(&self, len: usize, row_bytes: usize) -> HopperBoxes {
        HopperBoxes::of_halves(2 * len, row_bytes, self.tile.cols)
    }

    /// Boxes of so many rows of `len` outputs: a warp's.
    pub fn out_boxes(&self, num_rows: usize, len: usize) -> HopperBoxes {
        HopperBoxes {
            dims: vec![len, num_rows],
            strides: vec![2 * len],
            sides: vec![self.tile.out_cols(), 16],
        }
    }
}

impl Tile {
    /// Those whose sums fit registers: 192 or less of two groups' threads.
    const ALL: [Self; 4] = [
        Self { rows: 256, cols: 192 },
        Self { rows: 256, cols: 176 },
        Self { rows: 128, cols: 224 },
        Self { rows: 128, cols: 176 },
    ];

    const fn out_cols(self) -> u32 {
        self.cols / 2
    }

    /// A stage of the ring and its barriers.
    const fn smem_of_stage(self) -> u32 {
        2 * HopperGemm::BOX_COLS * (self.rows + self.cols) + 16
    }

    const fn num_tiles(self, num_rows: u32, len: u32) -> [u32; 2] {
        [num_rows.div_ceil(self.rows), len.div_ceil(self.out_cols())]
    }

    /// Time, as if of sums: what all blocks take in their turns, and what is copied for it, which
    /// costs power and so time.
    fn cost(self, num_sms: u32, num_rows: u32, len: u32) -> u64 {
        let [row_tiles, col_tiles] = self.num_tiles(num_rows.max(1), len).map(u64::from);
        let turns = (row_tiles * col_tiles).div_ceil(u64::from(num_sms));
        let (rows, cols) = (u64::from(self.rows), u64::from(self.cols));
        turns * (rows * cols + Self::COST_OF_COPIES * (rows + cols))
    }

    /// Sums that cost as much as copying a row of `x` or of the weights does for them. On a hot
    /// H200 8192 rows by tiles of 256 x 128, 160 and 192 go at 655, 682 and 692 TFLOP/s; 1000 rows
    /// take 357 us by 256 x 176, 380 by 128 x 224 and 385 by 128 x 176.
    const COST_OF_COPIES: u64 = 24;

    /// Tiles along `x` that take the same weights at the same time: 2048 rows.
    const fn group(self) -> u32 {
        2048 / self.rows
    }
}

impl Kernel for GatedGemm {
    type Params = GatedGemmParams;

    fn spec(&self) -> KernelSpec {
        let text = include_str!("../../csrc/gated_gemm.cu");
        KernelSpec {
            source: Source { file: "gated_gemm.cu", text },
            entry: "gated_gemm",
            defines: vec![
                ("FP8", u32::from(self.has_codes)),
                ("ROWS", self.tile.rows),
                ("COLS", self.tile.cols),
                ("STAGES", self.stages),
                ("GROUP", self.tile.group()),
            ],
            dynamic_smem: self.stages * self.tile.smem_of_stage() + self.fixed_smem(),
            params_bytes: size_of::<GatedGemmParams>(),
            budget: Budget { registers: 168, static_smem: 0 },
        }
    }

    fn launch(&self, params: &GatedGemmParams) -> Launch {
        let [row_tiles, col_tiles] = self.tile.num_tiles(params.num_rows, params.len);
        let blocks = row_tiles.saturating_mul(col_tiles).min(self.num_sms);
        Launch { grid: [blocks, 1, 1], block: [384, 1, 1] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(num_rows: u32, len: u32) -> GatedGemm {
        GatedGemm::new(&Gpu::H200, GatedShape { num_rows, len, has_codes: false }).unwrap()
    }

    /// The fastest of those tried on an H200, by more than noise.
    #[test]
    fn tiles_of_an_8b_model() {
        for (num_rows, rows, cols) in
            [(80, 128, 224), (128, 128, 224), (256, 128, 224), (512, 128, 224), (1024, 256, 176)]
        {
            assert_eq!(kernel(num_rows, 14336).tile, Tile { rows, cols }, "{num_rows} rows");
        }
        for num_rows in [2048, 4096, 8192, 16384] {
            assert_eq!(kernel(num_rows, 14336).tile.rows, 256, "{num_rows} rows");
        }
    }

    #[test]
    fn rings_fit_shared_memory_and_tiles_cover_everything() {
        for num_rows in [1, 65, 300, 8192] {
            for len in [8, 1024, 9728, 14336] {
                for has_codes in [false, true] {
                    let shape = GatedShape { num_rows, len, has_codes };
                    let kernel = GatedGemm::new(&Gpu::H200, shape).unwrap();
                    assert!(kernel.stages >= 3 && kernel.spec().dynamic_smem <= 232_448);
                    let [row_tiles, col_tiles] = kernel.tile.num_tiles(num_rows, len);
                    assert!(row_tiles * kernel.tile.rows >= num_rows);
                    assert!(col_tiles * kernel.tile.out_cols() >= len);
                }
            }
        }
    }

    #[test]
    fn other_gpus_and_cut_eights_are_refused() {
        let shape = GatedShape { num_rows: 256, len: 14336, has_codes: false };
        assert!(GatedGemm::new(&Gpu::A100, shape).is_err());
        assert!(GatedGemm::new(&Gpu::H200, GatedShape { len: 14340, ..shape }).is_err());
    }
}
