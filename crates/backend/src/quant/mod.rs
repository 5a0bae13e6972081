//! Quantised block formats: their layout, and the exact values they stand for.

/// Writes the values that `bytes` stand for into `out`.
pub fn dequantize_row(_dtype: crate::Dtype, _bytes: &[u8], _out: &mut [f32]) {}

/// Writes normally distributed values keyed by `(seed, first_index + i)`.
pub fn random_row(_seed: u64, _std: f32, _first_index: usize, _out: &mut [f32]) {}
