//! What the operators' tests share.

use super::Cores;
use crate::cpu::{pool::ThreadPool, simd::SimdLevel};

/// Runs `test` at every level that this processor has, on two threads.
pub(super) fn at_every_level(test: impl Fn(Cores<'_>)) {
    let pool = ThreadPool::new(2).unwrap();
    for simd in SimdLevel::available() {
        test(Cores { pool: &pool, simd });
    }
}

/// Reproducible normally distributed numbers.
pub(super) fn normal(seed: u64, len: usize) -> Vec<f32> {
    let mut out = vec![0.0; len];
    crate::quant::random_row(seed, 1.0, 0, &mut out);
    out
}

/// Fails unless `got` is within `tolerance` of `expected`, absolutely or relatively.
pub(super) fn assert_close(got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let difference = (f64::from(*got) - expected).abs();
        let limit = tolerance * expected.abs().max(1.0);
        assert!(difference <= limit, "element {i}: {got} instead of {expected}");
    }
}

/// The bits of every number, to compare for equality with NaN and signed zeros.
pub(super) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}
