//! Activations as codes, exactly: what tensor cores multiply with weights in fp8.

use super::fp8_quantize::fp8_row_bytes;
use crate::{Budget, DevicePtr, Kernel, KernelSpec, Launch, Source};

/// `x = scale * (greater + lesser)`, both in e4m3, the scale a power of two of 128 columns of a
/// row.
///
/// Exact for bf16, but for numbers below 2^-9 of the greatest of their columns, which are off by up
/// to 2^-17 of that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fp8Split;

/// Arguments of [`Fp8Split`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Fp8SplitParams {
    /// `[num_rows, len]`, bf16.
    pub x: DevicePtr,
    pub to: SplitRows,
    /// A multiple of 8.
    pub len: u32,
    /// Zero.
    pub reserved: u32,
}

/// Where activations go as codes.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
#[allow(missing_docs)]
pub struct SplitRows {
    /// `[2, num_rows, fp8_row_bytes(len)]`, the greater and the lesser, columns at
    /// [`fp8_place`](super::fp8_quantize::fp8_place).
    pub codes: DevicePtr,
    /// `[ceil(len / 128), padded_rows]`, f32.
    pub scales: DevicePtr,
    pub num_rows: u32,
    /// What the product's kernel pads rows to.
    pub padded_rows: u32,
}

impl Fp8Split {
    const THREADS: u32 = 256;
    /// Columns that share a scale; a warp takes them.
    pub(super) const COLS: u32 = 128;

    /// Bytes of the codes of `num_rows` rows.
    pub const fn codes_bytes(num_rows: usize, len: usize) -> usize {
        2 * num_rows * fp8_row_bytes(len)
    }

    /// Bytes of the scales.
    pub const fn scales_bytes(padded_rows: usize, len: usize) -> usize {
        size_of::<f32>() * padded_rows * len.div_ceil(Self::COLS as usize)
    }
}

impl Kernel for Fp8Split {
    type Params = Fp8SplitParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source { file: "fp8_split.cu", text: include_str!("../../csrc/fp8_split.cu") },
            entry: "fp8_split",
            defines: vec![("THREADS", Self::THREADS)],
            dynamic_smem: 0,
            params_bytes: size_of::<Fp8SplitParams>(),
            budget: Budget { registers: 32, static_smem: 0 },
        }
    }

    fn launch(&self, params: &Fp8SplitParams) -> Launch {
        let warps = params.to.num_rows * params.len.div_ceil(Self::COLS);
        Launch::linear(warps.div_ceil(Self::THREADS / 32), Self::THREADS)
    }
}

#[cfg(test)]
mod tests {
    /// The nearest number of e4m3, the even one of two, as the OCP's specification of 8-bit
    /// floating point has it: four bits, exponents from -6 on, so steps of 2^-9 at least.
    fn round_to_e4m3(x: f32) -> f32 {
        let exponent = if x == 0.0 { -6 } else { x.abs().log2().floor().max(-6.0) as i32 };
        let step = 2.0_f32.powi(exponent - 3);
        (x / step).round_ties_even() * step
    }

    /// Numbers of bf16 whose greatest neighbour is scaled to 128 to 255.
    fn scaled(exponent: i32) -> impl Iterator<Item = f32> {
        (128..256).map(move |mantissa| mantissa as f32 * 2.0_f32.powi(exponent - 7))
    }

    #[test]
    fn two_codes_are_every_number_of_bf16_near_the_greatest() {
        for x in (-2..=7).flat_map(scaled) {
            let greater = round_to_e4m3(x);
            let lesser = round_to_e4m3(x - greater);
            assert!(greater <= 448.0);
            assert_eq!(greater + lesser, x);
        }
    }

    #[test]
    fn smaller_numbers_are_off_by_little_of_the_greatest() {
        for x in (-30..-2).flat_map(scaled) {
            let greater = round_to_e4m3(x);
            let lesser = round_to_e4m3(x - greater);
            assert!((greater + lesser - x).abs() <= 128.0 * 2.0_f32.powi(-17), "{x}");
        }
    }
}
