//! What a request must yield, from the request alone: neither engine nor schedule has a part in it.

use inflight_backend::SamplingRow;
use inflight_engine::{FinishReason, KvKeep, KvWindow, RequestLimits, RequestSpec, SamplingParams};

use crate::device::{Seen, chosen, count_value, draw, kv_value, turned, with_layer};

/// Tokens, and why they end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Expected {
    pub(crate) tokens: Vec<u32>,
    pub(crate) finish: FinishReason,
}

/// What bounds how far back tokens see.
#[derive(Clone, Debug)]
pub(crate) struct Sees {
    /// Of each of the model's layers.
    pub(crate) windows: Vec<Option<usize>>,
    /// What is kept by choice is rounded up to blocks.
    pub(crate) block_size: usize,
}

/// Draws all tokens of a request that is left in peace.
pub(crate) fn expected(spec: &RequestSpec, limits: &RequestLimits, sees: &Sees) -> Expected {
    let mut all = spec.prompt.clone();
    let prompt_len = all.len();
    let max_tokens = spec.max_tokens.unwrap_or(limits.max_len(spec.kv_keep) - prompt_len);
    let keep = spec.kv_keep.unwrap_or(limits.kv.usual);
    let counted = counts_tokens(&spec.sampling);
    let mut seen = Seen::default();
    let mut num_seen = 0;
    let mut values: Vec<u64> = Vec::new();
    loop {
        for (position, &token) in all.iter().enumerate().skip(num_seen) {
            values.push(kv_value(token, position as u32));
            let value = count_value(token, position < prompt_len);
            seen.counts = if counted { seen.counts.wrapping_add(value) } else { 0 };
        }
        num_seen = all.len();
        seen.context = sees.context(keep, prompt_len, &values);
        let num_before = all.len() - prompt_len;
        let row = sampling_row(&spec.sampling, all.len(), counted);
        let bias = bias(spec, &all, num_before);
        let token = draw(seen, &row, &bias, limits.vocab_size as u32);
        all.push(token);
        let finish = if num_before >= spec.min_tokens && spec.stop_token_ids.contains(&token) {
            FinishReason::Stop { token }
        } else if num_before + 1 == max_tokens {
            FinishReason::Length
        } else {
            continue;
        };
        return Expected { tokens: all.split_off(prompt_len), finish };
    }
}

impl Sees {
    /// What the last of these tokens sees in all layers.
    fn context(&self, keep: KvKeep, prompt_len: usize, values: &[u64]) -> u64 {
        let sums = self.windows.iter().map(|window| self.sum(*window, keep, prompt_len, values));
        sums.fold(0, with_layer)
    }

    /// Sum of what it sees in a layer.
    fn sum(&self, window: Option<usize>, keep: KvKeep, prompt_len: usize, values: &[u64]) -> u64 {
        let start = window.map_or(0, |window| values.len().saturating_sub(window));
        match keep {
            KvKeep::All => sum(values[start..].iter().copied()),
            KvKeep::Latest(KvWindow { num_sinks, window }) => {
                let [num_sinks, window] = [num_sinks, window].map(|tokens| self.whole(tokens));
                // An eighth of the window goes at once, in whole blocks.
                let stride = (window / 8 / self.block_size).max(1) * self.block_size;
                let over = values.len().saturating_sub(num_sinks + window);
                match over.div_ceil(stride) * stride {
                    0 => sum(values.iter().copied()),
                    gone => {
                        let sinks = values[..num_sinks].iter();
                        let latest = values[num_sinks + gone..].iter().copied();
                        sum(sinks.map(|&value| turned(value, gone as u32)).chain(latest))
                    }
                }
            }
            KvKeep::Attended(num_kept) => {
                let num_kept = self.whole(num_kept);
                if values.len() == prompt_len || prompt_len <= num_kept {
                    return sum(values.iter().copied());
                }
                let (prompt, answer) = values.split_at(prompt_len);
                let kept = chosen(prompt, num_kept, NUM_OBSERVED).into_iter();
                sum(kept.map(|place| prompt[place]).chain(answer.iter().copied()))
            }
        }
    }

    fn whole(&self, tokens: usize) -> usize {
        tokens.next_multiple_of(self.block_size)
    }
}

/// Tokens at a prompt's end that decide what stays of it.
const NUM_OBSERVED: usize = 32;

fn sum(values: impl Iterator<Item = u64>) -> u64 {
    values.fold(0, u64::wrapping_add)
}

fn counts_tokens(sampling: &SamplingParams) -> bool {
    sampling.repetition_penalty != 1.0
        || sampling.presence_penalty != 0.0
        || sampling.frequency_penalty != 0.0
}

fn sampling_row(sampling: &SamplingParams, position: usize, counted: bool) -> SamplingRow {
    SamplingRow {
        state_slot: counted.then_some(0),
        temperature: sampling.temperature,
        repetition_penalty: sampling.repetition_penalty,
        presence_penalty: sampling.presence_penalty,
        frequency_penalty: sampling.frequency_penalty,
        seed: sampling.seed,
        position: position as u32,
        ..SamplingRow::GREEDY
    }
}

/// Logit bias, stop tokens that must not come yet, and words that must not come at all.
fn bias(spec: &RequestSpec, tokens: &[u32], num_before: usize) -> Vec<(u32, f32)> {
    let mut bias = spec.sampling.logit_bias.clone();
    if num_before < spec.min_tokens {
        bias.extend(spec.stop_token_ids.iter().map(|&token| (token, f32::NEG_INFINITY)));
    }
    for word in &spec.sampling.bad_words {
        if let Some((last, others)) = word.split_last()
            && tokens.ends_with(others)
        {
            bias.push((*last, f32::NEG_INFINITY));
        }
    }
    bias
}

#[cfg(test)]
mod tests {
    use inflight_engine::KvTerms;

    use super::*;

    #[test]
    fn ends_are_those_that_were_asked_for() {
        let limits = RequestLimits {
            max_model_len: 12,
            kv_cache_tokens: 100,
            vocab_size: 32,
            kv: KvTerms::UNBOUND,
        };
        let sees = Sees { windows: vec![None], block_size: 4 };
        let expected = |spec: &RequestSpec| expected(spec, &limits, &sees);
        let spec = RequestSpec { prompt: vec![1, 2, 3], ..RequestSpec::default() };
        let whole = expected(&spec);
        assert_eq!((whole.tokens.len(), whole.finish), (9, FinishReason::Length));
        let short = expected(&RequestSpec { max_tokens: Some(4), ..spec.clone() });
        assert_eq!(short.tokens, whole.tokens[..4]);
        let token = whole.tokens[2];
        let stop_token_ids = vec![token];
        let stopped = expected(&RequestSpec { stop_token_ids, ..spec });
        assert_eq!(stopped.finish, FinishReason::Stop { token });
        assert_eq!(stopped.tokens.last(), Some(&token));
    }
}
