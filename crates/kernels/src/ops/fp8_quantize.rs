//! Rounding rows to fp8: weights when they are loaded, activations before products.

use crate::{Budget, DevicePtr, Element, Kernel, KernelSpec, Launch, Source};

/// Columns that tensor cores take together: rows of codes are padded with zeros to whole groups.
pub const FP8_GROUP: usize = 64;

/// Where column `col` of a row of codes lies.
///
/// Within a group, byte `16 t + 4 s + b` is column `16 s + 2 t + [8, 0, 9, 1][b]`: what a lane of
/// a warp needs for four products of 16 columns is 16 bytes, and a word's bytes are the pairs that
/// it multiplies with, in the places from which they become bf16 with the fewest instructions.
pub const fn fp8_place(col: usize) -> usize {
    let (group, col) = (col / FP8_GROUP, col % FP8_GROUP);
    let (s, half, t, odd) = (col / 16, col / 8 % 2, col % 8 / 2, col % 2);
    group * FP8_GROUP + 16 * t + 4 * s + 2 * odd + (1 - half)
}

/// Bytes of a row of codes.
pub const fn fp8_row_bytes(cols: usize) -> usize {
    cols.next_multiple_of(FP8_GROUP)
}

/// `codes = x / scale` in e4m3, the scale being a row's largest magnitude over 448.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fp8Quantize {
    /// Type of the input.
    pub x: Element,
}

/// Arguments of [`Fp8Quantize`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Fp8QuantizeParams {
    /// `[num_rows, len]`.
    pub x: DevicePtr,
    /// `[num_rows, fp8_row_bytes(len)]`, columns at [`fp8_place`].
    pub codes: DevicePtr,
    /// `[num_rows]`, f32.
    pub scales: DevicePtr,
    pub num_rows: u32,
    /// A multiple of 8.
    pub len: u32,
}

impl Fp8Quantize {
    const THREADS: u32 = 256;
}

impl Kernel for Fp8Quantize {
    type Params = Fp8QuantizeParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source {
                file: "fp8_quantize.cu",
                text: include_str!("../../csrc/fp8_quantize.cu"),
            },
            entry: "fp8_quantize",
            defines: vec![("THREADS", Self::THREADS), ("X_IS_BF16", self.x.is_bf16())],
            dynamic_smem: 0,
            params_bytes: size_of::<Fp8QuantizeParams>(),
            budget: Budget { registers: 64, static_smem: 256 },
        }
    }

    fn launch(&self, params: &Fp8QuantizeParams) -> Launch {
        Launch::linear(params.num_rows, Self::THREADS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the kernels say it, from bytes to columns.
    #[test]
    fn places_are_those_of_the_kernels() {
        for group in 0..2 {
            for t in 0..4 {
                for s in 0..4 {
                    for (b, offset) in [8, 0, 9, 1].into_iter().enumerate() {
                        let col = 64 * group + 16 * s + 2 * t + offset;
                        assert_eq!(fp8_place(col), 64 * group + 16 * t + 4 * s + b);
                    }
                }
            }
        }
        assert_eq!([1, 64, 65].map(fp8_row_bytes), [64, 64, 128]);
    }
}
