//! How likely a prompt was: `prompt_logprobs`, in vLLM's form, and `echo` with `logprobs`.

use std::collections::BTreeMap;

use inflight_engine::PromptToken;
use inflight_tokenizer::{DecodeOptions, Tokenizer};
use schemars::JsonSchema;
use serde::Serialize;
use serde::ser::{SerializeMap, SerializeSeq, Serializer};

use super::logprobs::{MAX_TOP_LOGPROBS, finite};
use crate::error::ApiError;

/// Checks `prompt_logprobs`: how many alternatives are told at each place of the prompt.
///
/// # Errors
/// The number is not allowed, or the answer is to be streamed.
pub(crate) fn check_prompt_logprobs(
    count: Option<i64>,
    is_streaming: bool,
) -> Result<Option<u32>, ApiError> {
    let Some(asked) = count else { return Ok(None) };
    let invalid = |reason| ApiError::invalid("prompt_logprobs", reason);
    if is_streaming {
        return Err(invalid("are told in whole answers only; set `stream` to false".to_owned()));
    }
    match u32::try_from(asked) {
        Ok(count) if count <= MAX_TOP_LOGPROBS => Ok(Some(count)),
        _ => Err(invalid(format!("is {asked}; it must be from 0 to {MAX_TOP_LOGPROBS}"))),
    }
}

/// One entry for each token of a prompt. The first, which comes after nothing, is null; each other
/// is an object: by token id, the prompt's own token and the likeliest ones.
#[derive(Clone, Debug, PartialEq, JsonSchema)]
pub(crate) struct PromptLogprobs(
    #[schemars(with = "Vec<Option<BTreeMap<String, NamedLogprob>>>")] Vec<Vec<(u32, NamedLogprob)>>,
);

/// A token that came, or might have come.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
struct NamedLogprob {
    logprob: f32,
    /// Its place among all tokens, from 1; null if it is not among the first 20.
    rank: Option<u32>,
    decoded_token: String,
}

impl PromptLogprobs {
    /// `tokens`: the prompt's but the first. `num_top`: how many of the likeliest are told.
    pub(crate) fn new(tokenizer: &Tokenizer, tokens: &[PromptToken], num_top: u32) -> Self {
        let named = |token, logprob, rank| {
            let decoded_token = tokenizer.token_text(token).text.into_owned();
            (token, NamedLogprob { logprob: finite(logprob), rank, decoded_token })
        };
        let place = |scored: &PromptToken| {
            let own = named(scored.token, scored.logprob, scored.rank);
            let top = scored.top_logprobs.iter().zip(1..=num_top);
            let others = top.filter(|((token, _), _)| *token != scored.token);
            let others = others.map(|((token, logprob), rank)| named(*token, *logprob, Some(rank)));
            std::iter::once(own).chain(others).collect()
        };
        Self(tokens.iter().map(place).collect())
    }
}

impl Serialize for PromptLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.0.len() + 1))?;
        list.serialize_element(&())?;
        for place in &self.0 {
            list.serialize_element(&Place(place))?;
        }
        list.end()
    }
}

struct Place<'a>(&'a [(u32, NamedLogprob)]);

impl Serialize for Place<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (token, named) in self.0 {
            map.serialize_entry(&token.to_string(), named)?;
        }
        map.end()
    }
}

/// A prompt that is echoed with its logprobs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct EchoedPrompt {
    /// The first token; how likely it was is not told, since it comes after nothing.
    pub(crate) first: u32,
    /// The others.
    pub(crate) rest: Vec<PromptToken>,
    /// Where each token starts, in characters of the prompt.
    pub(crate) offsets: Vec<usize>,
    /// Characters of the whole prompt.
    pub(crate) num_chars: usize,
}

impl EchoedPrompt {
    /// `tokens`: the whole prompt; `num_chars`: of its text.
    pub(crate) fn new(
        tokenizer: &Tokenizer,
        tokens: &[u32],
        rest: Vec<PromptToken>,
        decode: DecodeOptions,
        num_chars: usize,
    ) -> Self {
        let mut decoder = tokenizer.decode_stream(decode);
        let mut end = 0;
        let offset = |token: &u32| {
            let start = end;
            end += decoder.push(*token).chars().count();
            start.min(num_chars)
        };
        let offsets = tokens.iter().map(offset).collect();
        Self { first: tokens[0], rest, offsets, num_chars }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts() {
        let check = |count, is_streaming, expected: Result<Option<u32>, ()>| {
            let checked = check_prompt_logprobs(count, is_streaming).map_err(|error| {
                assert!(error.to_string().starts_with("`prompt_logprobs`"), "{error}");
            });
            assert_eq!(checked, expected, "{count:?}");
        };
        check(None, true, Ok(None));
        check(Some(0), false, Ok(Some(0)));
        check(Some(20), false, Ok(Some(20)));
        check(Some(21), false, Err(()));
        check(Some(-1), false, Err(()));
        check(Some(1), true, Err(()));
    }
}
