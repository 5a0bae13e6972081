//! The kernels for each set of instructions and each type of weight.

use super::{activations::Form, plain, tile::TileKernel};
use crate::{Dtype, cpu::simd::SimdLevel};

#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};

/// Kernels for panels of `dtype`: number `n - 1` takes `n` rows of activations.
pub(super) fn kernels(level: SimdLevel, dtype: Dtype) -> &'static [TileKernel] {
    match level {
        // The first processors with AVX-512 lack its dot products of bytes.
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx512 if is_x86_feature_detected!("avx512vnni") => avx512::kernels(dtype),
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx512 | SimdLevel::Avx2 => avx2::kernels(dtype),
        _ => plain::kernels(dtype),
    }
}

/// Most rows of activations that a kernel takes.
pub(super) fn max_block_rows(level: SimdLevel, form: Form) -> usize {
    let any_of_form = match form {
        Form::Plain => Dtype::F32,
        Form::Groups16 => Dtype::Q6K,
        Form::Groups32 => Dtype::Q4_1,
    };
    kernels(level, any_of_form).len()
}
