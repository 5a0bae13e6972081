//! Adding a bias to every row of a matrix product.

use crate::{Budget, DevicePtr, Kernel, KernelSpec, Launch, Source};

/// `x[r, i] += bias[i]`, x in bf16.
#[derive(Clone, Copy, Debug)]
pub struct AddBias;

/// Arguments of [`AddBias`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct AddBiasParams {
    /// `[num_rows, len]`, bf16.
    pub x: DevicePtr,
    /// `[len]`, f32.
    pub bias: DevicePtr,
    pub num_rows: u32,
    pub len: u32,
}

impl AddBias {
    const THREADS: u32 = 256;
}

impl Kernel for AddBias {
    type Params = AddBiasParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source { file: "add_bias.cu", text: include_str!("../../csrc/add_bias.cu") },
            entry: "add_bias",
            defines: vec![("THREADS", Self::THREADS)],
            dynamic_smem: 0,
            params_bytes: size_of::<AddBiasParams>(),
            budget: Budget { registers: 64, static_smem: 0 },
        }
    }

    fn launch(&self, params: &AddBiasParams) -> Launch {
        let columns = params.len.div_ceil(8).div_ceil(Self::THREADS);
        Launch { grid: [params.num_rows, columns, 1], block: [Self::THREADS, 1, 1] }
    }
}
