//! What a model's chat template knows.

use inflight_tokenizer::{ChatTemplate, TokenKind, Tokenizer};
use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::output::{ReasoningTags, ToolFormat};
use crate::random::{random_id, random_u64};
use crate::state::ServerConfig;

/// How a model writes what is more than text. Found once, when the server starts.
#[derive(Clone, Debug)]
pub(crate) struct ChatStyle {
    /// How it writes tool calls; `None`: in no known way.
    pub(crate) tool_format: Option<ToolFormat>,
    /// How it marks thoughts, if it has any.
    pub(crate) reasoning: Option<ReasoningTags>,
    /// Whether the template tells the model of tools.
    pub(crate) tells_tools: bool,
    /// Whether the template writes the calls of earlier turns.
    pub(crate) writes_calls: bool,
    /// Whether the template can switch thoughts off.
    pub(crate) reads_enable_thinking: bool,
    /// Whether the template takes an effort.
    pub(crate) reads_effort: bool,
    /// The marks of tool calls that are control tokens.
    pub(crate) tool_mark_ids: Vec<u32>,
    /// The marks of thoughts that are control tokens.
    pub(crate) reasoning_mark_ids: Vec<u32>,
}

impl ChatStyle {
    pub(crate) fn new(tokenizer: &Tokenizer, config: &ServerConfig) -> Self {
        let template = tokenizer.chat_template().ok();
        let mentions = |text: &str| template.is_some_and(|t: &ChatTemplate| t.mentions(text));
        let tells_tools = mentions("tools");
        // A template without tools leaves it to us how to ask for calls.
        let found =
            if tells_tools { ToolFormat::of_template(mentions) } else { Some(ToolFormat::Hermes) };
        let tool_format = config.tool_format.or(found);
        let reasoning = config.splits_reasoning.then(|| ReasoningTags::of_template(mentions));
        let reasoning = reasoning.flatten();
        let marks = tool_format.map_or(&[][..], ToolFormat::marks);
        let tags = reasoning.map(|tags| [tags.open, tags.close]);
        Self {
            tool_mark_ids: control_tokens(tokenizer, marks),
            reasoning_mark_ids: control_tokens(tokenizer, tags.as_ref().map_or(&[], |tags| tags)),
            tool_format,
            reasoning,
            tells_tools,
            writes_calls: mentions("tool_calls"),
            reads_enable_thinking: mentions("enable_thinking"),
            reads_effort: mentions("reasoning_effort"),
        }
    }

    /// An id for a tool call. Mistral's templates accept only nine letters and digits.
    pub(crate) fn call_id(&self, prefix: &str) -> String {
        if self.tool_format != Some(ToolFormat::Mistral) {
            return random_id(prefix);
        }
        format!("{:016x}", random_u64())[..9].to_owned()
    }
}

/// Has the template switch thoughts on or off. `field`: what the client calls that.
///
/// # Errors
/// The template cannot do it.
pub(crate) fn set_thinking(
    variables: &mut Map<String, Value>,
    enable: bool,
    style: &ChatStyle,
    field: &str,
) -> Result<(), ApiError> {
    if style.reads_enable_thinking {
        variables.insert("enable_thinking".to_owned(), enable.into());
        return Ok(());
    }
    if enable == style.reasoning.is_some() {
        return Ok(());
    }
    let reason = match enable {
        true => "the model's chat template knows no thoughts",
        false => "the model's chat template cannot switch its thoughts off",
    };
    Err(ApiError::unsupported(field, reason))
}

/// Tells the template how much to think. `field`: what the client calls that.
///
/// # Errors
/// The template knows no effort.
pub(crate) fn set_effort(
    variables: &mut Map<String, Value>,
    effort: &str,
    style: &ChatStyle,
    field: &str,
) -> Result<(), ApiError> {
    if style.reads_effort {
        variables.insert("reasoning_effort".to_owned(), effort.into());
        return Ok(());
    }
    if effort == "none" {
        return set_thinking(variables, false, style, field);
    }
    let reason = "the model's chat template knows no effort; leave it out or set it to \"none\"";
    Err(ApiError::unsupported(field, reason))
}

fn control_tokens(tokenizer: &Tokenizer, marks: &[&str]) -> Vec<u32> {
    let table = tokenizer.token_table();
    let ids = 0..u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
    let is_mark = |id: &u32| {
        table.kind(*id) == TokenKind::Control
            && marks.iter().any(|mark| mark.as_bytes() == table.bytes(*id))
    };
    ids.filter(is_mark).collect()
}
