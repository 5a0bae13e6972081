//! Which tokens may be drawn: top-k, then min-p, then top-p, each among what the one before left.
//!
//! Ties are broken by the lowest id everywhere, so that top-k keeps exactly k tokens and top-k 1 is
//! greedy. (vLLM keeps all that tie with the k-th.)

use super::{
    draw::{GROUP, group_weights, sum},
    select::{for_each_at_least, top_k},
};
use crate::{SamplingRow, cpu::kernels::exp::Softmax};

/// A token that may be drawn. Weights are relative to the likeliest token's, which is 1.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub(super) struct Candidate {
    pub(super) id: u32,
    pub(super) weight: f32,
}

impl Candidate {
    /// Greater for likelier tokens, and for lower ids among equals.
    pub(super) fn key(self) -> u64 {
        // The bits of positive numbers grow with them.
        u64::from(self.weight.to_bits()) << 32 | u64::from(!self.id)
    }
}

/// What a row asks for, in its plainest form.
pub(super) struct Filter {
    /// `None`: all.
    top_k: Option<usize>,
    /// At least this fraction of the likeliest token's weight; 0: all.
    pub(super) min_p: f32,
    /// `None`: all.
    top_p: Option<f64>,
}

impl Filter {
    pub(super) fn new(options: &SamplingRow, vocab_size: usize) -> Self {
        let top_k = options.top_k as usize;
        Self {
            top_k: (1..vocab_size).contains(&top_k).then_some(top_k),
            min_p: options.min_p.clamp(0.0, 1.0).max(0.0),
            top_p: (options.top_p < 1.0).then_some(f64::from(options.top_p)),
        }
    }

    /// Whether a token's own weight tells if it may be drawn.
    pub(super) fn only_min_p(&self) -> bool {
        self.top_k.is_none() && self.top_p.is_none()
    }

    /// The tokens that may be drawn, in order of ids; at least one.
    pub(super) fn collect(
        &self,
        logits: &[f32],
        softmax: Softmax,
        candidates: &mut Vec<Candidate>,
    ) {
        candidates.clear();
        let total = match self.top_k {
            Some(k) => {
                self.collect_top_k(logits, softmax, k, candidates);
                candidates.iter().map(|candidate| f64::from(candidate.weight)).sum()
            }
            None => self.collect_likely(logits, softmax, candidates),
        };
        if let Some(top_p) = self.top_p {
            let least = nucleus(candidates, top_p * total);
            candidates.retain(|candidate| candidate.key() >= least);
        }
    }

    fn collect_top_k(
        &self,
        logits: &[f32],
        softmax: Softmax,
        k: usize,
        candidates: &mut Vec<Candidate>,
    ) {
        let mut keys = Vec::new();
        top_k(logits, k, &mut keys);
        let Some(least) = keys.last() else { return };
        for_each_at_least(logits, *least, |id, logit| {
            candidates.push(Candidate { id, weight: logit });
        });
        let mut weights = [0.0; GROUP];
        for group in candidates.chunks_mut(GROUP) {
            let mut logits = [0.0; GROUP];
            for (logit, candidate) in logits.iter_mut().zip(&*group) {
                *logit = candidate.weight;
            }
            softmax.weights(&logits[..group.len()], &mut weights);
            for (candidate, weight) in group.iter_mut().zip(weights) {
                candidate.weight = weight;
            }
        }
        candidates.retain(|candidate| candidate.weight > 0.0 && candidate.weight >= self.min_p);
    }

    /// All tokens that top-p can possibly keep. Gives back the sum of all weights from min-p on.
    ///
    /// Tokens lighter than `(1 - p) * total / vocab_size` together weigh less than the `(1 - p)`
    /// that top-p may leave out, so that all it keeps are heavier.
    fn collect_likely(
        &self,
        logits: &[f32],
        softmax: Softmax,
        candidates: &mut Vec<Candidate>,
    ) -> f64 {
        let mut weights = [0.0; GROUP];
        let mut sums = Vec::with_capacity(logits.len().div_ceil(GROUP));
        for group in logits.chunks(GROUP) {
            let len = group_weights(group, softmax, self.min_p, &mut weights);
            sums.push(sum(&weights[..len]));
        }
        let total: f64 = sums.iter().sum();
        let rest = 1.0 - self.top_p.unwrap_or(1.0).clamp(0.0, 1.0);
        // A little less, for what rounding does to the sums.
        let least = 0.999 * rest * total / logits.len() as f64;
        for (i, group) in logits.chunks(GROUP).enumerate().filter(|(i, _)| sums[*i] >= least) {
            let len = group_weights(group, softmax, self.min_p, &mut weights);
            for (j, weight) in weights[..len].iter().enumerate() {
                if *weight > 0.0 && f64::from(*weight) >= least {
                    candidates.push(Candidate { id: (i * GROUP + j) as u32, weight: *weight });
                }
            }
        }
        total
    }
}

/// The least key of the shortest run of likeliest candidates that weighs at least `target`.
///
/// Halves the candidates until few are left: linear on average, and in no case a sort of all.
fn nucleus(candidates: &[Candidate], target: f64) -> u64 {
    const FEW: usize = 32;
    let weight = |key: &u64| f64::from(f32::from_bits((key >> 32) as u32));
    let mut keys: Vec<u64> = candidates.iter().map(|candidate| candidate.key()).collect();
    let mut keys = keys.as_mut_slice();
    let mut kept = 0.0;
    while keys.len() > FEW {
        let half = keys.len() / 2;
        keys.select_nth_unstable_by(half, |a, b| b.cmp(a));
        let (heavier, lighter) = keys.split_at_mut(half);
        let sum: f64 = heavier.iter().map(weight).sum();
        if kept + sum >= target {
            keys = heavier;
        } else {
            kept += sum;
            keys = lighter;
        }
    }
    keys.sort_unstable_by(|a, b| b.cmp(a));
    let last = keys.iter().find(|key| {
        kept += weight(key);
        kept >= target
    });
    // Rounding may leave the sum a little short of the target: then all are kept.
    last.or(keys.last()).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cpu::{kernels::testing::normal, simd::SimdLevel};

    fn ids(options: &SamplingRow, logits: &[f32]) -> Vec<u32> {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let scale = options.temperature.recip();
        let mut candidates = vec![Candidate { id: 77, weight: 0.5 }];
        let softmax = Softmax { simd: SimdLevel::detect(), max, scale };
        Filter::new(options, logits.len()).collect(logits, softmax, &mut candidates);
        candidates.iter().map(|candidate| candidate.id).collect()
    }

    const ALL: SamplingRow = SamplingRow { temperature: 1.0, ..SamplingRow::GREEDY };

    /// Logits with probabilities 0.1, 0.4, 0.2, 0.3.
    fn four() -> Vec<f32> {
        [0.1, 0.4, 0.2, 0.3].map(f32::ln).to_vec()
    }

    #[test]
    fn top_p_keeps_the_shortest_run_that_reaches_it() {
        let check = |top_p, expected: &[u32]| {
            assert_eq!(ids(&SamplingRow { top_p, ..ALL }, &four()), expected, "top_p {top_p}");
        };
        check(0.95, &[0, 1, 2, 3]);
        check(0.89, &[1, 2, 3]);
        check(0.71, &[1, 2, 3]);
        check(0.69, &[1, 3]);
        check(0.41, &[1, 3]);
        check(0.39, &[1]);
        check(1e-9, &[1]);
        check(0.0, &[1]);
        check(-1.0, &[1]);
    }

    #[test]
    fn top_p_counts_what_top_k_and_min_p_left() {
        // Of the two kept, 4/7 and 3/7.
        let options = SamplingRow { top_k: 2, ..ALL };
        assert_eq!(ids(&SamplingRow { top_p: 0.56, ..options }, &four()), [1]);
        assert_eq!(ids(&SamplingRow { top_p: 0.58, ..options }, &four()), [1, 3]);
        // Of the three kept, 4/9, 3/9 and 2/9.
        let options = SamplingRow { min_p: 0.45, ..ALL };
        assert_eq!(ids(&SamplingRow { top_p: 0.43, ..options }, &four()), [1]);
        assert_eq!(ids(&SamplingRow { top_p: 0.76, ..options }, &four()), [1, 3]);
        assert_eq!(ids(&SamplingRow { top_p: 0.79, ..options }, &four()), [1, 2, 3]);
        let options = SamplingRow { top_k: 3, ..options };
        assert_eq!(ids(&SamplingRow { top_p: 0.79, ..options }, &four()), [1, 2, 3]);
        assert_eq!(ids(&SamplingRow { min_p: 0.6, ..options }, &four()), [1, 3]);
    }

    #[test]
    fn ties_go_to_the_lowest_ids() {
        let logits = [1.0, 2.0, 2.0, 2.0, 2.0];
        assert_eq!(ids(&SamplingRow { top_k: 1, ..ALL }, &logits), [1]);
        assert_eq!(ids(&SamplingRow { top_k: 3, ..ALL }, &logits), [1, 2, 3]);
        assert_eq!(ids(&SamplingRow { top_p: 0.3, ..ALL }, &logits), [1, 2]);
    }

    #[test]
    fn odd_options_keep_at_least_the_likeliest() {
        let check = |options: SamplingRow, expected: &[u32]| {
            assert_eq!(ids(&options, &four()), expected);
        };
        check(SamplingRow { top_p: 0.0, temperature: 1e30, ..ALL }, &[0]);
        check(SamplingRow { top_p: 0.0, temperature: f32::INFINITY, ..ALL }, &[0]);
        check(SamplingRow { top_p: 0.5, temperature: 1e-30, ..ALL }, &[1]);
        check(SamplingRow { top_p: 0.999, min_p: 7.0, ..ALL }, &[1]);
        check(SamplingRow { top_p: 0.9999, min_p: f32::NAN, ..ALL }, &[0, 1, 2, 3]);
        check(SamplingRow { top_k: u32::MAX, top_p: 0.39, ..ALL }, &[1]);
    }

    #[derive(Debug, Clone)]
    struct Case {
        logits: Vec<f32>,
        options: SamplingRow,
    }

    fn cases() -> impl Strategy<Value = Case> {
        let filters = (0_u32..60, 0.01_f32..1.2, 0.0_f32..0.5, 0.3_f32..4.0);
        (1_usize..1500, any::<u64>(), 0.1_f32..6.0, filters).prop_map(
            |(len, seed, spread, (top_k, top_p, min_p, temperature))| {
                let logits = normal(seed, len).iter().map(|x| x * spread).collect();
                let options = SamplingRow { top_k, top_p, min_p, temperature, ..ALL };
                Case { logits, options }
            },
        )
    }

    /// What is kept, by sorting everything, in f64. `None` where rounding decides.
    fn oracle(case: &Case) -> Option<Vec<u32>> {
        let options = &case.options;
        let mut sorted: Vec<(f64, usize)> = case
            .logits
            .iter()
            .enumerate()
            .map(|(id, x)| (f64::from(*x) / f64::from(options.temperature), id))
            .collect();
        sorted.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let top = sorted[0].0;
        let k = if options.top_k == 0 { sorted.len() } else { options.top_k as usize };
        sorted.truncate(k);
        let near = |a: f64, b: f64| (a - b).abs() < 1e-5;
        let weights = sorted.iter().map(|(x, id)| ((x - top).exp(), *id));
        let min_p = f64::from(options.min_p);
        if weights.clone().any(|(weight, _)| near(weight, min_p)) {
            return None;
        }
        let weights: Vec<_> = weights.filter(|(weight, _)| *weight >= min_p).collect();
        let total: f64 = weights.iter().map(|(weight, _)| weight).sum();
        let (mut sum, mut kept) = (0.0, Vec::new());
        for (weight, id) in weights {
            let share = sum / total;
            if options.top_p < 1.0 && near(share, f64::from(options.top_p)) {
                return None;
            }
            if options.top_p < 1.0 && share >= f64::from(options.top_p) {
                break;
            }
            kept.push(id as u32);
            sum += weight;
        }
        kept.sort_unstable();
        Some(kept)
    }

    proptest! {
        #[test]
        fn what_is_kept_agrees_with_sorting(case in cases()) {
            let filter = Filter::new(&case.options, case.logits.len());
            prop_assume!(!filter.only_min_p());
            if let Some(expected) = oracle(&case) {
                prop_assert_eq!(ids(&case.options, &case.logits), expected);
            }
        }
    }
}
