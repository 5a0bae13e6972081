//! Matrix products of very few rows with weights in fp8, bound by reading them.

use crate::{Budget, DevicePtr, Element, Kernel, KernelSpec, Launch, Source};

/// `out = x * weight^T * scale (+ bias)`, or `out += ...`, for up to 8 rows of `x`.
///
/// A row's sums have the same order whatever the number of rows is.
///
/// # Source
/// Codes into registers straight from memory as in Marlin (Frantar et al., 2024); tensor cores for
/// a single row as in FlashInfer's and TensorRT-LLM's `tinygemm2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fp8Gemv {
    /// Type of the output.
    pub out: Element,
    /// Whether the output is added to.
    pub accumulate: bool,
    /// Whether each 128 columns of a row have a scale of their own.
    pub blocks: bool,
}

/// Arguments of [`Fp8Gemv`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Fp8GemvParams {
    /// `[num_rows, cols]`, bf16.
    pub x: DevicePtr,
    /// `[rows, fp8_row_bytes(cols)]`, columns at [`fp8_place`](super::fp8_quantize::fp8_place).
    pub codes: DevicePtr,
    /// `[rows]`, or `[ceil(cols / 128), rows]`, f32.
    pub scales: DevicePtr,
    /// `[rows]`, f32; 0 without.
    pub bias: DevicePtr,
    /// `[num_rows, rows]`.
    pub out: DevicePtr,
    pub num_rows: u32,
    pub rows: u32,
    /// A multiple of 8.
    pub cols: u32,
    /// Zero.
    pub reserved: u32,
}

impl Fp8Gemv {
    /// Most rows of `x`.
    pub const MAX_ROWS: u32 = 8;
    const WARPS: u32 = 8;
    /// Groups of 64 columns that a warp has under way: two blocks of an SM hold 128 KB.
    const DEPTH: u32 = 4;

    /// Rows of the weights that a block takes: scales of blocks leave registers for fewer.
    const fn rows(self) -> u32 {
        if self.blocks { 16 } else { 32 }
    }
}

impl Kernel for Fp8Gemv {
    type Params = Fp8GemvParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source { file: "fp8_gemv.cu", text: include_str!("../../csrc/fp8_gemv.cu") },
            entry: "fp8_gemv",
            defines: vec![
                ("WARPS", Self::WARPS),
                ("ROWS", self.rows()),
                ("DEPTH", Self::DEPTH),
                ("BLOCKS", u32::from(self.blocks)),
                ("OUT_IS_BF16", self.out.is_bf16()),
                ("ACCUMULATE", u32::from(self.accumulate)),
            ],
            dynamic_smem: 0,
            params_bytes: size_of::<Fp8GemvParams>(),
            // Two blocks on an SM; sums of 8 warps.
            budget: Budget { registers: 128, static_smem: 8 * 8 * 36 * 4 },
        }
    }

    fn launch(&self, params: &Fp8GemvParams) -> Launch {
        Launch::linear(params.rows.div_ceil(self.rows()), 32 * Self::WARPS)
    }
}
