//! A matrix of fp8 as bf16.

use crate::{Budget, DevicePtr, Kernel, KernelSpec, Launch, Source};

/// `out = codes * scale`, in bf16, for products that cannot take the codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fp8Expand {
    /// Whether each 128 columns of a row have a scale of their own.
    pub blocks: bool,
}

/// Arguments of [`Fp8Expand`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Fp8ExpandParams {
    /// `[rows, fp8_row_bytes(cols)]`, columns at [`fp8_place`](super::fp8_quantize::fp8_place).
    pub codes: DevicePtr,
    /// `[rows]`, or `[ceil(cols / 128), rows]`, f32.
    pub scales: DevicePtr,
    /// `[rows, cols]`, bf16.
    pub out: DevicePtr,
    pub rows: u32,
    /// A multiple of 8.
    pub cols: u32,
}

impl Fp8Expand {
    const THREADS: u32 = 256;
}

impl Kernel for Fp8Expand {
    type Params = Fp8ExpandParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source {
                file: "fp8_expand.cu",
                text: include_str!("../../csrc/fp8_expand.cu"),
            },
            entry: "fp8_expand",
            defines: vec![("THREADS", Self::THREADS), ("BLOCKS", u32::from(self.blocks))],
            dynamic_smem: 0,
            params_bytes: size_of::<Fp8ExpandParams>(),
            budget: Budget { registers: 64, static_smem: 0 },
        }
    }

    fn launch(&self, params: &Fp8ExpandParams) -> Launch {
        let columns = params.cols.div_ceil(8).div_ceil(Self::THREADS);
        Launch { grid: [params.rows, columns, 1], block: [Self::THREADS, 1, 1] }
    }
}
