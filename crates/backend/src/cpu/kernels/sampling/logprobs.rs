//! Log-probabilities of the model's own distribution.

use super::{
    draw::{GROUP, sum},
    select::{key_id, key_logit, max_logit, top_k},
};
use crate::{
    cpu::{kernels::exp::Softmax, simd::SimdLevel},
    step::MAX_TOP_LOGPROBS,
};

/// What a row reports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Logprobs {
    /// Of the token drawn.
    pub(super) drawn: f32,
    /// Likeliest first; `u32::MAX` where unused.
    pub(super) top_ids: [u32; MAX_TOP_LOGPROBS],
    /// Theirs; 0 where unused.
    pub(super) top_logprobs: [f32; MAX_TOP_LOGPROBS],
}

/// What a row that asks for no logprobs reports.
pub(super) const NO_LOGPROBS: Logprobs = Logprobs {
    drawn: 0.0,
    top_ids: [u32::MAX; MAX_TOP_LOGPROBS],
    top_logprobs: [0.0; MAX_TOP_LOGPROBS],
};

impl Logprobs {
    /// The logprob of `token`, and the `num_top` likeliest tokens.
    pub(super) fn of(simd: SimdLevel, logits: &[f32], token: u32, num_top: usize) -> Self {
        let normalizer = Normalizer::of(simd, logits);
        let mut logprobs = NO_LOGPROBS;
        logprobs.drawn = normalizer.logprob(logits[token as usize]);
        let mut keys = Vec::new();
        top_k(logits, num_top.min(MAX_TOP_LOGPROBS), &mut keys);
        for (i, key) in keys.into_iter().enumerate() {
            logprobs.top_ids[i] = key_id(key);
            logprobs.top_logprobs[i] = normalizer.logprob(key_logit(key));
        }
        logprobs
    }
}

/// What turns logits into logprobs.
struct Normalizer {
    max: f32,
    /// Logarithm of the sum of all `exp(logit - max)`.
    log_sum: f64,
}

impl Normalizer {
    fn of(simd: SimdLevel, logits: &[f32]) -> Self {
        let softmax = Softmax { simd, max: max_logit(logits), scale: 1.0 };
        let mut weights = [0.0; GROUP];
        let mut total = 0.0;
        for group in logits.chunks(GROUP) {
            softmax.weights(group, &mut weights);
            total += sum(&weights[..group.len()]);
        }
        Self { max: softmax.max, log_sum: total.ln() }
    }

    /// The logprob of a logit. With infinite logits about, theirs is 0 and all others' -infinity.
    fn logprob(&self, logit: f32) -> f32 {
        if self.max.is_finite() && !logit.is_nan() {
            ((f64::from(logit) - f64::from(self.max)) - self.log_sum) as f32
        } else if self.max == f32::INFINITY && logit == f32::INFINITY {
            0.0
        } else {
            f32::NEG_INFINITY
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::kernels::testing::normal;

    #[test]
    fn logprobs_are_those_of_the_softmax() {
        for spread in [0.01, 1.0, 10.0] {
            let logits: Vec<f32> = normal(8, 3001).iter().map(|x| x * spread + 100.0).collect();
            let exact: Vec<f64> = logits.iter().map(|x| f64::from(*x).exp()).collect();
            let total: f64 = exact.iter().sum();
            let logprob = |id: u32| (exact[id as usize] / total).ln();
            let mut sorted: Vec<u32> = (0..3001).collect();
            sorted.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
            for simd in SimdLevel::available() {
                let got = Logprobs::of(simd, &logits, 17, 5);
                assert!((f64::from(got.drawn) - logprob(17)).abs() < 1e-5);
                assert_eq!(got.top_ids[..5], sorted[..5]);
                for (id, got) in sorted.iter().zip(&got.top_logprobs[..5]) {
                    assert!((f64::from(*got) - logprob(*id)).abs() < 1e-5);
                }
                assert_eq!(got.top_ids[5..], [u32::MAX; 15]);
                assert_eq!(got.top_logprobs[5..], [0.0; 15]);
            }
        }
    }

    #[test]
    fn equal_logits_are_listed_by_id_and_impossible_tokens_not_at_all() {
        let none = f32::NEG_INFINITY;
        let logits = [none, 1.0, f32::NAN, 1.0, 0.0, -0.0];
        let got = Logprobs::of(SimdLevel::detect(), &logits, 0, 20);
        assert_eq!(got.drawn, none);
        assert_eq!(got.top_ids[..5], [1, 3, 4, 5, u32::MAX]);
        let e = std::f64::consts::E;
        let expected = (e / (2.0 * e + 2.0)).ln();
        assert!((f64::from(got.top_logprobs[0]) - expected).abs() < 1e-6);
        assert_eq!(got.top_logprobs[4], 0.0);
    }

    #[test]
    fn rows_without_finite_logits_report_something_definite() {
        let simd = SimdLevel::detect();
        let none = Logprobs::of(simd, &[f32::NAN, f32::NEG_INFINITY], 0, 2);
        assert_eq!((none.drawn, none.top_ids[0]), (f32::NEG_INFINITY, u32::MAX));
        let infinite = Logprobs::of(simd, &[1.0, f32::INFINITY], 1, 2);
        assert_eq!((infinite.drawn, infinite.top_ids[0]), (0.0, 1));
        assert_eq!(infinite.top_logprobs[..2], [0.0, f32::NEG_INFINITY]);
    }
}
