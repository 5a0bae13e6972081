//! Rules that look at the whole distribution before they leave tokens out.
//!
//! # Source
//! Top-n-sigma: Tang et al., "Top-n-sigma: not all logits are you need", 2024, section 3. Typical:
//! Meister et al., "Locally typical sampling", 2022, section 4. XTC ("exclude top choices"): its
//! author's description in text-generation-webui's pull request 6335, which llama.cpp follows too.

use super::{
    draw::GROUP,
    filter::Candidate,
    select::{self, key},
};
use crate::cpu::kernels::exp::Softmax;

/// Leaves tokens whose logits are at most `num` standard deviations of all possible tokens' logits
/// below the greatest.
pub(super) fn top_n_sigma(logits: &mut [f32], max: f32, num: f32) {
    let possible = || logits.iter().filter(|logit| logit.is_finite()).map(|x| f64::from(*x));
    let count = possible().count() as f64;
    let mean = possible().sum::<f64>() / count;
    let variance = possible().map(|x| (x - mean) * (x - mean)).sum::<f64>() / count;
    let least = f64::from(max) - f64::from(num) * variance.sqrt();
    keep(logits, |_, logit| f64::from(logit) >= least);
}

/// Leaves the `k` likeliest tokens; 0: all.
pub(super) fn top_k(logits: &mut [f32], k: usize) {
    let mut keys = Vec::new();
    select::top_k(logits, k, &mut keys);
    if let Some(&least) = keys.last() {
        keep(logits, |id, logit| key(logit, id) >= least);
    }
}

/// Leaves the tokens whose surprise, the negative logarithm of their probability, is nearest to
/// what is expected, the entropy: so many that their probabilities reach `p`. Equally near ones go
/// together.
///
/// With `e` the exponent of a token's weight the distance is `|e - sum(probability * e)|`: both the
/// surprise and its expectation hold the logarithm of the same sum.
pub(super) fn typical(logits: &mut [f32], softmax: Softmax, p: f32) {
    let exponent = |logit: f32| (logit - softmax.max) * softmax.scale;
    let (mut total, mut dot) = (0.0, 0.0);
    let mut all = Vec::with_capacity(logits.len());
    let mut weights = [0.0; GROUP];
    for group in logits.chunks(GROUP) {
        softmax.weights(group, &mut weights);
        for (logit, weight) in group.iter().zip(weights).filter(|(_, weight)| *weight > 0.0) {
            total += f64::from(weight);
            dot += f64::from(weight) * f64::from(exponent(*logit));
            all.push((exponent(*logit), weight));
        }
    }
    let expected = dot / total;
    let distance = |exponent: f32| (f64::from(exponent) - expected).abs() as f32;
    all.iter_mut().for_each(|(exponent, _)| *exponent = distance(*exponent));
    all.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let mut sum = 0.0;
    let last = all.iter().find(|(_, weight)| {
        sum += f64::from(*weight);
        sum >= f64::from(p) * total
    });
    let Some((radius, _)) = last.or(all.last()) else { return };
    keep(logits, |_, logit| distance(exponent(logit)) <= *radius);
}

/// Leaves out all candidates of at least this probability but the least likely of them.
pub(super) fn exclude_top_choices(candidates: &mut Vec<Candidate>, threshold: f32) {
    let total: f64 = candidates.iter().map(|candidate| f64::from(candidate.weight)).sum();
    let least_weight = f64::from(threshold) * total;
    let is_top = |candidate: &&Candidate| f64::from(candidate.weight) >= least_weight;
    let tops = || candidates.iter().filter(is_top).map(|candidate| candidate.key());
    if let (Some(least), 2..) = (tops().min(), tops().count()) {
        candidates.retain(|candidate| candidate.key() <= least);
    }
}

/// Makes tokens impossible that `keeps` does not keep; NaN becomes impossible anyway.
fn keep(logits: &mut [f32], keeps: impl Fn(usize, f32) -> bool) {
    for (id, logit) in logits.iter_mut().enumerate() {
        if logit.is_nan() || !keeps(id, *logit) {
            *logit = f32::NEG_INFINITY;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::SimdLevel;

    fn kept(logits: &[f32]) -> Vec<usize> {
        (0..logits.len()).filter(|id| logits[*id] > f32::NEG_INFINITY).collect()
    }

    #[test]
    fn top_n_sigma_counts_standard_deviations_from_the_greatest() {
        // Mean 3 and standard deviation 2 of the possible ones.
        let logits = [1.0, 1.0, 5.0, f32::NEG_INFINITY, 5.0, f32::NAN];
        let check = |num, expected: &[usize]| {
            let mut logits = logits;
            top_n_sigma(&mut logits, 5.0, num);
            assert_eq!(kept(&logits), expected, "{num}");
        };
        check(1.9, &[2, 4]);
        check(2.0, &[0, 1, 2, 4]);
        check(0.01, &[2, 4]);
    }

    #[test]
    fn typical_keeps_what_surprises_as_expected() {
        // Surprises 0.69, 1.39, 2.08 and 2.08; entropy 1.21.
        let logits = [0.5_f32, 0.25, 0.125, 0.125].map(f32::ln);
        let check = |p, expected: &[usize]| {
            let mut logits = logits;
            let softmax = Softmax { simd: SimdLevel::detect(), max: logits[0], scale: 1.0 };
            typical(&mut logits, softmax, p);
            assert_eq!(kept(&logits), expected, "{p}");
        };
        check(0.2, &[1]);
        check(0.3, &[0, 1]);
        check(0.74, &[0, 1]);
        check(0.8, &[0, 1, 2, 3]);
    }

    #[test]
    fn xtc_leaves_the_least_of_the_top_choices() {
        let check = |threshold, expected: &[u32]| {
            let weights = [1.0, 0.6, 0.6, 0.2, 0.1]; // Sum 2.5.
            let mut candidates: Vec<Candidate> =
                (0..).zip(weights).map(|(id, weight)| Candidate { id, weight }).collect();
            exclude_top_choices(&mut candidates, threshold);
            let ids: Vec<u32> = candidates.iter().map(|candidate| candidate.id).collect();
            assert_eq!(ids, expected, "{threshold}");
        };
        check(0.5, &[0, 1, 2, 3, 4]);
        check(0.3, &[0, 1, 2, 3, 4]);
        check(0.2, &[2, 3, 4]);
        check(0.07, &[3, 4]);
        check(0.0, &[4]);
    }

    #[test]
    fn top_k_leaves_k() {
        let mut logits = [1.0, 3.0, 2.0, 3.0];
        top_k(&mut logits, 0);
        assert_eq!(kept(&logits), [0, 1, 2, 3]);
        top_k(&mut logits, 2);
        assert_eq!(kept(&logits), [1, 3]);
    }
}
