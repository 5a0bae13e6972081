//! What a request must yield, from the request alone: neither engine nor schedule has a part in it.

use inflight_backend::SamplingRow;
use inflight_engine::{FinishReason, RequestLimits, RequestSpec, SamplingParams};

use crate::device::{Seen, count_value, draw, kv_value};

/// Tokens, and why they end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Expected {
    pub(crate) tokens: Vec<u32>,
    pub(crate) finish: FinishReason,
}

/// Draws all tokens of a request that is left in peace.
pub(crate) fn expected(spec: &RequestSpec, limits: &RequestLimits) -> Expected {
    let mut all = spec.prompt.clone();
    let prompt_len = all.len();
    let max_tokens = spec.max_tokens.unwrap_or(limits.max_sequence_len() - prompt_len);
    let counted = counts_tokens(&spec.sampling);
    let mut seen = Seen::default();
    let mut num_seen = 0;
    loop {
        for (position, &token) in all.iter().enumerate().skip(num_seen) {
            seen.context = seen.context.wrapping_add(kv_value(token, position as u32));
            let value = count_value(token, position < prompt_len);
            seen.counts = if counted { seen.counts.wrapping_add(value) } else { 0 };
        }
        num_seen = all.len();
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
        let spec = RequestSpec { prompt: vec![1, 2, 3], ..RequestSpec::default() };
        let whole = expected(&spec, &limits);
        assert_eq!((whole.tokens.len(), whole.finish), (9, FinishReason::Length));
        let short = expected(&RequestSpec { max_tokens: Some(4), ..spec.clone() }, &limits);
        assert_eq!(short.tokens, whole.tokens[..4]);
        let token = whole.tokens[2];
        let stop_token_ids = vec![token];
        let stopped = expected(&RequestSpec { stop_token_ids, ..spec }, &limits);
        assert_eq!(stopped.finish, FinishReason::Stop { token });
        assert_eq!(stopped.tokens.last(), Some(&token));
    }
}
