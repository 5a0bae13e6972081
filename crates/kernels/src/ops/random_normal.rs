//! Filling dummy weights on the device.

use crate::{Budget, DevicePtr, Element, Kernel, KernelSpec, Launch, Source};

/// Normally distributed values of mean 0 keyed by `(seed, first_index + i)`, by the formula that
/// the host uses; its last bits may differ.
#[derive(Clone, Copy, Debug)]
pub struct RandomNormal {
    /// Type of the values.
    pub out: Element,
}

/// Arguments of [`RandomNormal`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct RandomNormalParams {
    /// `[len]`.
    pub out: DevicePtr,
    pub seed: u64,
    /// Even.
    pub first_index: u64,
    pub len: u64,
    /// Standard deviation.
    pub std: f32,
    /// Zero.
    pub reserved: u32,
}

impl RandomNormal {
    const THREADS: u32 = 256;
    const MAX_BLOCKS: u64 = 4096;
}

impl Kernel for RandomNormal {
    type Params = RandomNormalParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source {
                file: "random_normal.cu",
                text: include_str!("../../csrc/random_normal.cu"),
            },
            entry: "random_normal",
            defines: vec![("THREADS", Self::THREADS), ("OUT_IS_BF16", self.out.is_bf16())],
            dynamic_smem: 0,
            params_bytes: size_of::<RandomNormalParams>(),
            budget: Budget { registers: 64, static_smem: 0 },
        }
    }

    fn launch(&self, params: &RandomNormalParams) -> Launch {
        let blocks = params.len.div_ceil(2 * u64::from(Self::THREADS)).min(Self::MAX_BLOCKS);
        Launch::linear(blocks as u32, Self::THREADS)
    }
}
