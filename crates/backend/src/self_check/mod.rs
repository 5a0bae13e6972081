//! Does a device compute what it should? Every operator on random inputs, against the CPU in f32.
//!
//! A device is checked section by section; several may be at once, with a backend each.
//!
//! [`rig`]: a device with what moving values takes. [`kv_words`]: KV caches on the host. [`steps`]:
//! random batches. [`dense`], [`fp8`], [`context`], [`cuts`], [`sampling`], [`moves`]: the
//! operators, each one function for every device.
//!
//! Invariant: what a device is judged by was computed by the CPU backend, never by itself.

mod context;
mod cuts;
mod dense;
mod fp8;
mod kv_words;
mod moves;
mod replays;
mod rig;
mod sampling;
mod steps;

use rig::Rig;

use crate::{Backend, BackendError, CpuBackend, CpuConfig, KvDtype, WeightPrecision};

/// How one operator did.
#[derive(Clone, Debug, PartialEq)]
pub struct OperatorCheck {
    /// Operator and case.
    pub name: String,
    /// `|out - expected| / |expected|` over all elements of the outputs; infinite where a value is
    /// no number. For outputs that must be equal: the fraction that is not.
    pub error: f64,
    /// Most that `error` may be.
    pub tolerance: f64,
}

impl OperatorCheck {
    /// Whether the operator computes what it should.
    pub fn passed(&self) -> bool {
        self.error <= self.tolerance
    }
}

/// Operators that are checked together, in this order if at all: attention depends on whether a
/// backend has seen weights in fp8, and it is such attention that is best replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// Norms, gates, matrix products, embeddings.
    Dense,
    /// Products with weights in fp8.
    Fp8,
    /// Rotation, with the product in front of it; blocks turned.
    Rotation,
    /// Attention of some shapes of heads.
    Attention,
    /// Attention of the other shapes.
    MoreAttention,
    /// Prompts that are cut.
    Cuts,
    /// What is around a step: unpacking, counting, sampling.
    Sampling,
    /// Blocks and tokens that are moved.
    Moves,
    /// Graphs that are replayed many times.
    Replays,
}

impl Section {
    /// All operators.
    pub const ALL: [Self; 9] = [
        Self::Dense,
        Self::Fp8,
        Self::Rotation,
        Self::Attention,
        Self::MoreAttention,
        Self::Cuts,
        Self::Sampling,
        Self::Moves,
        Self::Replays,
    ];
}

/// Checks every operator of `backend`.
///
/// # Errors
/// [`BackendError`] if a device cannot run them at all.
pub fn check_operators<B: Backend>(backend: &B) -> Result<Vec<OperatorCheck>, BackendError> {
    let mut checks = Vec::new();
    check_sections(backend, &Section::ALL, &mut checks)?;
    Ok(checks)
}

/// Checks some operators of `backend` and adds to `checks` how they did, up to the first that
/// cannot be run.
///
/// # Errors
/// As [`check_operators`].
pub fn check_sections<B: Backend>(
    backend: &B,
    sections: &[Section],
    checks: &mut Vec<OperatorCheck>,
) -> Result<(), BackendError> {
    let reference = reference_for(backend)?;
    let mut pair = Pair { device: Rig::new(backend)?, reference: Rig::new(&reference)?, checks };
    sections.iter().try_for_each(|section| match section {
        Section::Dense => dense::check(&mut pair),
        Section::Fp8 => fp8::check(&mut pair),
        Section::Rotation => context::check_rotation(&mut pair),
        Section::Attention => context::check_attention(&mut pair),
        Section::MoreAttention => context::check_more_attention(&mut pair),
        Section::Cuts => cuts::check(&mut pair),
        Section::Sampling => sampling::check(&mut pair),
        Section::Moves => moves::check(&mut pair),
        Section::Replays => replays::check(&mut pair),
    })
}

/// The CPU, as exact as it can be.
fn reference_for<B: Backend>(backend: &B) -> Result<CpuBackend, BackendError> {
    CpuBackend::new(CpuConfig {
        // Numbers of eight bits would differ too much from any others.
        kv_dtype: match backend.kv_dtype() {
            dtype @ (KvDtype::Fp8 | KvDtype::Int8 | KvDtype::Int4) => dtype,
            KvDtype::F32 | KvDtype::F16 | KvDtype::Bf16 => KvDtype::F32,
        },
        weights: WeightPrecision::F32,
        // Cases are small, and other cores may be checking other sections.
        num_threads: 1,
        ..CpuConfig::detect()
    })
}

/// The device to check, the CPU, and how the operators did so far.
struct Pair<'a, B: Backend> {
    device: Rig<'a, B>,
    reference: Rig<'a, CpuBackend>,
    checks: &'a mut Vec<OperatorCheck>,
}

impl<B: Backend> Pair<'_, B> {
    /// Notes how far `out` is from `expected`.
    fn compare(&mut self, name: impl Into<String>, out: &[f32], expected: &[f32], tolerance: f64) {
        let error = relative_error(out, expected);
        self.checks.push(OperatorCheck { name: name.into(), error, tolerance });
    }

    /// Notes which of `out` are not exactly `expected`; `tolerance` of them may differ.
    fn same(&mut self, name: impl Into<String>, out: &[u32], expected: &[u32], tolerance: f64) {
        assert_eq!(out.len(), expected.len(), "outputs to compare");
        let different = out.iter().zip(expected).filter(|(a, b)| a != b).count();
        let error = different as f64 / out.len().max(1) as f64;
        self.checks.push(OperatorCheck { name: name.into(), error, tolerance });
    }
}

/// Rounding to bf16, and what follows from it in a sum of many terms.
const BF16_TOLERANCE: f64 = 1e-2;
/// Rounding to bf16 once.
const BF16_ROUNDING: f64 = 4e-3;
/// Sums of f32 in another order.
const F32_TOLERANCE: f64 = 1e-4;

fn relative_error(out: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(out.len(), expected.len(), "outputs to compare");
    let square = |value: f64| value * value;
    let difference: f64 =
        out.iter().zip(expected).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    let norm: f64 = expected.iter().map(|value| square(f64::from(*value))).sum();
    match (difference / norm.max(f64::MIN_POSITIVE)).sqrt() {
        error if error.is_finite() => error,
        _ => f64::INFINITY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_errors_are_of_the_whole_and_notice_what_is_no_number() {
        assert_eq!(relative_error(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
        assert_eq!(relative_error(&[3.0, 3.0], &[3.0, 4.0]), 0.2);
        assert_eq!(relative_error(&[f32::NAN, 4.0], &[3.0, 4.0]), f64::INFINITY);
    }

    /// Operators that know the KV cache.
    const OF_KV: [Section; 5] =
        [Section::Rotation, Section::Attention, Section::Cuts, Section::Moves, Section::Replays];

    /// The CPU with other weights and instructions than the reference: the checks must say so.
    #[test]
    fn the_cpu_passes_its_own_checks() {
        for kv_dtype in [KvDtype::Bf16, KvDtype::Int8, KvDtype::Int4] {
            let backend = CpuBackend::new(CpuConfig {
                kv_dtype,
                weights: WeightPrecision::Native,
                num_threads: 1,
                ..CpuConfig::detect()
            });
            let backend = backend.unwrap();
            let sections = if kv_dtype == KvDtype::Bf16 { &Section::ALL[..] } else { &OF_KV };
            let mut checks = Vec::new();
            check_sections(&backend, sections, &mut checks).unwrap();
            let failed: Vec<_> = checks.iter().filter(|check| !check.passed()).collect();
            assert!(failed.is_empty(), "{failed:#?}");
            assert!(checks.len() > 30, "{} checks", checks.len());
        }
    }
}
