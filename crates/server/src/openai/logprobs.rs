//! Logprobs in the shapes of completions and of chat completions.

use inflight_tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::{Map, Value};

use super::ApiError;
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
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    /// The alternatives and the chosen token itself.
    top_logprobs: Vec<Map<String, Value>>,
    /// Where tokens start, in characters of the text.
    text_offset: Vec<usize>,
}

impl CompletionLogprobs {
    pub(crate) fn new(tokenizer: &Tokenizer, tokens: &[ScoredToken]) -> Self {
        let name = |token| unique_name(tokenizer.token_bytes(token));
        let top = |scored: &ScoredToken| {
            let mut top: Map<String, Value> = scored
                .top
                .iter()
                .map(|&(token, logprob)| (name(token), finite(logprob).into()))
                .collect();
            top.entry(name(scored.token)).or_insert(finite(scored.logprob).into());
            top
        };
        Self {
            tokens: tokens.iter().map(|scored| name(scored.token)).collect(),
            token_logprobs: tokens.iter().map(|scored| finite(scored.logprob)).collect(),
            top_logprobs: tokens.iter().map(top).collect(),
            text_offset: tokens.iter().map(|scored| scored.offset).collect(),
        }
    }
}

/// A chat completion's logprobs.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct ChatLogprobs {
    content: Vec<ChatLogprob>,
    refusal: (),
}

#[derive(Debug, PartialEq, Serialize)]
struct ChatLogprob {
    #[serde(flatten)]
    chosen: TokenLogprob,
    top_logprobs: Vec<TokenLogprob>,
}

#[derive(Debug, PartialEq, Serialize)]
struct TokenLogprob {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl ChatLogprobs {
    pub(crate) fn new(tokenizer: &Tokenizer, tokens: &[ScoredToken]) -> Self {
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
        Self { content: content.collect(), refusal: () }
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
