//! Root mean square normalisation.
//!
//! # Source
//! Zhang and Sennrich: "Root mean square layer normalization", NeurIPS 2019, equation 4.

use super::{
    Cores,
    lanes::{Kernel, Lanes, dispatch},
};
use crate::cpu::pool::SharedMut;

/// Arguments of [`rms_norm`].
pub(crate) struct RmsNorm<'a> {
    /// `[num_rows, len]`.
    pub(crate) x: &'a [f32],
    /// `[len]`.
    pub(crate) weight: &'a [f32],
    /// `[num_rows, len]`.
    pub(crate) out: &'a mut [f32],
    pub(crate) num_rows: usize,
    pub(crate) len: usize,
    pub(crate) eps: f32,
    /// Add to `out` instead of overwriting it.
    pub(crate) accumulate: bool,
}

/// `out = x / sqrt(mean(x^2) + eps) * weight`, or `out += ...`, row by row.
pub(crate) fn rms_norm(cores: Cores<'_>, args: RmsNorm<'_>) {
    let len = args.len;
    let weight = &args.weight[..len];
    let out = SharedMut::new(args.out);
    cores.for_rows(args.num_rows, len, |rows| {
        let span = rows.start * len..rows.end * len;
        let x = &args.x[span.clone()];
        // SAFETY: rows of different tasks are different.
        let out = unsafe { out.slice(span) };
        let (eps, accumulate) = (args.eps, args.accumulate);
        dispatch(cores.simd, Rows { x, weight, out, eps, accumulate });
    });
}

struct Rows<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    out: &'a mut [f32],
    eps: f32,
    accumulate: bool,
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let len = self.weight.len().max(1);
        for (x, out) in self.x.chunks_exact(len).zip(self.out.chunks_exact_mut(len)) {
            let scale = inverse_rms(l, x, self.eps);
            let chunks = out.chunks_mut(L::N).zip(x.chunks(L::N)).zip(self.weight.chunks(L::N));
            for ((out, x), weight) in chunks {
                let scaled = l.mul(l.load_part(x), l.splat(scale));
                let normed = l.mul(scaled, l.load_part(weight));
                let sum = if self.accumulate { l.add(l.load_part(out), normed) } else { normed };
                l.store_part(out, sum);
            }
        }
    }
}

/// Normalises one row in place.
#[inline(always)]
pub(super) fn normalize<L: Lanes>(l: L, x: &mut [f32], weight: &[f32], eps: f32) {
    let scale = inverse_rms(l, x, eps);
    for (x, weight) in x.chunks_mut(L::N).zip(weight.chunks(L::N)) {
        let scaled = l.mul(l.load_part(x), l.splat(scale));
        l.store_part(x, l.mul(scaled, l.load_part(weight)));
    }
}

/// `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
fn inverse_rms<L: Lanes>(l: L, x: &[f32], eps: f32) -> f32 {
    // Four sums, so that additions need not wait for each other.
    let mut sums = [l.splat(0.0); 4];
    let mut blocks = x.chunks_exact(4 * L::N);
    for block in blocks.by_ref() {
        for (sum, x) in sums.iter_mut().zip(block.chunks_exact(L::N)) {
            let x = l.load_part(x);
            *sum = l.mul_add(x, x, *sum);
        }
    }
    for x in blocks.remainder().chunks(L::N) {
        let x = l.load_part(x);
        sums[0] = l.mul_add(x, x, sums[0]);
    }
    let sum = l.sum(l.add(l.add(sums[0], sums[1]), l.add(sums[2], sums[3])));
    1.0 / (sum / x.len() as f32 + eps).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::kernels::testing::{assert_close, at_every_level, normal};

    fn check(num_rows: usize, len: usize, eps: f32) {
        let (x, weight) = (normal(1, num_rows * len), normal(2, len));
        let mut expected = Vec::new();
        for row in x.chunks(len) {
            let squares: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
            let rms = (squares / len as f64 + f64::from(eps)).sqrt();
            let normed = row.iter().zip(&weight).map(|(x, w)| f64::from(*x) / rms * f64::from(*w));
            expected.extend(normed);
        }
        at_every_level(|cores| {
            let mut out = vec![f32::NAN; num_rows * len + 3];
            let norm = |out: &mut [f32], accumulate| {
                let (x, weight) = (&x[..], &weight[..]);
                rms_norm(cores, RmsNorm { x, weight, out, num_rows, len, eps, accumulate });
            };
            norm(&mut out, false);
            assert_close(&out[..num_rows * len], &expected, 2e-6);
            norm(&mut out, true);
            let twice: Vec<f64> = expected.iter().map(|x| 2.0 * x).collect();
            assert_close(&out[..num_rows * len], &twice, 4e-6);
            assert!(out[num_rows * len..].iter().all(|x| x.is_nan()), "wrote past the end");
        });
    }

    #[test]
    fn rows_have_the_right_norm() {
        for len in [1, 7, 16, 64, 80, 576, 1000] {
            check(3, len, 1e-5);
        }
        check(70, 576, 1e-6);
        check(0, 64, 1e-5);
    }

    #[test]
    fn a_row_of_zeros_stays_zero() {
        at_every_level(|cores| {
            let mut out = [1.0; 20];
            let (x, weight) = (&[0.0; 20], &[2.0; 20]);
            let (num_rows, len, eps, accumulate) = (1, 20, 1e-5, false);
            let args = RmsNorm { x, weight, out: &mut out, num_rows, len, eps, accumulate };
            rms_norm(cores, args);
            assert_eq!(out, [0.0; 20]);
        });
    }
}
