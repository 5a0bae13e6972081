//! The gated activation of feed-forward layers.

use crate::{Budget, DevicePtr, Kernel, KernelSpec, Launch, Source};

/// `out[r, i] = f(gate_up[r, i]) * gate_up[r, len + i]`, all bf16.
#[derive(Clone, Copy, Debug)]
pub struct GateAndMul {
    /// GELU, by its approximation with a hyperbolic tangent; otherwise SiLU.
    pub gelu: bool,
}

/// Arguments of [`GateAndMul`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct GateAndMulParams {
    /// `[num_rows, 2 * len]`.
    pub gate_up: DevicePtr,
    /// `[num_rows, len]`.
    pub out: DevicePtr,
    pub num_rows: u32,
    pub len: u32,
}

impl GateAndMul {
    const THREADS: u32 = 256;
}

impl Kernel for GateAndMul {
    type Params = GateAndMulParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source {
                file: "gate_and_mul.cu",
                text: include_str!("../../csrc/gate_and_mul.cu"),
            },
            entry: "gate_and_mul",
            defines: vec![("THREADS", Self::THREADS), ("GELU", u32::from(self.gelu))],
            dynamic_smem: 0,
            params_bytes: size_of::<GateAndMulParams>(),
            budget: Budget { registers: 64, static_smem: 0 },
        }
    }

    fn launch(&self, params: &GateAndMulParams) -> Launch {
        let columns = params.len.div_ceil(8).div_ceil(Self::THREADS);
        Launch { grid: [params.num_rows, columns, 1], block: [Self::THREADS, 1, 1] }
    }
}
