//! Penalties and bias: what changes logits before a token is chosen.
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
    bias_ids: &'a [u32],
    /// f32 as words.
    bias_values: &'a [u32],
}

impl<'a> Adjustment<'a> {
    pub(super) fn new(
        options: &SamplingRow,
        counts: Option<&'a [u32]>,
        bias_ids: &'a [u32],
        bias_values: &'a [u32],
    ) -> Self {
        let penalised = options.repetition_penalty != 1.0
            || options.presence_penalty != 0.0
            || options.frequency_penalty != 0.0;
        Self {
            repetition: options.repetition_penalty,
            presence: options.presence_penalty,
            frequency: options.frequency_penalty,
            counts: counts.filter(|_| penalised),
            bias_ids,
            bias_values,
        }
    }

    pub(super) fn changes_anything(&self) -> bool {
        self.counts.is_some() || !self.bias_ids.is_empty()
    }

    /// Penalties, then bias. A bias outside the vocabulary does nothing.
    pub(super) fn apply(&self, logits: &mut [f32]) {
        if let Some(counts) = self.counts {
            self.penalise(counts, logits);
        }
        for (id, value) in self.bias_ids.iter().zip(self.bias_values) {
            if let Some(logit) = logits.get_mut(*id as usize) {
                *logit += f32::from_bits(*value);
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn adjusted(options: SamplingRow, counts: &[u32], bias: &[(u32, f32)]) -> Vec<f32> {
        let (ids, values): (Vec<u32>, Vec<u32>) =
            bias.iter().map(|(id, value)| (*id, value.to_bits())).unzip();
        let adjustment = Adjustment::new(&options, Some(counts), &ids, &values);
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
    fn nothing_asked_for_changes_nothing() {
        assert_eq!(adjusted(SamplingRow::GREEDY, &COUNTS, &[]), [2.0, -2.0, 0.0, 3.0, -1.0]);
    }
}
