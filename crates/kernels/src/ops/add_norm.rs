//! What ends a residual branch and begins the next one.

use super::fp8_split::{Fp8Split, SplitRows};
use crate::{Budget, DevicePtr, Kernel, KernelError, KernelSpec, Launch, Source};

/// `x += sum of parts (+ bias)`, and `out = x / sqrt(mean(x^2) + eps) * weight` if there is a
/// weight, row by row. Parts are added in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AddNorm {
    /// Whether `out` is also left as codes, for a product with weights in fp8.
    pub split: bool,
}

/// Arguments of [`AddNorm`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct AddNormParams {
    /// `[num_rows, len]`, f32.
    pub x: DevicePtr,
    /// `[num_parts, num_rows, len]`, f32.
    pub parts: DevicePtr,
    /// `[len]`, f32; 0 without.
    pub bias: DevicePtr,
    /// `[len]`, f32; 0: nothing is normalised.
    pub weight: DevicePtr,
    /// `[num_rows, len]`, bf16.
    pub out: DevicePtr,
    /// `out` as codes; unused without.
    pub split: SplitRows,
    pub num_rows: u32,
    pub num_parts: u32,
    /// A multiple of 4, at most [`AddNorm::MAX_LEN`].
    pub len: u32,
    pub eps: f32,
}

impl AddNorm {
    /// Most elements of a row: a thread keeps what it added up.
    pub const MAX_LEN: u32 = 4 * Self::VECTORS * Self::MAX_THREADS;
    const VECTORS: u32 = 4;
    const MAX_THREADS: u32 = 1024;

    /// Whether rows of `len` elements can be left as codes: a warp takes what shares a scale.
    pub const fn splits(len: u32) -> bool {
        len.is_multiple_of(Fp8Split::COLS)
    }

    /// Whether rows of `len` elements can be added.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] if not.
    pub fn check_len(len: u32) -> Result<(), KernelError> {
        if len.is_multiple_of(4) && len <= Self::MAX_LEN {
            return Ok(());
        }
        let reason = format!("rows of {len}: it takes multiples of 4 up to {}", Self::MAX_LEN);
        Err(KernelError::Unsupported { kernel: "add_norm", reason })
    }
}

impl Kernel for AddNorm {
    type Params = AddNormParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source { file: "add_norm.cu", text: include_str!("../../csrc/add_norm.cu") },
            entry: "add_norm",
            defines: vec![("VECTORS", Self::VECTORS), ("SPLIT", u32::from(self.split))],
            dynamic_smem: 0,
            params_bytes: size_of::<AddNormParams>(),
            budget: Budget { registers: 64, static_smem: 256 },
        }
    }

    fn launch(&self, params: &AddNormParams) -> Launch {
        // A thread takes four elements at a time.
        let threads = params.len.div_ceil(4).next_multiple_of(32).clamp(32, Self::MAX_THREADS);
        Launch::linear(params.num_rows, threads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_of_whole_vectors_that_fit() {
        for (len, fits) in [(4, true), (576, true), (16384, true), (16388, false), (6, false)] {
            assert_eq!(AddNorm::check_len(len).is_ok(), fits, "{len}");
        }
    }
}
