//! Picking the rows whose logits are needed.

use crate::{Budget, DevicePtr, Element, Kernel, KernelSpec, Launch, Source};

/// `out[s] = x[sample_indices[s]]`, both of one type.
#[derive(Clone, Copy, Debug)]
pub struct GatherSampled {
    /// Type of both.
    pub element: Element,
}

/// Arguments of [`GatherSampled`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct GatherSampledParams {
    /// `[num_tokens, len]`.
    pub x: DevicePtr,
    /// `[num_sampled]`.
    pub sample_indices: DevicePtr,
    /// `[num_sampled, len]`.
    pub out: DevicePtr,
    pub num_sampled: u32,
    pub len: u32,
}

impl GatherSampled {
    const THREADS: u32 = 256;
}

impl Kernel for GatherSampled {
    type Params = GatherSampledParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source {
                file: "gather_sampled.cu",
                text: include_str!("../../csrc/gather_sampled.cu"),
            },
            entry: "gather_sampled",
            defines: vec![("THREADS", Self::THREADS), ("IS_BF16", self.element.is_bf16())],
            dynamic_smem: 0,
            params_bytes: size_of::<GatherSampledParams>(),
            budget: Budget { registers: 64, static_smem: 0 },
        }
    }

    fn launch(&self, params: &GatherSampledParams) -> Launch {
        Launch::linear(params.num_sampled, Self::THREADS)
    }
}
