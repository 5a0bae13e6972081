//! Drawing one token for every sampled row.
//!
//! Reading order: [`adjust`] (penalties, bias and mask), [`select`] (the likeliest tokens without
//! sorting), [`filter`] (top-k, top-p, min-p), [`truncate`] (rules that look at the whole
//! distribution), [`draw`], [`logprobs`].
//!
//! ```text
//! logits -+- log-softmax ---------------------------------> logprobs of the model itself
//!         |
//!         +- penalties - bias - mask -+- temperature 0 ----> the greatest, lowest id on ties
//!                                     |
//!                                     +- 1/temperature - top-n-sigma - top-k - typical - min-p
//!                                        - top-p - XTC - draw in order of ids
//! ```
//!
//! NaN counts as -infinity. A row without any finite logit gives token 0, and one with +infinity
//! the first such token: wrong logits end in a wrong token, not in a lost device.
//!
//! Invariant: a draw is a function of the row's logits, counts, bias and [`SamplingRow`] alone.
//!
//! # Source
//! Order and meaning of the steps: vLLM `v1/sample/sampler.py` and `ops/topk_topp_sampler.py`,
//! where the bias comes before the penalties.

mod adjust;
mod draw;
mod filter;
mod logprobs;
mod select;
mod truncate;

use std::cell::RefCell;

use adjust::Adjustment;
use filter::{Candidate, Filter};
use logprobs::{Logprobs, NO_LOGPROBS};

use super::{Cores, exp::Softmax};
use crate::{
    OutputLayout, SamplingRow,
    cpu::{pool::SharedMut, simd::SimdLevel},
    late::LateRow,
    philox,
};

/// Arguments of [`sample`].
#[allow(missing_docs)]
pub(crate) struct Sample<'a> {
    /// `[num_sampled, vocab_size]`.
    pub(crate) logits: &'a [f32],
    /// `[max_rows, vocab_size]`; see [`crate::ops::SamplingState`].
    pub(crate) token_counts: &'a [u32],
    /// `[num_sampled * 20]`.
    pub(crate) sampling: &'a [u32],
    pub(crate) bias_ids: &'a [u32],
    /// f32 as words.
    pub(crate) bias_values: &'a [u32],
    /// Laid out as [`crate::late`] says.
    pub(crate) late: &'a [u32],
    /// Laid out as [`OutputLayout`].
    pub(crate) outputs: &'a mut [u32],
    pub(crate) layout: OutputLayout,
    pub(crate) num_sampled: usize,
    pub(crate) vocab_size: usize,
}

/// Draws one token for every sampled row and writes it, and what else the row asked for, to the
/// output words.
///
/// Rows without logprobs get 0 as logprob; unused entries of the likeliest tokens are `u32::MAX`
/// and 0, also where fewer tokens have a probability at all.
pub(crate) fn sample(cores: Cores<'_>, args: Sample<'_>) {
    let mut results = vec![(0, NO_LOGPROBS); args.num_sampled];
    let places = SharedMut::new(&mut results);
    cores.pool.run(args.num_sampled, |row| {
        let words = &args.sampling[row * SamplingRow::WORDS..][..SamplingRow::WORDS];
        let options = SamplingRow::from_words(words);
        let logits = &args.logits[row * args.vocab_size..][..args.vocab_size];
        let adjustment = args.adjustment(&options);
        let token = choose(cores.simd, logits, &adjustment, &options);
        let logprobs = options
            .top_logprobs
            .map_or(NO_LOGPROBS, |num| Logprobs::of(cores.simd, logits, token, num as usize));
        // SAFETY: every row has a place of its own.
        unsafe { places.slice(row..row + 1)[0] = (token, logprobs) };
    });
    for (row, (token, logprobs)) in results.iter().enumerate() {
        args.outputs[args.layout.token(row)] = *token;
        args.outputs[args.layout.logprob(row)] = logprobs.drawn.to_bits();
        args.outputs[args.layout.top_ids(row)].copy_from_slice(&logprobs.top_ids);
        let top_logprobs = &mut args.outputs[args.layout.top_logprobs(row)];
        top_logprobs.copy_from_slice(&logprobs.top_logprobs.map(f32::to_bits));
    }
}

impl Sample<'_> {
    /// What changes the logits of a row.
    fn adjustment(&self, options: &SamplingRow) -> Adjustment<'_> {
        let counts = options.state_slot.map(|slot| {
            let start = slot as usize * self.vocab_size;
            &self.token_counts[start..start + self.vocab_size]
        });
        let bias = options.bias_start as usize..(options.bias_start + options.bias_len) as usize;
        let mut adjustment = Adjustment::new(options, counts);
        adjustment.add_bias(&self.bias_ids[bias.clone()], &self.bias_values[bias]);
        if let Some(row) = options.late_row {
            let at = LateRow::read(self.late, row, self.vocab_size);
            adjustment.add_bias(&self.late[at.bias_ids], &self.late[at.bias_values]);
            adjustment.mask = at.mask.map(|mask| &self.late[mask]);
        }
        adjustment
    }
}

thread_local! {
    /// Adjusted logits, kept between rows.
    static ADJUSTED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    /// Logits of which some rules left tokens out, likewise.
    static TRUNCATED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    /// Tokens that may be drawn, likewise.
    static CANDIDATES: RefCell<Vec<Candidate>> = const { RefCell::new(Vec::new()) };
}

/// The token of one row.
fn choose(
    simd: SimdLevel,
    logits: &[f32],
    adjustment: &Adjustment<'_>,
    options: &SamplingRow,
) -> u32 {
    if !adjustment.changes_anything() {
        return choose_adjusted(simd, logits, options);
    }
    ADJUSTED.with_borrow_mut(|adjusted| {
        adjusted.clear();
        adjusted.extend_from_slice(logits);
        adjustment.apply(adjusted);
        choose_adjusted(simd, adjusted, options)
    })
}

/// The token of one row, whose logits already have penalties and bias in them.
fn choose_adjusted(simd: SimdLevel, logits: &[f32], options: &SamplingRow) -> u32 {
    let max = select::max_logit(logits);
    let scale = options.temperature.recip();
    // Not a number, negative or so small that its reciprocal overflows: greedy as well.
    if !(options.temperature > 0.0 && scale.is_finite() && max.is_finite()) {
        return select::first_equal(logits, max);
    }
    let softmax = Softmax { simd, max, scale };
    if options.is_unusual() {
        return TRUNCATED.with_borrow_mut(|truncated| {
            truncated.clear();
            truncated.extend_from_slice(logits);
            choose_truncated(truncated, softmax, options)
        });
    }
    let filter = Filter::new(options, logits.len());
    let uniform = philox::uniform(options.seed, options.position);
    if filter.only_min_p() {
        return draw::from_all(logits, softmax, filter.min_p, uniform);
    }
    CANDIDATES.with_borrow_mut(|candidates| {
        filter.collect(logits, softmax, candidates);
        draw::from_candidates(candidates, uniform)
    })
}

/// The token of one row that has an unusual rule.
fn choose_truncated(logits: &mut [f32], mut softmax: Softmax, options: &SamplingRow) -> u32 {
    if options.top_n_sigma > 0.0 {
        truncate::top_n_sigma(logits, softmax.max, options.top_n_sigma);
    }
    if options.typical_p < 1.0 {
        truncate::top_k(logits, options.top_k as usize);
        truncate::typical(logits, softmax, options.typical_p);
        softmax.max = select::max_logit(logits);
    }
    let filter = Filter::new(options, logits.len());
    CANDIDATES.with_borrow_mut(|candidates| {
        filter.collect(logits, softmax, candidates);
        let chance = philox::second_uniform(options.seed, options.position);
        if chance < f64::from(options.xtc_probability) {
            truncate::exclude_top_choices(candidates, options.xtc_threshold);
        }
        draw::from_candidates(candidates, philox::uniform(options.seed, options.position))
    })
}

#[cfg(test)]
mod tests;
