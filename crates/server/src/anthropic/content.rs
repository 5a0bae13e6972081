//! Messages and their blocks, as what templates take.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::chat::Turns;
use crate::error::ApiError;
use crate::request::StringOr;

/// One turn.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "AnthropicMessage")]
pub(crate) struct Message {
    role: Role,
    content: StringOr<Block>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "AnthropicRole")]
enum Role {
    User,
    Assistant,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}

/// A part of a message. `cache_control` changes nothing: every prefix may be found again.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
#[allow(dead_code, reason = "fields that are known and change nothing")]
#[schemars(rename = "AnthropicBlock")]
enum Block {
    Text {
        text: String,
        cache_control: Option<Value>,
        citations: Option<Value>,
    },
    Thinking {
        thinking: String,
        signature: Option<String>,
    },
    ToolUse {
        id: String,
        name: String,
        input: Map<String, Value>,
        cache_control: Option<Value>,
    },
    ToolResult {
        tool_use_id: String,
        content: Option<StringOr<TextBlock>>,
        is_error: Option<bool>,
        cache_control: Option<Value>,
    },
}

/// A text where nothing else may stand. No enum with a tag: of those that stand in one of their
/// kind, serde also takes a variant's number for its tag.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "fields that are known and change nothing")]
#[schemars(rename = "AnthropicTextBlock")]
pub(crate) struct TextBlock {
    r#type: TextKind,
    text: String,
    cache_control: Option<Value>,
    citations: Option<Value>,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "AnthropicTextKind")]
enum TextKind {
    Text,
}

/// Several texts are lines of one.
pub(crate) fn joined(content: StringOr<TextBlock>) -> String {
    match content {
        StringOr::String(text) => text,
        StringOr::List(blocks) => {
            blocks.into_iter().map(|block| block.text).collect::<Vec<_>>().join("\n")
        }
    }
}

/// The messages for the template, and whether the last one is to be continued.
///
/// # Errors
/// No message, or a block that the other side says.
pub(crate) fn turns(
    system: Option<StringOr<TextBlock>>,
    messages: Vec<Message>,
) -> Result<(Vec<Value>, bool), ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "is empty; it must have at least one message"));
    }
    let system = system.map(joined);
    let mut turns = Turns::system(system.as_deref());
    let continues = continues_last(&messages)?;
    for (index, message) in messages.into_iter().enumerate() {
        match message.content {
            StringOr::String(text) => turns.text(message.role.name(), &text),
            StringOr::List(blocks) => {
                for (at, block) in blocks.into_iter().enumerate() {
                    let param = || format!("messages[{index}].content[{at}]");
                    take_block(&mut turns, message.role, block, param)?;
                }
            }
        }
    }
    Ok((turns.into_messages(), continues))
}

/// An assistant's text at the end is the start of the answer.
fn continues_last(messages: &[Message]) -> Result<bool, ApiError> {
    let Some(last) = messages.last().filter(|last| last.role == Role::Assistant) else {
        return Ok(false);
    };
    let text = match &last.content {
        StringOr::String(text) => text,
        StringOr::List(blocks) => match blocks.last() {
            Some(Block::Text { text, .. }) => text,
            _ => return Ok(false),
        },
    };
    if text.trim_end() != text || text.is_empty() {
        let reason = "the answer's start must not be empty or end with white space";
        return Err(ApiError::invalid(format!("messages[{}].content", messages.len() - 1), reason));
    }
    Ok(true)
}

fn take_block(
    turns: &mut Turns,
    role: Role,
    block: Block,
    param: impl FnOnce() -> String,
) -> Result<(), ApiError> {
    match (role, block) {
        (role, Block::Text { text, .. }) => turns.text(role.name(), &text),
        (Role::Assistant, Block::Thinking { thinking, .. }) => turns.reasoning(&thinking),
        (Role::Assistant, Block::ToolUse { id, name, input, .. }) => turns.call(&id, &name, input),
        (Role::User, Block::ToolResult { tool_use_id, content, is_error, .. }) => {
            let text = content.map(joined).unwrap_or_default();
            let mark = if is_error == Some(true) { "Error: " } else { "" };
            turns.result(&tool_use_id, &format!("{mark}{text}"));
        }
        (Role::User, _) => {
            return Err(ApiError::invalid(param(), "only an assistant thinks and uses tools"));
        }
        (Role::Assistant, _) => {
            return Err(ApiError::invalid(param(), "only a user has results of tools"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn convert(messages: Value) -> Result<(Value, bool), String> {
        let text = messages.to_string();
        let messages: Vec<Message> =
            serde_path_to_error::deserialize(&mut serde_json::Deserializer::from_str(&text))
                .map_err(|error| format!("{}: {}", error.path(), error.inner()))?;
        let system = serde_json::from_value(json!([{"type": "text", "text": "Be brief."}]));
        turns(system.unwrap(), messages)
            .map(|(messages, continues)| (Value::Array(messages), continues))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn blocks_to_messages() {
        let messages = json!([
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "I add."},
                {"type": "tool_use", "id": "t", "name": "add", "input": {"a": 2}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": "4", "is_error": true},
                {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
            ]},
            {"role": "assistant", "content": "It is"},
        ]);
        let call = json!({"id": "t", "type": "function", "function": {
            "name": "add", "arguments": {"a": 2},
        }});
        let expected = json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "2 + 2?"},
            {
                "role": "assistant", "content": "I add.", "reasoning_content": "Hm.",
                "tool_calls": [call],
            },
            {"role": "tool", "content": "Error: 4", "tool_call_id": "t"},
            {"role": "user", "content": "So?"},
            {"role": "assistant", "content": "It is"},
        ]);
        assert_eq!(convert(messages).unwrap(), (expected, true));
    }

    #[test]
    fn errors_name_the_block() {
        let check = |messages: Value, start: &str| {
            let error = convert(messages.clone()).unwrap_err();
            assert!(error.starts_with(start), "{messages}: {error}");
        };
        let says = |role: &str, block: Value| json!([{"role": role, "content": [block]}]);
        check(json!([]), "`messages`: is empty");
        check(json!([{"role": "system", "content": "a"}]), "[0].role: unknown variant `system`");
        check(json!([{"role": "user", "content": 1}]), "[0].content: invalid type: integer `1`");
        check(
            says("user", json!({"type": "image", "source": {}})),
            "[0].content[0].type: unknown variant `image`",
        );
        check(
            says("user", json!({"type": "thinking", "thinking": "a"})),
            "`messages[0].content[0]`: only an assistant",
        );
        check(
            says("assistant", json!({"type": "tool_result", "tool_use_id": "t"})),
            "`messages[0].content[0]`: only a user",
        );
        check(
            json!([{"role": "assistant", "content": "It is "}]),
            "`messages[0].content`: the answer's start",
        );
    }
}
