//! A product's sums from their parts.

use crate::{Budget, DevicePtr, Kernel, KernelSpec, Launch, Source};

/// `out = parts (+ bias)`, the parts added in their order; see
/// [`HopperOp::Parts`](super::hopper_gemm::HopperOp::Parts).
#[derive(Clone, Copy, Debug)]
pub struct SumParts;

/// Arguments of [`SumParts`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct SumPartsParams {
    /// `[num_parts, num_rows, len]`, f32.
    pub parts: DevicePtr,
    /// `[len]`, f32; 0 without.
    pub bias: DevicePtr,
    /// `[num_rows, len]`, bf16.
    pub out: DevicePtr,
    pub num_rows: u32,
    pub num_parts: u32,
    /// A multiple of 8.
    pub len: u32,
    /// Zero.
    pub reserved: u32,
}

impl SumParts {
    const THREADS: u32 = 256;
}

impl Kernel for SumParts {
    type Params = SumPartsParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source { file: "sum_parts.cu", text: include_str!("../../csrc/sum_parts.cu") },
            entry: "sum_parts",
            defines: vec![("THREADS", Self::THREADS)],
            dynamic_smem: 0,
            params_bytes: size_of::<SumPartsParams>(),
            budget: Budget { registers: 64, static_smem: 0 },
        }
    }

    fn launch(&self, params: &SumPartsParams) -> Launch {
        let columns = params.len.div_ceil(8).div_ceil(Self::THREADS);
        Launch { grid: [params.num_rows, columns, 1], block: [Self::THREADS, 1, 1] }
    }
}
