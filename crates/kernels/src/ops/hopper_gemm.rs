//! Matrix products of few rows on Hopper's tensor cores, bound by reading the weights.

use super::fp8_split::{Fp8Split, SplitRows};
use crate::{
    Arch, Budget, DevicePtr, Gpu, Kernel, KernelError, KernelSpec, Launch, Source, TensorMap,
};

/// `x * weight^T` for up to as many rows of `x` as it is made for, as [`HopperOp`] says.
///
/// With weights in bf16 a row's sums have the same order whatever the number of rows is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HopperGemm {
    padded_rows: u32,
    op: HopperOp,
    weights: HopperWeights,
    tiling: Tiling,
    stages: u32,
    /// Blocks of a launch, where they take tiles in turn.
    num_sms: u32,
    leaves_codes: bool,
}

/// What the weights are stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HopperWeights {
    /// Numbers.
    Bf16,
    /// Codes of e4m3, columns at [`fp8_place`](super::fp8_quantize::fp8_place), and a scale for
    /// each row.
    Fp8,
    /// Codes and a scale for each 128 columns of a row.
    Fp8Blocks,
}

/// What becomes of the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HopperOp {
    /// `silu(a) * b` of the first half of the rows of the weights and the second, in bf16.
    Silu,
    /// They are written as [`HopperGemm::num_parts`] parts, in f32: what runs next adds them up,
    /// as [`AddNorm`](super::add_norm::AddNorm) does.
    Parts,
    /// They are written, in f32. Of weights in fp8.
    Sums,
}

/// A product's sides, for [`HopperGemm::new`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HopperShape {
    /// Most rows of `x`, at most [`HopperGemm::MAX_ROWS`].
    pub num_rows: u32,
    /// Rows of the weights, of both halves together; a multiple of 8, with SiLU of 16.
    pub rows: u32,
    /// A multiple of 8.
    pub cols: u32,
    /// What the weights are stored as.
    pub weights: HopperWeights,
}

/// Arguments of [`HopperGemm`].
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
#[allow(missing_docs)]
pub struct HopperGemmParams {
    /// Of `[rows, cols]`, bf16 or pairs of codes, as [`HopperGemm::weight_boxes`] says.
    pub weight: TensorMap,
    /// Of `[num_rows, cols]`, bf16, in boxes of [`HopperGemm::x_box_rows`]; for codes of
    /// `[2, num_rows, cols]`, pairs as [`Fp8Split`] makes them, in boxes of both.
    pub x: TensorMap,
    /// `[rows]`, f32; 0 without. Only of [`HopperOp::Silu`].
    pub bias: DevicePtr,
    /// Of codes: `[rows]`, or `[ceil(cols / 128), rows]`, f32.
    pub scales: DevicePtr,
    /// For codes: `[ceil(cols / 128), x_box_rows]`, f32, as `Fp8Split` makes them.
    pub x_scales: DevicePtr,
    /// `[num_rows, rows / 2]`, bf16, or `[num_parts, num_rows, rows]`, f32.
    pub out: DevicePtr,
    /// `out` as codes, where [`HopperGemm::leaves_codes`].
    pub split: SplitRows,
    pub num_rows: u32,
    pub rows: u32,
    pub cols: u32,
    /// Zero.
    pub reserved: u32,
}

/// A tensor of elements of two bytes, the fastest dimension first, and boxes of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HopperBoxes {
    /// Elements along each dimension.
    pub dims: Vec<usize>,
    /// Bytes from one element to the next, of all dimensions but the first.
    pub strides: Vec<usize>,
    /// Elements of a box along each dimension.
    pub sides: Vec<u32>,
}

impl HopperBoxes {
    /// Of `[rows, row_bytes]`, boxes of so many rows and of [`HopperGemm::BOX_COLS`].
    pub fn of_rows(rows: usize, row_bytes: usize, box_rows: u32) -> Self {
        Self {
            dims: vec![row_bytes / 2, rows],
            strides: vec![row_bytes],
            sides: vec![HopperGemm::BOX_COLS, box_rows],
        }
    }

    /// As above, but boxes have 8 rows of the first half and 8 of the second in turn.
    pub fn of_halves(rows: usize, row_bytes: usize, box_rows: u32) -> Self {
        Self {
            dims: vec![row_bytes / 2, 8, 2, rows / 16],
            strides: vec![row_bytes, rows / 2 * row_bytes, 8 * row_bytes],
            sides: vec![HopperGemm::BOX_COLS, 8, 2, box_rows / 16],
        }
    }
}

/// How the weights are divided among blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Tiling {
    /// Rows of the weights that a block takes.
    tile_rows: u32,
    /// Blocks that share the columns of a tile.
    num_parts: u32,
}

impl HopperGemm {
    /// Most rows of `x`: beyond, reading `x` again for every tile costs too much.
    pub const MAX_ROWS: u32 = 64;
    /// Columns of a box of `x`, and of the weights or pairs of codes: 128 bytes.
    pub const BOX_COLS: u32 = 64;
    /// Most parts of [`HopperOp::Parts`].
    pub const MAX_PARTS: u32 = 8;

    /// The kernel for products of this shape.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] on a GPU other than Hopper, unless `num_rows` is 1 to 64, with
    /// scales of blocks 32, for SiLU of rows that are no multiple of 16, and for sums of weights in
    /// bf16.
    pub fn new(gpu: &Gpu, shape: HopperShape, op: HopperOp) -> Result<Self, KernelError> {
        let unsupported = |reason| KernelError::Unsupported { kernel: "hopper_gemm", reason };
        if gpu.arch != Arch::SM_90A {
            return Err(unsupported(format!("it is for sm_90a, not {}", gpu.arch.name())));
        }
        let most = shape.weights.max_rows();
        if !(1..=most).contains(&shape.num_rows) {
            let reason = format!("{} rows: it takes 1 to {most}", shape.num_rows);
            return Err(unsupported(reason));
        }
        if op == HopperOp::Silu && !shape.rows.is_multiple_of(16) {
            return Err(unsupported(format!("halves of {} rows: not of whole 8", shape.rows)));
        }
        if op == HopperOp::Sums && shape.weights == HopperWeights::Bf16 {
            return Err(unsupported("sums of weights in bf16".to_owned()));
        }
        let padded_rows = Self::padded_rows(shape.num_rows);
        let (tiling, weights) = (Tiling::best(gpu, shape, op), shape.weights);
        let leaves_codes = op == HopperOp::Silu
            && weights != HopperWeights::Bf16
            && tiling.out_rows(op) == Fp8Split::COLS
            && shape.rows.is_multiple_of(2 * Fp8Split::COLS);
        let num_sms = gpu.num_sms;
        let mut kernel =
            Self { padded_rows, op, weights, tiling, stages: 0, num_sms, leaves_codes };
        let room = gpu.smem_per_block - kernel.fixed_smem();
        kernel.stages = (room / kernel.smem_of_stage()).min(Self::MAX_STAGES);
        Ok(kernel)
    }

    /// Boxes of weights of so many rows and bytes of a row: tiles. Of SiLU 8 rows of one half and 8
    /// of the other in turn.
    pub fn weight_boxes(&self, rows: usize, row_bytes: usize) -> HopperBoxes {
        let tile_rows = self.tiling.tile_rows;
        match self.op {
            HopperOp::Parts | HopperOp::Sums => HopperBoxes::of_rows(rows, row_bytes, tile_rows),
            HopperOp::Silu => HopperBoxes::of_halves(rows, row_bytes, tile_rows),
        }
    }

    /// What so many rows of `x` are padded to.
    pub const fn padded_rows(num_rows: u32) -> u32 {
        let padded = num_rows.next_power_of_two();
        if padded < 8 { 8 } else { padded }
    }

    /// Rows of a box of `x`.
    pub const fn x_box_rows(&self) -> u32 {
        self.padded_rows
    }

    /// Whether the output is also left as codes, as [`Fp8Split`] makes them.
    pub const fn leaves_codes(&self) -> bool {
        self.leaves_codes
    }

    /// Parts of the sums.
    pub const fn num_parts(&self) -> u32 {
        self.tiling.num_parts
    }

    const MAX_STAGES: u32 = 12;

    const fn stage_bytes(&self) -> u32 {
        let panels = self.weights.tile_cols() / Self::BOX_COLS;
        2 * Self::BOX_COLS * (self.tiling.tile_rows + panels * self.padded_rows)
    }

    /// A stage of the ring, its barriers and, with codes, the scales of `x`.
    const fn smem_of_stage(&self) -> u32 {
        let scales = match self.weights {
            HopperWeights::Bf16 => 0,
            HopperWeights::Fp8 | HopperWeights::Fp8Blocks => 4 * self.padded_rows,
        };
        self.stage_bytes() + 24 + scales
    }

    /// Shared memory besides the ring: what is on its way out.
    fn fixed_smem(&self) -> u32 {
        let tile_rows = self.tiling.tile_rows;
        let out = match self.op {
            HopperOp::Silu => self.padded_rows * ((tile_rows / 16) | 1) * 16,
            HopperOp::Parts | HopperOp::Sums => 4 * self.padded_rows.min(16) * (tile_rows + 4),
        };
        let rows_beyond = self.tiling.groups() * Tiling::GROUP_ROWS - tile_rows;
        out.max(rows_beyond * 2 * Self::BOX_COLS)
    }
}

impl HopperShape {
    /// Whether making numbers of codes takes long beside all else: the more warps share a
    /// multiprocessor, the better.
    const fn has_codes_and_few_rows(&self) -> bool {
        !matches!(self.weights, HopperWeights::Bf16) && self.num_rows <= 8
    }
}

impl HopperWeights {
    /// Most rows of `x`. With scales of blocks, a stage's sums stand beside all.
    const fn max_rows(self) -> u32 {
        match self {
            Self::Bf16 | Self::Fp8 => HopperGemm::MAX_ROWS,
            Self::Fp8Blocks => HopperGemm::MAX_ROWS / 2,
        }
    }

    /// Columns of a stage.
    const fn tile_cols(self) -> u32 {
        match self {
            Self::Bf16 => 64,
            Self::Fp8 | Self::Fp8Blocks => 128,
        }
    }
}

impl Tiling {
    /// The one that promises most: few multiprocessors idle, few parts, large tiles. With weights
    /// in bf16 it does not depend on the rows of `x`, so that sums do not either.
    fn best(gpu: &Gpu, shape: HopperShape, op: HopperOp) -> Self {
        if let Some(tiling) = Self::of_codes(gpu, shape, op) {
            return tiling;
        }
        let blocks_of_columns = shape.cols.div_ceil(shape.weights.tile_cols());
        let tiles: &[u32] = match op {
            HopperOp::Silu => &[256, 224, 192, 128, 112, 96],
            HopperOp::Sums => &[256, 224, 192],
            HopperOp::Parts if shape.has_codes_and_few_rows() => {
                &[256, 224, 192, 168, 144, 128, 112, 96]
            }
            HopperOp::Parts => &[192, 168, 144, 128, 112, 96],
        };
        let most_parts = if op == HopperOp::Parts { HopperGemm::MAX_PARTS } else { 1 };
        let parts = 1..=most_parts.min(blocks_of_columns.max(1));
        let all = tiles.iter().flat_map(|tile_rows| {
            parts.clone().map(|num_parts| Self { tile_rows: *tile_rows, num_parts })
        });
        all.max_by_key(|tiling| tiling.promise(gpu, shape, op)).expect("some are tried")
    }

    /// Tiles whose output can be left as codes: that saves a kernel behind, which takes longer than
    /// some idle multiprocessors cost, since the others read nearly as fast as all.
    fn of_codes(gpu: &Gpu, shape: HopperShape, op: HopperOp) -> Option<Self> {
        let tiling = Self { tile_rows: 2 * Fp8Split::COLS, num_parts: 1 };
        let blocks = shape.rows / (2 * Fp8Split::COLS);
        let is_one_wave = (gpu.num_sms * 2 / 3..=gpu.num_sms).contains(&blocks);
        let has_codes = op == HopperOp::Silu && shape.weights != HopperWeights::Bf16;
        (has_codes && is_one_wave && shape.rows.is_multiple_of(2 * Fp8Split::COLS))
            .then_some(tiling)
    }

    /// Per mille of all multiprocessors' time that goes into rows that exist, less what was seen to
    /// be lost on an H200 with many parts (a percent each) and with small tiles, for each of which
    /// `x` is read again.
    fn promise(&self, gpu: &Gpu, shape: HopperShape, op: HopperOp) -> i64 {
        let blocks = self.num_tiles(shape.rows, op) * self.num_parts;
        let turns = blocks.div_ceil(gpu.num_sms) * gpu.num_sms;
        let taken = i64::from(turns) * i64::from(self.tile_rows);
        let used = 1000 * i64::from(shape.rows) * i64::from(self.num_parts) / taken.max(1);
        let lost_with_tiles = match shape.weights {
            HopperWeights::Bf16 => 6000,
            _ if shape.has_codes_and_few_rows() => 20_000,
            HopperWeights::Fp8 | HopperWeights::Fp8Blocks => 7000,
        };
        used - 10 * i64::from(self.num_parts) - lost_with_tiles / i64::from(self.tile_rows)
    }

    /// Rows that tensor cores take at once.
    const GROUP_ROWS: u32 = 64;

    /// Groups of four warps in a block.
    const fn groups(&self) -> u32 {
        self.tile_rows.div_ceil(Self::GROUP_ROWS)
    }

    const fn out_rows(&self, op: HopperOp) -> u32 {
        match op {
            HopperOp::Silu => self.tile_rows / 2,
            HopperOp::Parts | HopperOp::Sums => self.tile_rows,
        }
    }

    fn num_tiles(&self, rows: u32, op: HopperOp) -> u32 {
        let out_rows = if op == HopperOp::Silu { rows / 2 } else { rows };
        out_rows.div_ceil(self.out_rows(op))
    }
}

impl Kernel for HopperGemm {
    type Params = HopperGemmParams;

    fn spec(&self) -> KernelSpec {
        let text = include_str!("../../csrc/hopper_gemm.cu");
        KernelSpec {
            source: Source { file: "hopper_gemm.cu", text },
            entry: "hopper_gemm",
            defines: vec![
                ("M", self.padded_rows),
                ("TILE_ROWS", self.tiling.tile_rows),
                ("STAGES", self.stages),
                ("SILU", u32::from(self.op == HopperOp::Silu)),
                ("TILES", u32::from(self.op == HopperOp::Sums)),
                ("FP8", u32::from(self.weights != HopperWeights::Bf16)),
                ("BLOCKS", u32::from(self.weights == HopperWeights::Fp8Blocks)),
                ("SPLIT", u32::from(self.leaves_codes)),
            ],
            dynamic_smem: self.stages * self.smem_of_stage() + self.fixed_smem(),
            params_bytes: size_of::<HopperGemmParams>(),
            budget: Budget { registers: 120, static_smem: 0 },
        }
    }

    fn launch(&self, params: &HopperGemmParams) -> Launch {
        let mut tiles = self.tiling.num_tiles(params.rows, self.op);
        if self.op == HopperOp::Sums {
            tiles = tiles.min(self.num_sms);
        }
        let threads = 128 * self.tiling.groups() + 32;
        Launch { grid: [tiles, self.tiling.num_parts, 1], block: [threads, 1, 1] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(num_rows: u32, rows: u32, cols: u32, op: HopperOp) -> HopperGemm {
        kernel_of(HopperWeights::Bf16, num_rows, rows, cols, op)
    }

    fn kernel_of(
        weights: HopperWeights,
        num_rows: u32,
        rows: u32,
        cols: u32,
        op: HopperOp,
    ) -> HopperGemm {
        HopperGemm::new(&Gpu::H200, HopperShape { num_rows, rows, cols, weights }, op).unwrap()
    }

    #[test]
    fn the_matrices_of_an_8b_model_take_nearly_all_multiprocessors_once() {
        for (rows, cols, op, tile_rows, num_parts) in [
            (6144, 4096, HopperOp::Parts, 144, 3),
            (4096, 4096, HopperOp::Parts, 128, 4),
            (4096, 14336, HopperOp::Parts, 128, 4),
            (28672, 4096, HopperOp::Silu, 224, 1),
        ] {
            let kernel = kernel(32, rows, cols, op);
            assert_eq!(kernel.tiling, Tiling { tile_rows, num_parts });
            assert!((128..=132).contains(&(kernel.tiling.num_tiles(rows, op) * num_parts)));
        }
    }

    /// The fastest of those tried on an H200.
    #[test]
    fn codes_of_few_rows_are_shared_by_more_warps() {
        for (num_rows, rows, cols, tile_rows, num_parts) in [
            (1, 6144, 4096, 192, 4),
            (1, 4096, 4096, 256, 8),
            (8, 4096, 14336, 256, 8),
            (32, 6144, 4096, 192, 4),
            (32, 4096, 4096, 128, 4),
            (32, 4096, 14336, 128, 4),
        ] {
            let kernel = kernel_of(HopperWeights::Fp8, num_rows, rows, cols, HopperOp::Parts);
            assert_eq!(kernel.tiling, Tiling { tile_rows, num_parts });
        }
    }

    #[test]
    fn what_becomes_codes_is_in_tiles_of_what_shares_a_scale() {
        for rows in [28672, 24576] {
            let kernel = kernel_of(HopperWeights::Fp8, 32, rows, 4096, HopperOp::Silu);
            assert_eq!(kernel.tiling, Tiling { tile_rows: 256, num_parts: 1 });
            assert!(kernel.leaves_codes());
        }
        // More such tiles than multiprocessors, or a last one that is cut: codes come later.
        for rows in [37888, 28608] {
            assert!(!kernel_of(HopperWeights::Fp8, 32, rows, 4096, HopperOp::Silu).leaves_codes());
        }
        let kernel = kernel_of(HopperWeights::Bf16, 32, 28672, 4096, HopperOp::Silu);
        assert!(!kernel.leaves_codes());
    }

    /// The first box has rows 0 to 7 of both halves, then rows 8 to 15 of both, and so on.
    #[test]
    fn boxes_of_halves_take_8_rows_of_each_in_turn() {
        let kernel = kernel(8, 28672, 4096, HopperOp::Silu);
        let HopperBoxes { dims, strides, sides } = kernel.weight_boxes(28672, 8192);
        assert_eq!(dims, [4096, 8, 2, 1792]);
        assert_eq!(strides, [8192, 14336 * 8192, 8 * 8192]);
        assert_eq!(sides, [64, 8, 2, 14]);
    }

    #[test]
    fn tiles_cover_all_rows_and_fit_shared_memory() {
        for num_rows in [1, 8, 9, 33, 64] {
            for rows in [16, 80, 640, 1008, 5120, 22016, 49152] {
                for (cols, op) in [(72, HopperOp::Parts), (4096, HopperOp::Silu)] {
                    let kernel = kernel(num_rows, rows, cols, op);
                    let tiles = kernel.tiling.num_tiles(rows, op);
                    assert!(tiles * kernel.tiling.tile_rows >= rows);
                    assert!(kernel.tiling.tile_rows <= 256 && kernel.stages >= 2);
                    assert!(kernel.spec().dynamic_smem <= Gpu::H200.smem_per_block);
                    assert!(kernel.num_parts() <= cols.div_ceil(64));
                }
            }
        }
    }

    #[test]
    fn other_gpus_and_too_many_rows_are_refused() {
        let shape = |num_rows| HopperShape {
            num_rows,
            rows: 4096,
            cols: 4096,
            weights: HopperWeights::Fp8,
        };
        for (gpu, num_rows) in [(Gpu::A100, 8), (Gpu::H200, 0), (Gpu::H200, 65)] {
            assert!(HopperGemm::new(&gpu, shape(num_rows), HopperOp::Parts).is_err());
        }
        let halves_of_4 = HopperShape { rows: 8, ..shape(8) };
        assert!(HopperGemm::new(&Gpu::H200, halves_of_4, HopperOp::Silu).is_err());
    }
}
