//! Logprobs in the shapes of completions and of chat completions.

use inflight_tokenizer::Tokenizer;
use schemars::JsonSchema;
use serde::{Serialize, Serializer};

use crate::error::ApiError;
use crate::generation::ScoredToken;

/// Most alternatives per token.
pub(crate) const MAX_TOP_LOGPROBS: u32 = 20;
/// JSON has no infinity: what a banned token gets, as in vLLM.
const LOWEST: f32 = -9999.0;

/// Checks how many alternatives were asked for.
pub(crate) fn check_count(param: &'static str, count: u32) -> Result<u32, ApiError> {
    if count > MAX_TOP_LOGPROBS {
        let reason = format!("is {count}; it must be from 0 to {MAX_TOP_LOGPROBS}");
        return Err(ApiError::invalid(param, reason));
    }
    Ok(count)
}

/// A completion's logprobs: parallel lists, one entry for each generated token.
#[derive(Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    #[schemars(with = "Vec<std::collections::BTreeMap<String, f32>>")]
    top_logprobs: Vec<TopLogprobs>,
    /// Where tokens start, in characters of the text.
    text_offset: Vec<usize>,
}

/// The alternatives and, if it is none of them, the chosen token; an object in JSON.
#[derive(Debug, PartialEq)]
struct TopLogprobs(Vec<(String, f32)>);

impl TopLogprobs {
    fn new(tokenizer: &Tokenizer, scored: &ScoredToken) -> Self {
        let mut named: Vec<(String, f32)> = Vec::with_capacity(scored.top.len() + 1);
        for &(token, logprob) in scored.top.iter().chain(&[(scored.token, scored.logprob)]) {
            let name = unique_name(tokenizer.token_bytes(token));
            // Tokens may share a text; the likelier one has come before.
            if named.iter().all(|(other, _)| *other != name) {
                named.push((name, finite(logprob)));
            }
        }
        Self(named)
    }
}

impl Serialize for TopLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, logprob)| (name, logprob)))
    }
}

impl CompletionLogprobs {
    /// `None` without tokens, as it is when no logprobs were asked for.
    pub(crate) fn new(tokenizer: &Tokenizer, tokens: &[ScoredToken]) -> Option<Self> {
        let name = |token| unique_name(tokenizer.token_bytes(token));
        let logprobs = || Self {
            tokens: tokens.iter().map(|scored| name(scored.token)).collect(),
            token_logprobs: tokens.iter().map(|scored| finite(scored.logprob)).collect(),
            top_logprobs: tokens.iter().map(|scored| TopLogprobs::new(tokenizer, scored)).collect(),
            text_offset: tokens.iter().map(|scored| scored.offset).collect(),
        };
        (!tokens.is_empty()).then(logprobs)
    }
}

/// A chat completion's logprobs.
#[derive(Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct ChatLogprobs {
    pub(crate) content: Vec<ChatLogprob>,
    refusal: (),
}

/// A token and what might have come instead.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct ChatLogprob {
    #[serde(flatten)]
    chosen: TokenLogprob,
    top_logprobs: Vec<TokenLogprob>,
}

#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
struct TokenLogprob {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl ChatLogprobs {
    /// `None` without tokens, as it is when no logprobs were asked for.
    pub(crate) fn new(tokenizer: &Tokenizer, tokens: &[ScoredToken]) -> Option<Self> {
        let one = |token, logprob| {
            let text = tokenizer.token_text(token);
            TokenLogprob {
                token: text.text.into_owned(),
                logprob: finite(logprob),
                bytes: text.bytes.to_vec(),
            }
        };
        let content = tokens.iter().map(|scored| ChatLogprob {
            chosen: one(scored.token, scored.logprob),
            top_logprobs: scored.top.iter().map(|&(token, logprob)| one(token, logprob)).collect(),
        });
        (!tokens.is_empty()).then(|| Self { content: content.collect(), refusal: () })
    }
}

fn finite(logprob: f32) -> f32 {
    logprob.max(LOWEST)
}

/// The token's text; if it is no whole text, its bytes as OpenAI writes them, since an object's
/// keys must tell tokens apart.
fn unique_name(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => {
            let escaped = bytes.iter().map(|byte| format!("\\x{byte:02x}"));
            format!("bytes:{}", escaped.collect::<String>())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_tokens_apart() {
        assert_eq!(unique_name("é".as_bytes()), "é");
        assert_eq!(unique_name(b"\xf0\x9f"), "bytes:\\xf0\\x9f");
        assert_eq!(finite(f32::NEG_INFINITY), -9999.0);
        assert_eq!(finite(-0.5), -0.5);
    }
}
