//! Penalties, bias and mask: what changes logits before a token is chosen.
//!
//! # Source
//! Repetition: Keskar et al., "CTRL", 2019, section 4.1, with Hugging Face's sign rule. Presence
//! and frequency: OpenAI's API reference ("mu[j] - c[j] * alpha_frequency - (c[j] > 0) *
//! alpha_presence"). Prompt tokens count for repetition only, as in vLLM.

use super::super::tracking::IN_PROMPT;
use crate::SamplingRow;

/// What changes the logits of one row.
pub(super) struct Adjustment<'a> {
    repetition: f32,
    presence: f32,
    frequency: f32,
    /// `[vocab_size]`, where the sequence is tracked and has a penalty.
    counts: Option<&'a [u32]>,
    /// What was staged with the step, then what came late: ids, and f32 as words.
    bias: [Bias<'a>; 2],
    /// Tokens that may be drawn, as [`crate::late`] says; `None`: all.
    pub(super) mask: Option<&'a [u32]>,
}

#[derive(Clone, Copy, Default)]
struct Bias<'a> {
    ids: &'a [u32],
    values: &'a [u32],
}

impl<'a> Adjustment<'a> {
    pub(super) fn new(options: &SamplingRow, counts: Option<&'a [u32]>) -> Self {
        let penalised = options.repetition_penalty != 1.0
            || options.presence_penalty != 0.0
            || options.frequency_penalty != 0.0;
        Self {
            repetition: options.repetition_penalty,
            presence: options.presence_penalty,
            frequency: options.frequency_penalty,
            counts: counts.filter(|_| penalised),
            bias: [Bias::default(); 2],
            mask: None,
        }
    }

    /// Adds to what is added already; to be called twice at most.
    pub(super) fn add_bias(&mut self, ids: &'a [u32], values: &'a [u32]) {
        let [first, second] = &mut self.bias;
        *(if first.ids.is_empty() { first } else { second }) = Bias { ids, values };
    }

    pub(super) fn changes_anything(&self) -> bool {
        let biased = self.bias.iter().any(|bias| !bias.ids.is_empty());
        self.counts.is_some() || biased || self.mask.is_some()
    }

    /// Penalties, then bias, then mask. A bias outside the vocabulary does nothing.
    pub(super) fn apply(&self, logits: &mut [f32]) {
        if let Some(counts) = self.counts {
            self.penalise(counts, logits);
        }
        for (id, value) in self.bias.iter().flat_map(|bias| bias.ids.iter().zip(bias.values)) {
            if let Some(logit) = logits.get_mut(*id as usize) {
                *logit += f32::from_bits(*value);
            }
        }
        if let Some(mask) = self.mask {
            hide(mask, logits);
        }
    }

    fn penalise(&self, counts: &[u32], logits: &mut [f32]) {
        const GROUP: usize = 32;
        for (logits, counts) in logits.chunks_mut(GROUP).zip(counts.chunks(GROUP)) {
            // Most of the vocabulary was never seen.
            if counts.iter().fold(0, |any, count| any | count) == 0 {
                continue;
            }
            for (logit, count) in logits.iter_mut().zip(counts) {
                if *count != 0 {
                    *logit = self.penalised(*logit, *count);
                }
            }
        }
    }

    /// A logit of a token that was seen.
    fn penalised(&self, logit: f32, count: u32) -> f32 {
        let scaled = if logit > 0.0 { logit / self.repetition } else { logit * self.repetition };
        match count & !IN_PROMPT {
            0 => scaled,
            times => scaled - self.frequency * times as f32 - self.presence,
        }
    }
}

/// Makes tokens whose bits are not set impossible.
fn hide(mask: &[u32], logits: &mut [f32]) {
    for (bits, logits) in mask.iter().zip(logits.chunks_mut(32)) {
        match *bits {
            0 => logits.fill(f32::NEG_INFINITY),
            u32::MAX => {}
            bits => {
                for (i, logit) in logits.iter_mut().enumerate() {
                    *logit = if bits >> i & 1 == 1 { *logit } else { f32::NEG_INFINITY };
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adjusted(options: SamplingRow, counts: &[u32], bias: &[(u32, f32)]) -> Vec<f32> {
        let (ids, values): (Vec<u32>, Vec<u32>) =
            bias.iter().map(|(id, value)| (*id, value.to_bits())).unzip();
        let mut adjustment = Adjustment::new(&options, Some(counts));
        adjustment.add_bias(&ids, &values);
        let mut logits = vec![2.0, -2.0, 0.0, 3.0, -1.0];
        let anything = options != SamplingRow::GREEDY || !bias.is_empty();
        assert_eq!(adjustment.changes_anything(), anything);
        adjustment.apply(&mut logits);
        logits
    }

    const COUNTS: [u32; 5] = [IN_PROMPT, 2, IN_PROMPT | 1, 0, IN_PROMPT | 3];

    #[test]
    fn repetition_divides_positive_and_multiplies_negative_logits_of_seen_tokens() {
        let options = SamplingRow { repetition_penalty: 2.0, ..SamplingRow::GREEDY };
        assert_eq!(adjusted(options, &COUNTS, &[]), [1.0, -4.0, 0.0, 3.0, -2.0]);
    }

    #[test]
    fn presence_and_frequency_count_outputs_alone() {
        let presence = SamplingRow { presence_penalty: 0.5, ..SamplingRow::GREEDY };
        assert_eq!(adjusted(presence, &COUNTS, &[]), [2.0, -2.5, -0.5, 3.0, -1.5]);
        let frequency = SamplingRow { frequency_penalty: 0.25, ..SamplingRow::GREEDY };
        assert_eq!(adjusted(frequency, &COUNTS, &[]), [2.0, -2.5, -0.25, 3.0, -1.75]);
        let reward = SamplingRow { frequency_penalty: -1.0, ..SamplingRow::GREEDY };
        assert_eq!(adjusted(reward, &COUNTS, &[]), [2.0, 0.0, 1.0, 3.0, 2.0]);
    }

    #[test]
    fn all_penalties_and_bias_in_order() {
        let options = SamplingRow {
            repetition_penalty: 2.0,
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            ..SamplingRow::GREEDY
        };
        let bias = [(3, f32::NEG_INFINITY), (0, 10.0), (1, -1.0), (99, 5.0)];
        let expected = [11.0, -6.0, -0.75, f32::NEG_INFINITY, -3.25];
        assert_eq!(adjusted(options, &COUNTS, &bias), expected);
    }

    #[test]
    fn late_bias_adds_to_bias_and_masked_tokens_are_impossible() {
        let mut adjustment = Adjustment::new(&SamplingRow::GREEDY, None);
        let value = |x: f32| x.to_bits();
        let (late_ids, late) = ([1, 70], [value(2.0), value(-3.0)]);
        adjustment.add_bias(&[1], &[0x3f80_0000]);
        adjustment.add_bias(&late_ids, &late);
        let mask = [u32::MAX, 0, 0b101_0011];
        adjustment.mask = Some(&mask);
        assert!(adjustment.changes_anything());
        let mut logits = vec![1.0; 71];
        adjustment.apply(&mut logits);
        let mut expected = vec![f32::NEG_INFINITY; 71];
        expected[..32].fill(1.0);
        expected[1] = 4.0;
        (expected[64], expected[65], expected[68], expected[70]) = (1.0, 1.0, 1.0, -2.0);
        assert_eq!(logits, expected);
    }

    #[test]
    fn nothing_asked_for_changes_nothing() {
        assert_eq!(adjusted(SamplingRow::GREEDY, &COUNTS, &[]), [2.0, -2.0, 0.0, 3.0, -1.0]);
    }
}
