//! The kernels for each set of instructions and each type of weight.

use super::{activations::Form, format::GroupLayout, plain, tile::TileKernel};
use crate::{Dtype, cpu::simd::SimdLevel};

#[cfg(target_arch = "x86_64")]
use super::{amx, avx2, avx512, avx512_bf16};

/// Which kernels run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct KernelSet {
    level: SimdLevel,
    /// Weights in bf16 meet activations rounded to bf16, instead of becoming f32.
    bf16_products: bool,
}

impl KernelSet {
    /// The fastest kernels of a level.
    ///
    /// # Panics
    /// If this processor lacks the level's instructions.
    pub(super) fn of(level: SimdLevel) -> Self {
        assert!(level.is_available(), "this processor has no {level:?}");
        let bf16_products = match level {
            SimdLevel::Plain | SimdLevel::Avx2 => false,
            SimdLevel::Avx512 => bf16_products_are_fast(),
            SimdLevel::Amx => true,
        };
        Self { level, bf16_products }
    }

    /// All that this processor can run: what tests compare.
    #[cfg(test)]
    pub(super) fn available() -> impl Iterator<Item = Self> {
        let with = |bf16_products| move |level| Self { level, bf16_products };
        let products = SimdLevel::available().filter(|level| {
            cfg!(target_arch = "x86_64") && *level >= SimdLevel::Avx512 && has_bf16_products()
        });
        let others = SimdLevel::available().filter(|level| *level < SimdLevel::Amx);
        others.map(with(false)).chain(products.map(with(true)))
    }

    pub(super) fn level(self) -> SimdLevel {
        self.level
    }

    /// How weights of `dtype` want their activations.
    pub(super) fn form(self, dtype: Dtype) -> Form {
        match GroupLayout::of(dtype).map(|layout| layout.group_len) {
            None if dtype == Dtype::BF16 && self.level == SimdLevel::Amx => Form::Bf16Tiles,
            None if dtype == Dtype::BF16 && self.bf16_products => Form::Bf16Pairs,
            None => Form::Plain,
            Some(16) => Form::Groups16,
            Some(_) => Form::Groups32,
        }
    }

    /// Kernels for panels of `dtype` and activations in `form`: number `n - 1` takes `n` rows.
    pub(super) fn kernels(self, dtype: Dtype, form: Form) -> &'static [TileKernel] {
        match self.level {
            #[cfg(target_arch = "x86_64")]
            _ if form == Form::Bf16Tiles => amx::KERNELS,
            #[cfg(target_arch = "x86_64")]
            _ if form == Form::Bf16Pairs => avx512_bf16::KERNELS,
            // The first processors with AVX-512 lack its dot products of bytes.
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Amx | SimdLevel::Avx512 if is_x86_feature_detected!("avx512vnni") => {
                avx512::kernels(dtype)
            }
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Amx | SimdLevel::Avx512 | SimdLevel::Avx2 => avx2::kernels(dtype),
            _ => plain::kernels(dtype),
        }
    }

    /// To be called by a thread that has run kernels and runs others next, or none.
    pub(super) fn end_task(self) {
        #[cfg(target_arch = "x86_64")]
        if self.level == SimdLevel::Amx {
            amx::release();
        }
    }

    /// Most rows of activations that a kernel takes.
    pub(super) fn max_block_rows(self, form: Form) -> usize {
        let any_of_form = match form {
            Form::Plain => Dtype::F32,
            Form::Bf16Pairs | Form::Bf16Tiles => Dtype::BF16,
            Form::Groups16 => Dtype::Q6K,
            Form::Groups32 => Dtype::Q4_1,
        };
        self.kernels(any_of_form, form).len()
    }
}

/// Whether this processor has dot products of bf16.
#[cfg(target_arch = "x86_64")]
fn has_bf16_products() -> bool {
    is_x86_feature_detected!("avx512bf16")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_bf16_products() -> bool {
    false
}

/// Whether it has them, and they beat f32.
///
/// Measured: AMD's fifth Zen starts two a cycle, as it does multiply-adds of f32, so it does twice
/// the work; a Xeon of family 6, model 207 reaches half the rate of f32, having AMX for this.
#[cfg(target_arch = "x86_64")]
fn bf16_products_are_fast() -> bool {
    let vendor = std::arch::x86_64::__cpuid(0);
    let vendor = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
    has_bf16_products() && vendor.as_flattened() == b"AuthenticAMD"
}

#[cfg(not(target_arch = "x86_64"))]
fn bf16_products_are_fast() -> bool {
    false
}
