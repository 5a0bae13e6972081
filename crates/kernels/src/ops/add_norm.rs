//! What ends a residual branch and begins the next one.

use super::fp8_split::{Fp8Split, SplitRows};
use crate::{Budget, DevicePtr, Kernel, KernelError, KernelSpec, Launch, Source};

/// `x += sum of parts (+ bias)`, and `out = x / sqrt(mean(x^2) + eps) * weight` if there is a
/// weight, row by row. Parts are added in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AddNorm {
    /// Whether `out` is also left as codes, for a product with weights in fp8.
    split: bool,
    /// Most vectors of four elements that a thread keeps.
    vectors: u32,
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
    pub const MAX_LEN: u32 = 4 * 8 * Self::THREADS;
    /// Of a block, at most.
    const THREADS: u32 = 512;

    /// The kernel for rows of `len` elements, which also leaves codes if it is to `split`.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] if rows are too long, not of whole vectors, or to be split
    /// although what shares a scale is cut.
    pub fn new(len: u32, split: bool) -> Result<Self, KernelError> {
        Self::check_len(len)?;
        if split && !Self::splits(len) {
            let reason = format!("rows of {len} as codes: it takes multiples of 128");
            return Err(KernelError::Unsupported { kernel: "add_norm", reason });
        }
        Ok(Self { split, vectors: len.div_ceil(4 * Self::THREADS).next_power_of_two() })
    }

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
            defines: vec![
                ("VECTORS", self.vectors),
                ("THREADS", Self::THREADS),
                ("SPLIT", u32::from(self.split)),
            ],
            dynamic_smem: 0,
            params_bytes: size_of::<AddNormParams>(),
            // With 512 threads, beside products.
            budget: Budget {
                registers: if self.vectors <= 2 { 48 } else { 128 },
                static_smem: 256,
            },
        }
    }

    fn launch(&self, params: &AddNormParams) -> Launch {
        // A thread takes four elements at a time.
        let threads = params.len.div_ceil(4).next_multiple_of(32).clamp(32, Self::THREADS);
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
