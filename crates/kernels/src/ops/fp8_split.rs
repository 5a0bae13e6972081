//! Activations as codes, exactly: what tensor cores multiply with weights in fp8.

use super::fp8_quantize::fp8_row_bytes;
use crate::{Budget, DevicePtr, Kernel, KernelSpec, Launch, Source};

/// `x = scale * (greater + lesser)`, both in e4m3, the scale a power of two of 128 columns of a
/// row.
///
/// Exact for bf16, but for numbers below 2^-9 of the greatest of their columns, which are off by up
/// to 2^-17 of that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fp8Split;

/// Arguments of [`Fp8Split`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Fp8SplitParams {
    /// `[num_rows, len]`, bf16.
    pub x: DevicePtr,
    pub to: SplitRows,
    /// A multiple of 8.
    pub len: u32,
    /// Zero.
    pub reserved: u32,
}

/// Where activations go as codes.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
#[allow(missing_docs)]
pub struct SplitRows {
    /// `[2, num_rows, fp8_row_bytes(len)]`, columns at [`fp8_place`](super::fp8_quantize::fp8_place):
    /// the greater, the lesser.
    pub codes: DevicePtr,
    /// `[ceil(len / 128), padded_rows]`, f32.
    pub scales: DevicePtr,
    pub num_rows: u32,
    /// What the product's kernel pads rows to.
    pub padded_rows: u32,
}

impl Fp8Split {
    const THREADS: u32 = 256;
    /// Columns that share a scale; a warp takes them.
    pub(super) const COLS: u32 = 128;

    /// Bytes of the codes of `num_rows` rows.
    pub const fn codes_bytes(num_rows: usize, len: usize) -> usize {
        2 * num_rows * fp8_row_bytes(len)
    }

    /// Bytes of the scales.
    pub const fn scales_bytes(padded_rows: usize, len: usize) -> usize {
        size_of::<f32>() * padded_rows * len.div_ceil(Self::COLS as usize)
    }
}

impl Kernel for Fp8Split {
    type Params = Fp8SplitParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source { file: "fp8_split.cu", text: include_str!("../../csrc/fp8_split.cu") },
            entry: "fp8_split",
            defines: vec![("THREADS", Self::THREADS)],
            dynamic_smem: 0,
            params_bytes: size_of::<Fp8SplitParams>(),
            budget: Budget { registers: 32, static_smem: 0 },
        }
    }

    fn launch(&self, params: &Fp8SplitParams) -> Launch {
        let warps = params.to.num_rows * params.len.div_ceil(Self::COLS);
        Launch::linear(warps.div_ceil(Self::THREADS / 32), Self::THREADS)
    }
}
