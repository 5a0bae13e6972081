//! Drawing a token by inverting the distribution's cumulative sum, in order of ids.

use super::filter::Candidate;
use crate::cpu::kernels::exp::Softmax;

/// Tokens whose weights are computed, summed and remembered as one number.
pub(super) const GROUP: usize = 256;

/// The weights of a group of logits, those below `least` set to zero.
pub(super) fn group_weights(
    group: &[f32],
    softmax: Softmax,
    least: f32,
    weights: &mut [f32; GROUP],
) -> usize {
    softmax.weights(group, weights);
    for weight in &mut weights[..group.len()] {
        *weight = if *weight >= least { *weight } else { 0.0 };
    }
    group.len()
}

/// Sum of up to [`GROUP`] weights.
pub(super) fn sum(weights: &[f32]) -> f64 {
    // Eight sums, so that additions need not wait for each other.
    let mut sums = [0.0; 8];
    for chunk in weights.chunks(8) {
        for (sum, weight) in sums.iter_mut().zip(chunk) {
            *sum += f64::from(*weight);
        }
    }
    sums.iter().sum()
}

/// Draws among all tokens whose weight is at least `least`.
pub(super) fn from_all(logits: &[f32], softmax: Softmax, least: f32, uniform: f64) -> u32 {
    let mut weights = [0.0; GROUP];
    let mut sums = Vec::with_capacity(logits.len().div_ceil(GROUP));
    for group in logits.chunks(GROUP) {
        let len = group_weights(group, softmax, least, &mut weights);
        sums.push(sum(&weights[..len]));
    }
    let mut target = uniform * sums.iter().sum::<f64>();
    let mut last = None;
    for (i, sum) in sums.iter().enumerate().filter(|(_, sum)| **sum > 0.0) {
        last = Some(i);
        if target < *sum {
            break;
        }
        target -= sum;
    }
    // Rounding may carry the target past the last group, or past a group's last token.
    let Some(i) = last else { return 0 };
    let group = &logits[i * GROUP..logits.len().min((i + 1) * GROUP)];
    let len = group_weights(group, softmax, least, &mut weights);
    let tokens = weights[..len]
        .iter()
        .enumerate()
        .map(|(j, weight)| Candidate { id: (i * GROUP + j) as u32, weight: *weight });
    walk(tokens, target)
}

/// Draws among `candidates`, which are in order of ids.
pub(super) fn from_candidates(candidates: &[Candidate], uniform: f64) -> u32 {
    let total: f64 = candidates.iter().map(|candidate| f64::from(candidate.weight)).sum();
    walk(candidates.iter().copied(), uniform * total)
}

/// The first token at which the cumulative sum exceeds `target`, or else the last with any weight.
fn walk(candidates: impl Iterator<Item = Candidate>, mut target: f64) -> u32 {
    let mut token = 0;
    for candidate in candidates.filter(|candidate| candidate.weight > 0.0) {
        token = candidate.id;
        target -= f64::from(candidate.weight);
        if target < 0.0 {
            break;
        }
    }
    token
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{kernels::testing::normal, simd::SimdLevel};

    #[test]
    fn draws_invert_the_cumulative_sum() {
        let simd = SimdLevel::detect();
        let logits: Vec<f32> = normal(4, 1000).iter().map(|x| x * 3.0).collect();
        let max = logits.iter().copied().fold(f32::MIN, f32::max);
        let softmax = Softmax { simd, max, scale: 0.7 };
        let exact: Vec<f64> =
            logits.iter().map(|x| (f64::from(x - max) * f64::from(0.7_f32)).exp()).collect();
        let total: f64 = exact.iter().sum();
        let mut weights = vec![0.0; 1000];
        softmax.weights(&logits, &mut weights);
        let candidates: Vec<Candidate> =
            (0..).zip(weights).map(|(id, weight)| Candidate { id, weight }).collect();
        let mut before = 0.0;
        for (id, weight) in exact.iter().enumerate() {
            // The middle of the token's interval.
            let uniform = (before + weight / 2.0) / total;
            if weight / total > 1e-5 {
                assert_eq!(from_all(&logits, softmax, 0.0, uniform), id as u32);
                assert_eq!(from_candidates(&candidates, uniform), id as u32);
            }
            before += weight;
        }
    }

    #[test]
    fn the_ends_of_the_interval_give_tokens_with_weight() {
        let simd = SimdLevel::detect();
        let none = f32::NEG_INFINITY;
        let softmax = Softmax { simd, max: 1.0, scale: 1.0 };
        let logits = [none, 1.0, none, 1.0, none];
        let greatest = 1.0 - f64::EPSILON / 2.0;
        assert_eq!(from_all(&logits, softmax, 0.0, 0.0), 1);
        assert_eq!(from_all(&logits, softmax, 0.0, greatest), 3);
        let mut long = vec![none; 5000];
        long[1300] = 1.0;
        for uniform in [0.0, 0.5, greatest] {
            assert_eq!(from_all(&long, softmax, 0.0, uniform), 1300);
        }
        let candidates = [Candidate { id: 8, weight: 0.0 }, Candidate { id: 9, weight: 0.5 }];
        for uniform in [0.0, greatest] {
            assert_eq!(from_candidates(&candidates, uniform), 9);
        }
    }
}
