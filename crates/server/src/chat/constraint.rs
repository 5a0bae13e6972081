//! What an answer must be: calls that were asked for, or what the request's own fields say.

use inflight_engine::SharedGrammar;
use inflight_grammar::{
    Thinking,
    thinking::after_thinking,
    tools::{self, CallFormat},
};
use inflight_tokenizer::Tokenizer;
use serde_json::{Value, json};

use super::conversation::{Budget, Conversation};
use super::tools::{Tool, ToolChoice};
use crate::error::ApiError;
use crate::output::{OutputOptions, ToolFormat};
use crate::request::Asked;
use crate::state::ServerState;

/// What a conversation's answer must be; `None`: anything.
///
/// # Errors
/// Calls are asked for that the model has no known form for.
pub(crate) fn of(
    conversation: &Conversation,
    state: &ServerState,
) -> Result<Option<Asked>, ApiError> {
    let is_wanted = |tool: &&Tool| match &conversation.tool_choice {
        ToolChoice::Required => true,
        ToolChoice::Named(name) => tool.name == *name,
        ToolChoice::None | ToolChoice::Auto => false,
    };
    let wanted: Vec<_> = conversation.tools.iter().filter(is_wanted).map(callable).collect();
    if wanted.is_empty() {
        return match &conversation.asked {
            None => optional_calls(conversation, state),
            asked => Ok(asked.clone()),
        };
    }
    let Some(format) = state.style().tool_format else { return Ok(None) };
    let is_named = matches!(conversation.tool_choice, ToolChoice::Named(_));
    let is_parallel = !conversation.only_one_call && !is_named;
    let calls = tools::tool_calls(&wanted, &call_format(format), is_parallel, state.tokenizer())
        .map_err(|error| ApiError::invalid("tools", error.to_string()))?;
    Ok(Some(Asked::new(calls, "tools")))
}

/// Holds the calls that a model may make to the schemas of strict tools; `None`: none is strict.
fn optional_calls(
    conversation: &Conversation,
    state: &ServerState,
) -> Result<Option<Asked>, ApiError> {
    let is_strict = |tool: &Tool| tool.strict == Some(true);
    let may_call = conversation.tool_choice == ToolChoice::Auto;
    let Some(format) = state.style().tool_format else { return Ok(None) };
    if !may_call || !conversation.tools.iter().any(is_strict) {
        return Ok(None);
    }
    let anything = |tool: &Tool| tools::Tool {
        name: tool.name.clone(),
        parameters: json!({ "type": "object" }),
    };
    let as_asked = |tool: &Tool| if is_strict(tool) { callable(tool) } else { anything(tool) };
    let tools: Vec<_> = conversation.tools.iter().map(as_asked).collect();
    let (format, is_parallel) = (call_format(format), !conversation.only_one_call);
    let calls = tools::optional_tool_calls(&tools, &format, is_parallel, state.tokenizer())
        .map_err(|error| ApiError::invalid("tools", error.to_string()))?;
    Ok(Some(Asked::new(calls, "tools")))
}

/// Compiles it; a model that thinks may do so first, for as long as `budget` says. `None`: nothing
/// is asked for.
///
/// # Errors
/// What about it cannot be enforced.
pub(crate) async fn compile(
    asked: Option<Asked>,
    budget: Option<&Budget>,
    output: &OutputOptions,
    state: &ServerState,
) -> Result<Option<SharedGrammar>, ApiError> {
    let field = asked.as_ref().map(|asked| asked.field.clone());
    let grammar = match asked {
        Some(asked) => Some(asked.compile(state).await?),
        None => None,
    };
    let Some((tags, is_open)) = output.reasoning else { return Ok(grammar) };
    let Some(field) = field.or_else(|| budget.map(|budget| budget.field.to_owned())) else {
        return Ok(None);
    };
    let token = |text| token_of(state.tokenizer(), text);
    let Some(end) = token(tags.close) else {
        let reason = format!("the model ends its thoughts with {}, which is no token", tags.close);
        return Err(ApiError::unsupported(field, reason));
    };
    let budget = budget.map(|budget| budget.num_tokens);
    let thinking = Thinking { start: token(tags.open), end, is_open, budget };
    Ok(Some(after_thinking(grammar, thinking)))
}

/// A tool that takes nothing if nothing is said about what it takes.
fn callable(tool: &Tool) -> tools::Tool {
    let nothing = || json!({ "type": "object", "properties": {}, "additionalProperties": false });
    let parameters = tool.parameters.clone().map_or_else(nothing, Value::Object);
    tools::Tool { name: tool.name.clone(), parameters }
}

/// What `output::tool_calls` reads.
fn call_format(format: ToolFormat) -> CallFormat {
    let text = str::to_owned;
    let common = CallFormat {
        name_field: text("name"),
        arguments_field: text("arguments"),
        ..CallFormat::default()
    };
    match format {
        ToolFormat::Hermes => CallFormat {
            call_start: text("<tool_call>\n"),
            call_end: text("\n</tool_call>"),
            between: text("\n"),
            ..common
        },
        ToolFormat::Llama3 => {
            CallFormat { between: text("; "), arguments_field: text("parameters"), ..common }
        }
        ToolFormat::Mistral => CallFormat {
            before: text("[TOOL_CALLS]["),
            between: text(", "),
            after: text("]"),
            ..common
        },
    }
}

/// The token that is exactly this text.
fn token_of(tokenizer: &Tokenizer, text: &str) -> Option<u32> {
    let ids = 0..u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
    ids.into_iter().find(|id| tokenizer.token_bytes(*id) == text.as_bytes())
}
