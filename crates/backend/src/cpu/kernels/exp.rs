//! The exponential function on vectors.

use super::lanes::{Kernel, Lanes, dispatch};
use crate::cpu::simd::SimdLevel;

/// Below this, the result rounds to zero even as a subnormal number.
const LOWEST: f32 = -104.0;
/// From here on, the result overflows to infinity.
const HIGHEST: f32 = 89.0;

/// `(exp(r) - 1 - r) / r^2` for `|r| <= ln(2) / 2`: the polynomial through its values at the five
/// Chebyshev nodes, lowest power first. Its error moves `exp(r)` by a fifth of an ulp at most.
const POLYNOMIAL: [f32; 5] = [0.5, 0.166_665_77, 0.041_666_556, 0.008_363_233, 0.001_392_625_1];

/// `exp(x)`, within 2 ulp; NaN for NaN, 0 for -infinity, infinity where it overflows.
///
/// # Source
/// The usual reduction `x = n ln 2 + r` (Cody and Waite, "Software manual for the elementary
/// functions", 1980, chapter 6), with ln 2 in two parts so that `n` times the first is exact.
#[inline(always)]
pub(super) fn exp<L: Lanes>(l: L, x: L::V) -> L::V {
    const LN_2_HIGH: f32 = 355.0 / 512.0;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let x = l.min(l.splat(HIGHEST), l.max(l.splat(LOWEST), x));
    let n = l.round(l.mul(x, l.splat(std::f32::consts::LOG2_E)));
    let r = l.mul_add(n, l.splat(-LN_2_HIGH), x);
    let r = l.mul_add(n, l.splat(-LN_2_LOW), r);
    let mut p = l.splat(POLYNOMIAL[4]);
    for coefficient in POLYNOMIAL[..4].iter().rev() {
        p = l.mul_add(p, r, l.splat(*coefficient));
    }
    let p = l.mul_add(l.mul(p, r), r, r);
    l.scale_by_exponent(l.add(p, l.splat(1.0)), n)
}

/// Unnormalised probabilities of logits: `exp((x - max) * scale)`, where NaN counts as -infinity.
///
/// The greatest logit's is exactly 1.
#[derive(Clone, Copy)]
pub(super) struct Softmax {
    pub(super) simd: SimdLevel,
    pub(super) max: f32,
    /// One over the temperature.
    pub(super) scale: f32,
}

impl Softmax {
    /// Writes the weights of `x` to the start of `out`.
    pub(super) fn weights(&self, x: &[f32], out: &mut [f32]) {
        dispatch(self.simd, Weights { softmax: *self, x, out: &mut out[..x.len()] });
    }
}

struct Weights<'a> {
    softmax: Softmax,
    x: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Weights<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let (max, scale) = (l.splat(self.softmax.max), l.splat(self.softmax.scale));
        for (x, out) in self.x.chunks(L::N).zip(self.out.chunks_mut(L::N)) {
            let x = l.mul(l.sub(l.load_part(x), max), scale);
            // The second operand wins over NaN.
            l.store_part(out, exp(l, l.max(x, l.splat(LOWEST))));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Exp<'a>(&'a mut [f32]);

    impl Kernel for Exp<'_> {
        type Output = ();

        #[inline(always)]
        fn run<L: Lanes>(self, l: L) {
            for x in self.0.chunks_mut(L::N) {
                l.store_part(x, exp(l, l.load_part(x)));
            }
        }
    }

    fn exp_of(level: SimdLevel, x: &[f32]) -> Vec<f32> {
        let mut out = x.to_vec();
        dispatch(level, Exp(&mut out));
        out
    }

    #[test]
    fn exp_is_within_two_ulp_wherever_it_is_normal() {
        let x: Vec<f32> = (0..400_000).map(|i| -87.3 + i as f32 * (175.9 / 400_000.0)).collect();
        for level in SimdLevel::available() {
            for (x, got) in x.iter().zip(exp_of(level, &x)) {
                let exact = f64::from(*x).exp();
                let ulp = f64::from(got.next_up()) - f64::from(got);
                let error = (f64::from(got) - exact).abs() / ulp;
                assert!(error <= 2.0, "{level:?}: exp({x}) = {got}, {error} ulp off");
            }
        }
    }

    #[test]
    fn exp_at_its_edges() {
        let cases = [
            (0.0, 1.0),
            (-0.0, 1.0),
            (f32::NEG_INFINITY, 0.0),
            (f32::MIN, 0.0),
            (-104.0, 0.0),
            (f32::INFINITY, f32::INFINITY),
            (f32::MAX, f32::INFINITY),
            (88.75, f32::INFINITY),
        ];
        for level in SimdLevel::available() {
            for (x, expected) in cases {
                assert_eq!(exp_of(level, &[x]), [expected], "{level:?}: exp({x})");
            }
            assert!(exp_of(level, &[f32::NAN])[0].is_nan());
            let subnormal = exp_of(level, &[-100.0])[0];
            assert!((f64::from(subnormal) / (-100.0_f64).exp() - 1.0).abs() < 0.05);
        }
    }

    #[test]
    fn softmax_weights_ignore_nan_and_any_scale_is_safe() {
        let x = [2.0, f32::NAN, f32::NEG_INFINITY, 1.0];
        for simd in SimdLevel::available() {
            let weights = |scale| {
                let mut out = [f32::NAN; 4];
                Softmax { simd, max: 2.0, scale }.weights(&x, &mut out);
                out
            };
            assert_eq!(weights(f32::MAX), [1.0, 0.0, 0.0, 0.0]);
            assert_eq!(weights(0.0), [1.0, 0.0, 0.0, 1.0]);
            assert!((weights(1.0)[3] - (-1.0_f32).exp()).abs() < 1e-6);
        }
    }
}
