//! How long a step takes, learned from the steps before.

use std::time::Duration;

use crate::batch::Batch;

/// What the time of a step depends on.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct StepLoad {
    /// Tokens that go through the model.
    pub(crate) num_tokens: f64,
    /// Rows that yield a token.
    pub(crate) num_sampled: f64,
    /// Keys and values that are read, in tokens.
    pub(crate) context: f64,
    /// Pairs of tokens in the attention of chunks.
    pub(crate) pairs: f64,
    /// 1 if some row has several tokens: such steps may be launched in another way.
    pub(crate) has_chunk: f64,
}

impl StepLoad {
    pub(crate) fn of(batch: &Batch) -> Self {
        let mut load = Self::default();
        for row in &batch.rows {
            load.add_row(row.start, row.len, row.samples);
        }
        load
    }

    /// Adds a row of `len` tokens behind `start` others.
    pub(crate) fn add_row(&mut self, start: usize, len: usize, samples: bool) {
        let (start, len) = (start as f64, len as f64);
        self.num_tokens += len;
        self.num_sampled += f64::from(u8::from(samples));
        self.context += start + len;
        if len > 1.0 {
            self.pairs += len * (start + len / 2.0);
            self.has_chunk = 1.0;
        }
    }
}

/// Tokens up to which a step is assumed to cost what reading the weights does, and beyond which it
/// costs arithmetic: each side has its own slope, so both kinds of devices are fitted.
const KNEE: f64 = 256.0;
const NUM_TERMS: usize = 7;
/// What turns loads into numbers near one, so that the sums keep their digits.
const SCALE: [f64; NUM_TERMS] = [1.0, 1e-2, 1e-3, 1e-2, 1e-5, 1e-7, 1.0];
/// Classes of steps by the logarithm of their tokens, with and without chunks. Each remembers on
/// its own, so that thousands of decodes do not wipe out what was learned from chunks.
const NUM_CLASSES: usize = 2 * NUM_SIZES;
const NUM_SIZES: usize = 18;
/// Steps that a class remembers, newer ones weighing more.
const MEMORY: f64 = 64.0;
/// Steps before predictions are made.
const MIN_STEPS: u64 = 8;
/// Rounds of coordinate descent after each step.
const NUM_ROUNDS: usize = 8;
/// Ratios of measured to predicted times that are remembered.
const NUM_RATIOS: usize = 256;

/// Sums of the normal equations of one class.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    /// Upper and lower half alike.
    products: [[f64; NUM_TERMS]; NUM_TERMS],
    targets: [f64; NUM_TERMS],
    weight: f64,
}

/// A sum of costs, none of them negative, fitted by least squares of relative errors: a constant,
/// tokens up to the knee, tokens beyond it, sampled rows, context, attention pairs, and another
/// constant for steps with chunks.
///
/// Pure: the same observations give the same predictions.
#[derive(Debug)]
pub(crate) struct StepModel {
    classes: [Sums; NUM_CLASSES],
    /// Seconds for each scaled term.
    costs: [f64; NUM_TERMS],
    num_steps: u64,
    /// Most tokens of a step observed: beyond twice this, nothing is predicted.
    max_tokens: f64,
    /// Measured over predicted, a ring.
    ratios: Vec<f64>,
    next_ratio: usize,
    /// What 99 of 100 steps stayed within, as a multiple of the prediction.
    margin: f64,
    /// What 199 of 200 did.
    wide_margin: f64,
}

impl Default for StepModel {
    fn default() -> Self {
        Self {
            classes: [Sums::default(); NUM_CLASSES],
            costs: [0.0; NUM_TERMS],
            num_steps: 0,
            max_tokens: 0.0,
            ratios: Vec::with_capacity(NUM_RATIOS),
            next_ratio: 0,
            margin: 1.0,
            wide_margin: 1.0,
        }
    }
}

impl StepModel {
    /// Learns from a step.
    pub(crate) fn observe(&mut self, load: &StepLoad, took: Duration) {
        let seconds = took.as_secs_f64();
        if seconds <= 0.0 {
            return;
        }
        let robustness = self.note_ratio(load, seconds);
        self.num_steps += 1;
        self.max_tokens = self.max_tokens.max(load.num_tokens);
        let terms = terms(load);
        let size = (load.num_tokens.max(1.0).log2() as usize).min(NUM_SIZES - 1);
        let class = size + NUM_SIZES * load.has_chunk as usize;
        // Errors count in proportion to the time itself.
        let weight = robustness / (seconds * seconds);
        self.classes[class].add(&terms, seconds, weight);
        self.fit();
    }

    /// What a step of this load will take, without margin; `None` while too little is known.
    pub(crate) fn predict(&self, load: &StepLoad) -> Option<f64> {
        (self.num_steps >= MIN_STEPS).then(|| self.raw(load))
    }

    /// By how much predictions must be stretched for 99 of 100 steps to stay within them.
    pub(crate) fn margin(&self) -> f64 {
        self.margin
    }

    /// As [`margin`](Self::margin), for 199 of 200: where 99 of 100 steps to come have to, and few
    /// of the steps remembered are of their kind.
    pub(crate) fn wide_margin(&self) -> f64 {
        self.wide_margin
    }

    /// Most tokens of a step for which the model can be trusted.
    pub(crate) fn trusted_tokens(&self) -> usize {
        (2.0 * self.max_tokens) as usize
    }

    fn raw(&self, load: &StepLoad) -> f64 {
        terms(load).iter().zip(&self.costs).map(|(term, cost)| term * cost).sum()
    }

    /// Remembers how far the prediction was off, and says how much the step is worth as evidence:
    /// less, the farther it is from all others.
    fn note_ratio(&mut self, load: &StepLoad, seconds: f64) -> f64 {
        let Some(predicted) = self.predict(load).filter(|&predicted| predicted > 0.0) else {
            return 1.0;
        };
        let ratio = seconds / predicted;
        if self.ratios.len() < NUM_RATIOS {
            self.ratios.push(ratio);
        } else {
            self.ratios[self.next_ratio] = ratio;
        }
        self.next_ratio = (self.next_ratio + 1) % NUM_RATIOS;
        if self.next_ratio.is_multiple_of(16) {
            self.update_margin();
        }
        (0.5 / (ratio - 1.0).abs()).min(1.0)
    }

    fn update_margin(&mut self) {
        let mut sorted = self.ratios.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let within =
            |part: usize, of: usize| sorted[(sorted.len() * part).div_ceil(of) - 1].clamp(1.0, 2.0);
        self.margin = within(99, 100);
        self.wide_margin = within(199, 200);
    }

    /// Minimises the squared errors by one cost at a time, keeping all of them positive.
    fn fit(&mut self) {
        let mut all = Sums::default();
        for class in self.classes.iter().filter(|class| class.weight > 0.0) {
            all.merge(class);
        }
        for _ in 0..NUM_ROUNDS {
            for term in 0..NUM_TERMS {
                let products = &all.products[term];
                if products[term] <= 0.0 {
                    continue;
                }
                let others: f64 = (0..NUM_TERMS)
                    .filter(|&other| other != term)
                    .map(|other| products[other] * self.costs[other])
                    .sum();
                self.costs[term] = ((all.targets[term] - others) / products[term]).max(0.0);
            }
        }
    }
}

impl Sums {
    fn add(&mut self, terms: &[f64; NUM_TERMS], seconds: f64, weight: f64) {
        let keep = 1.0 - 1.0 / MEMORY;
        for (i, row) in self.products.iter_mut().enumerate() {
            for (j, product) in row.iter_mut().enumerate() {
                *product = *product * keep + weight * terms[i] * terms[j];
            }
            self.targets[i] = self.targets[i] * keep + weight * terms[i] * seconds;
        }
        self.weight = self.weight * keep + weight;
    }

    fn merge(&mut self, other: &Self) {
        for i in 0..NUM_TERMS {
            for j in 0..NUM_TERMS {
                self.products[i][j] += other.products[i][j];
            }
            self.targets[i] += other.targets[i];
        }
    }
}

fn terms(load: &StepLoad) -> [f64; NUM_TERMS] {
    let below = load.num_tokens.min(KNEE);
    let raw = [
        1.0,
        below,
        load.num_tokens - below,
        load.num_sampled,
        load.context,
        load.pairs,
        load.has_chunk,
    ];
    std::array::from_fn(|i| raw[i] * SCALE[i])
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{StepLoad, StepModel};

    fn decodes(num_rows: usize, len: usize) -> StepLoad {
        let mut load = StepLoad::default();
        (0..num_rows).for_each(|_| load.add_row(len, 1, true));
        load
    }

    /// What was measured on an H200 with an 8B model: 5 ms for decodes, and 14 ms and 48 us a token
    /// more for a chunk.
    fn measured(load: &StepLoad) -> f64 {
        let num_prompt_tokens = load.num_tokens - 32.0;
        5e-3 + if load.has_chunk > 0.0 { 14e-3 + 48e-6 * num_prompt_tokens } else { 0.0 }
    }

    fn learned(outliers: bool) -> StepModel {
        let mut model = StepModel::default();
        for i in 0..400 {
            let mut load = decodes(32, 300 + i);
            if i % 4 == 0 {
                load.add_row(64 * i, 64 << (i / 4 % 6), false);
            }
            let slow = if outliers && i % 50 == 49 { 10.0 } else { 1.0 };
            model.observe(&load, Duration::from_secs_f64(slow * measured(&load)));
        }
        model
    }

    #[test]
    fn costs_of_decodes_and_of_chunks_are_told_apart() {
        for outliers in [false, true] {
            let model = learned(outliers);
            let mut load = decodes(32, 700);
            let check = |load: &StepLoad| {
                let (predicted, expected) = (model.predict(load).unwrap(), measured(load));
                let error = (predicted / expected - 1.0).abs();
                let most = if outliers { 0.15 } else { 0.05 };
                assert!(error < most, "{predicted} s, not {expected} s: {load:?}");
            };
            check(&load);
            // A size that was never seen, between two that were.
            load.add_row(5000, 700, false);
            check(&load);
        }
    }

    #[test]
    fn nothing_is_predicted_from_nothing() {
        let mut model = StepModel::default();
        assert_eq!(model.predict(&decodes(1, 1)), None);
        for _ in 0..20 {
            model.observe(&decodes(4, 100), Duration::from_millis(3));
        }
        let predicted = model.predict(&decodes(4, 100)).unwrap();
        assert!((predicted - 3e-3).abs() < 1e-4, "{predicted}");
        assert_eq!(model.trusted_tokens(), 8, "twice what was seen");
    }

    #[test]
    fn the_margin_covers_noise() {
        let mut model = StepModel::default();
        for i in 0..600 {
            let ms = 10.0 + f64::from(i * 7 % 10) * 0.2;
            model.observe(&decodes(8, 100), Duration::from_secs_f64(ms / 1e3));
        }
        let covered = model.predict(&decodes(8, 100)).unwrap() * model.margin();
        assert!((11.6e-3..12.5e-3).contains(&covered), "{covered}: the slowest take 11.8 ms");
    }
}
