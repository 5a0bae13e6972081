//! Logprobs in the shapes of completions and of chat completions.

use inflight_tokenizer::Tokenizer;
use schemars::JsonSchema;
use serde::{Serialize, Serializer};

use super::prompt_logprobs::EchoedPrompt;
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

/// A completion's logprobs: parallel lists, one entry for each token of the text.
#[derive(Debug, Default, PartialEq, Serialize, JsonSchema)]
pub(crate) struct CompletionLogprobs {
    tokens: Vec<String>,
    /// Null for the first token of an echoed prompt.
    token_logprobs: Vec<Option<f32>>,
    #[schemars(with = "Vec<Option<std::collections::BTreeMap<String, f32>>>")]
    top_logprobs: Vec<Option<TopLogprobs>>,
    /// Where tokens start, in characters of the text.
    text_offset: Vec<usize>,
}

/// The alternatives and, if it is none of them, the chosen token; an object in JSON.
#[derive(Debug, PartialEq)]
struct TopLogprobs(Vec<(String, f32)>);

impl TopLogprobs {
    fn new(tokenizer: &Tokenizer, top: &[(u32, f32)], chosen: (u32, f32)) -> Self {
        let mut named: Vec<(String, f32)> = Vec::with_capacity(top.len() + 1);
        for &(token, logprob) in top.iter().chain(&[chosen]) {
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
    /// `offset`: characters before the generated text.
    pub(crate) fn new(
        tokenizer: &Tokenizer,
        tokens: &[ScoredToken],
        offset: usize,
    ) -> Option<Self> {
        (!tokens.is_empty()).then(|| {
            let mut logprobs = Self::default();
            logprobs.extend(tokenizer, tokens, offset);
            logprobs
        })
    }

    /// The tokens of a prompt that is echoed, then those that were generated. `num_top`: how many
    /// alternatives are told.
    pub(crate) fn with_prompt(
        tokenizer: &Tokenizer,
        prompt: &EchoedPrompt,
        tokens: &[ScoredToken],
        num_top: u32,
    ) -> Self {
        let mut logprobs = Self { text_offset: prompt.offsets.clone(), ..Self::default() };
        logprobs.push(tokenizer, prompt.first, None);
        for scored in &prompt.rest {
            let num_top = scored.top_logprobs.len().min(num_top as usize);
            let top = &scored.top_logprobs[..num_top];
            logprobs.push(tokenizer, scored.token, Some((scored.logprob, top)));
        }
        logprobs.extend(tokenizer, tokens, prompt.num_chars);
        logprobs
    }

    /// `offset`: characters before the generated text.
    fn extend(&mut self, tokenizer: &Tokenizer, tokens: &[ScoredToken], offset: usize) {
        for scored in tokens {
            self.push(tokenizer, scored.token, Some((scored.logprob, &scored.top)));
            self.text_offset.push(offset + scored.offset);
        }
    }

    fn push(&mut self, tokenizer: &Tokenizer, token: u32, scored: Option<(f32, &[(u32, f32)])>) {
        self.tokens.push(unique_name(tokenizer.token_bytes(token)));
        self.token_logprobs.push(scored.map(|(logprob, _)| finite(logprob)));
        let top = scored.map(|(logprob, top)| TopLogprobs::new(tokenizer, top, (token, logprob)));
        self.top_logprobs.push(top);
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

pub(crate) fn finite(logprob: f32) -> f32 {
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
