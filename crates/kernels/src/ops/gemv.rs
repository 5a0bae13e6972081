//! Matrix products of very few rows, bound by reading the weights.

use crate::{Budget, DevicePtr, Element, Kernel, KernelError, KernelSpec, Launch, Source};

/// `out = x * weight^T (+ bias)`, or `out += ...`, for exactly `num_rows` rows of `x`.
///
/// A row's sums have the same order whatever `num_rows` is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gemv {
    num_rows: u32,
    out: Element,
    accumulate: bool,
}

/// Arguments of [`Gemv`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct GemvParams {
    /// `[num_rows, cols]`, bf16.
    pub x: DevicePtr,
    /// `[rows, cols]`, bf16.
    pub weight: DevicePtr,
    /// `[rows]`, f32; 0 without.
    pub bias: DevicePtr,
    /// `[num_rows, rows]`.
    pub out: DevicePtr,
    pub rows: u32,
    /// A multiple of 8.
    pub cols: u32,
}

impl Gemv {
    /// Most rows of `x`: with more, tensor cores do better.
    pub const MAX_ROWS: u32 = 4;
    const WARPS: u32 = 8;
    /// Rows of the weights that a warp takes.
    const ROWS: u32 = 2;
    /// Steps of 256 columns in a warp's ring: four blocks on a Hopper SM hold 160 KB under way.
    const STAGES: u32 = 6;

    /// A product with `num_rows` rows of `x`.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] unless `num_rows` is 1 to 4.
    pub fn new(num_rows: u32, out: Element, accumulate: bool) -> Result<Self, KernelError> {
        if !(1..=Self::MAX_ROWS).contains(&num_rows) {
            let reason = format!("{num_rows} rows: it takes 1 to {}", Self::MAX_ROWS);
            return Err(KernelError::Unsupported { kernel: "gemv", reason });
        }
        Ok(Self { num_rows, out, accumulate })
    }
}

impl Kernel for Gemv {
    type Params = GemvParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source { file: "gemv.cu", text: include_str!("../../csrc/gemv.cu") },
            entry: "gemv",
            defines: vec![
                ("M", self.num_rows),
                ("WARPS", Self::WARPS),
                ("ROWS", Self::ROWS),
                ("STAGES", Self::STAGES),
                ("OUT_IS_BF16", self.out.is_bf16()),
                ("ACCUMULATE", u32::from(self.accumulate)),
            ],
            dynamic_smem: Self::WARPS * Self::STAGES * Self::ROWS * 512,
            params_bytes: size_of::<GemvParams>(),
            // Four blocks on an SM.
            budget: Budget { registers: 64, static_smem: 0 },
        }
    }

    fn launch(&self, params: &GemvParams) -> Launch {
        Launch::linear(params.rows.div_ceil(Self::WARPS * Self::ROWS), 32 * Self::WARPS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_few_rows_are_taken() {
        for (num_rows, fits) in [(0, false), (1, true), (4, true), (5, false)] {
            assert_eq!(Gemv::new(num_rows, Element::F32, false).is_ok(), fits);
        }
    }
}
