//! What all responses have in common.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::prompt_logprobs::PromptLogprobs;
use crate::error::ApiError;
use crate::generation::Finish;
use crate::observe::name_answer;
use crate::random::random_id;
use crate::state::{ServerState, unix_time_s};
use crate::usage::TokenCounts;

/// Most outputs per prompt.
pub(crate) const MAX_N: usize = 128;

/// Fields that say what comes back, and how.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub(crate) struct OutputFields {
    pub(crate) model: Option<String>,
    n: Option<usize>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
}

/// How to stream.
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct StreamOptions {
    include_usage: Option<bool>,
    continuous_usage_stats: Option<bool>,
    #[schemars(extend("enum" = [false, null]))]
    include_obfuscation: Option<bool>,
}

/// Which chunks of a stream tell how many tokens there were.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamUsage {
    Never,
    /// In a chunk of its own at the end.
    AtEnd,
    /// Also, as of now, in every chunk.
    Always,
}

impl OutputFields {
    /// Outputs per prompt.
    pub(crate) fn n(&self) -> Result<usize, ApiError> {
        match self.n.unwrap_or(1) {
            n @ 1..=MAX_N => Ok(n),
            n => Err(ApiError::invalid("n", format!("is {n}; it must be from 1 to {MAX_N}"))),
        }
    }

    /// Whether and how to stream.
    pub(crate) fn stream(&self) -> Result<Option<StreamUsage>, ApiError> {
        let is_streaming = self.stream.unwrap_or(false);
        let Some(options) = self.stream_options else {
            return Ok(is_streaming.then_some(StreamUsage::Never));
        };
        if !is_streaming {
            return Err(ApiError::invalid("stream_options", "goes only with `stream`: true"));
        }
        if options.include_obfuscation == Some(true) {
            let param = "stream_options.include_obfuscation";
            return Err(ApiError::unsupported(param, "leave it out or set it to false"));
        }
        let is_set = |option: Option<bool>| option.unwrap_or(false);
        Ok(Some(match (is_set(options.include_usage), is_set(options.continuous_usage_stats)) {
            (false, false) => StreamUsage::Never,
            (true, false) => StreamUsage::AtEnd,
            (true, true) => StreamUsage::Always,
            (false, true) => {
                let param = "stream_options.continuous_usage_stats";
                return Err(ApiError::invalid(param, "goes only with `include_usage`: true"));
            }
        }))
    }
}

/// What a request cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptDetails,
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_tokens_details: Option<CompletionDetails>,
}

/// What of the prompts was found in the prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
struct PromptDetails {
    cached_tokens: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
struct CompletionDetails {
    reasoning_tokens: usize,
}

impl From<TokenCounts> for Usage {
    fn from(counts: TokenCounts) -> Self {
        let details = |reasoning_tokens| CompletionDetails { reasoning_tokens };
        Self {
            prompt_tokens: counts.prompt,
            completion_tokens: counts.completion,
            total_tokens: counts.prompt + counts.completion,
            prompt_tokens_details: PromptDetails { cached_tokens: counts.cached },
            completion_tokens_details: counts.reasoning.map(details),
        }
    }
}

/// What identifies a response, in all its chunks alike.
#[derive(Clone, Debug)]
pub(crate) struct ResponseHead {
    id: String,
    created_unix_s: u64,
    model: String,
    system_fingerprint: String,
}

impl ResponseHead {
    pub(crate) fn new(state: &ServerState, id_prefix: &str, model: String) -> Self {
        let id = random_id(id_prefix);
        name_answer(&id);
        Self {
            id,
            created_unix_s: unix_time_s(),
            model,
            system_fingerprint: state.system_fingerprint().to_owned(),
        }
    }

    /// A response or one of its chunks. `usage`: absent, null, or a count.
    pub(crate) fn envelope<C>(
        &self,
        object: &'static str,
        choices: Vec<C>,
        usage: Option<Option<Usage>>,
    ) -> Envelope<'_, C> {
        Envelope {
            id: &self.id,
            object,
            created: self.created_unix_s,
            model: &self.model,
            system_fingerprint: &self.system_fingerprint,
            choices,
            usage,
            prompt_logprobs: None,
        }
    }
}

/// The outer object of every response and chunk.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "AnswerOf{C}")]
pub(crate) struct Envelope<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    choices: Vec<C>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
    /// Of a chat's prompt, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_logprobs: Option<PromptLogprobs>,
}

/// Why a choice ended, in OpenAI's and vLLM's words.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub(crate) struct Ending {
    pub(crate) finish_reason: Option<&'static str>,
    /// The stop string or, unless it is the model's own end, the stop token.
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<StopReason>,
}

#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
enum StopReason {
    Text(String),
    Token(u32),
}

impl Ending {
    pub(crate) fn new(finish: Option<&Finish>, stops: &[String], eos_ids: &[u32]) -> Self {
        let stop_reason = match finish {
            Some(Finish::StopString(index)) => Some(StopReason::Text(stops[*index].clone())),
            Some(Finish::StopToken(id)) if !eos_ids.contains(id) => Some(StopReason::Token(*id)),
            _ => None,
        };
        let finish_reason = finish.map(|finish| match finish {
            Finish::StopString(_) | Finish::StopToken(_) => "stop",
            Finish::Length => "length",
        });
        Self { finish_reason, stop_reason }
    }

    /// Says that the choice ended by calling tools, unless it was cut.
    pub(crate) fn with_calls(mut self) -> Self {
        if self.finish_reason == Some("stop") {
            self.finish_reason = Some("tool_calls");
        }
        self
    }
}
