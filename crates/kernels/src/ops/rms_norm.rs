//! Root mean square normalisation.

use crate::{Budget, DevicePtr, Element, Kernel, KernelSpec, Launch, Source};

/// `out = x / sqrt(mean(x^2) + eps) * weight`, or `out += ...`, row by row.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm {
    /// Type of the input.
    pub x: Element,
    /// Type of the result.
    pub out: Element,
    /// Add to `out` instead of overwriting it.
    pub add: bool,
}

impl RmsNorm {
    /// Of the state between layers, for products to read.
    #[must_use]
    pub fn of_state() -> Self {
        Self { x: Element::F32, out: Element::Bf16, add: false }
    }

    /// Of a branch that joins the state.
    #[must_use]
    pub fn of_branch() -> Self {
        Self { x: Element::F32, out: Element::F32, add: true }
    }
}

/// Arguments of [`RmsNorm`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct RmsNormParams {
    /// `[num_rows, len]`.
    pub x: DevicePtr,
    /// `[len]`, f32.
    pub weight: DevicePtr,
    /// `[num_rows, len]`.
    pub out: DevicePtr,
    pub num_rows: u32,
    pub len: u32,
    pub eps: f32,
    /// Zero.
    pub reserved: u32,
}

impl Kernel for RmsNorm {
    type Params = RmsNormParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source { file: "rms_norm.cu", text: include_str!("../../csrc/rms_norm.cu") },
            entry: "rms_norm",
            defines: vec![
                ("X_IS_BF16", self.x.is_bf16()),
                ("OUT_IS_BF16", self.out.is_bf16()),
                ("ADD", u32::from(self.add)),
            ],
            dynamic_smem: 0,
            params_bytes: size_of::<RmsNormParams>(),
            budget: Budget { registers: 64, static_smem: 256 },
        }
    }

    fn launch(&self, params: &RmsNormParams) -> Launch {
        // A thread takes eight elements at a time.
        let threads = params.len.div_ceil(8).next_multiple_of(32).clamp(32, 1024);
        Launch::linear(params.num_rows, threads)
    }
}
