//! The messages of a chat.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::value::SeqAccessDeserializer;
use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};

use crate::error::ApiError;

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "ChatRole")]
pub(crate) enum Role {
    System,
    /// OpenAI's newer name for the system, which models' templates do not know.
    Developer,
    User,
    Assistant,
    Tool,
}

impl Role {
    pub(crate) fn template_name(self) -> &'static str {
        match self {
            Self::System | Self::Developer => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// One turn.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "ChatMessage")]
pub(crate) struct Message {
    role: Role,
    content: Option<Content>,
    name: Option<String>,
    tool_call_id: Option<String>,
    refusal: Option<String>,
    tool_calls: Option<Vec<ToolCall>>,
    /// What the assistant thought before; the first is DeepSeek's name, the second vLLM's.
    reasoning_content: Option<String>,
    reasoning: Option<String>,
}

/// A call of an earlier turn.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
#[schemars(rename = "ChatToolCall")]
enum ToolCall {
    Function {
        id: String,
        function: FunctionCall,
        /// Where it stood in a stream; clients that add chunks up keep it.
        #[expect(dead_code, reason = "the order says the same")]
        index: Option<u32>,
    },
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "ChatFunctionCall")]
struct FunctionCall {
    name: String,
    /// JSON as text.
    arguments: String,
}

/// A text, or parts that are texts.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Content(String);

#[derive(Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
#[schemars(rename = "ChatPart")]
enum Part {
    Text { text: String },
    Refusal { refusal: String },
}

/// The messages as chat templates take them.
///
/// # Errors
/// No message, a message without content, malformed tool calls.
pub(crate) fn template_messages(messages: Vec<Message>) -> Result<Vec<Value>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "is empty; it must have at least one message"));
    }
    let one = |(index, message): (usize, Message)| message.into_template(index);
    messages.into_iter().enumerate().map(one).collect()
}

impl Message {
    fn into_template(self, index: usize) -> Result<Value, ApiError> {
        let param = |field: &str| format!("messages[{index}].{field}");
        let calls = self.tool_calls.unwrap_or_default();
        if self.role != Role::Assistant && !calls.is_empty() {
            return Err(ApiError::invalid(param("tool_calls"), "only an assistant calls tools"));
        }
        // A refusal is what the assistant said instead of content.
        let content = self.content.map(|content| content.0).or(self.refusal);
        let content = match content {
            None if calls.is_empty() => {
                let reason = "is absent; it must be a string or text parts";
                return Err(ApiError::invalid(param("content"), reason));
            }
            content => content.unwrap_or_default(),
        };
        let mut message = Map::new();
        message.insert("role".to_owned(), self.role.template_name().into());
        message.insert("content".to_owned(), content.into());
        let reasoning = self.reasoning_content.or(self.reasoning);
        for (field, value) in [
            ("name", self.name),
            ("tool_call_id", self.tool_call_id),
            ("reasoning_content", reasoning),
        ] {
            message.extend(value.map(|value| (field.to_owned(), value.into())));
        }
        if !calls.is_empty() {
            let convert = |(at, call)| template_call(call, || param(&format!("tool_calls[{at}]")));
            let calls = calls.into_iter().enumerate().map(convert);
            message.insert("tool_calls".to_owned(), calls.collect::<Result<Value, _>>()?);
        }
        Ok(Value::Object(message))
    }
}

fn template_call(call: ToolCall, param: impl Fn() -> String) -> Result<Value, ApiError> {
    let ToolCall::Function { id, function, .. } = call;
    let param = || format!("{}.function.arguments", param());
    let arguments = parse_arguments(&function.arguments, param)?;
    Ok(json!({
        "id": id, "type": "function",
        "function": {"name": function.name, "arguments": arguments},
    }))
}

/// Arguments as an object, which is what templates write out.
pub(crate) fn parse_arguments(
    text: &str,
    param: impl FnOnce() -> String,
) -> Result<Map<String, Value>, ApiError> {
    if text.is_empty() {
        return Ok(Map::new());
    }
    serde_json::from_str(text)
        .map_err(|error| ApiError::invalid(param(), format!("is not a JSON object: {error}")))
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ContentVisitor)
    }
}

impl JsonSchema for Content {
    fn schema_name() -> Cow<'static, str> {
        "ChatContent".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let part = generator.subschema_for::<Part>();
        json_schema!({"anyOf": [{"type": "string"}, {"type": "array", "items": part}]})
    }
}

struct ContentVisitor;

impl<'de> Visitor<'de> for ContentVisitor {
    type Value = Content;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of text parts")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Content, E> {
        Ok(Content(text.to_owned()))
    }

    /// Parts become lines, as in vLLM.
    fn visit_seq<A: SeqAccess<'de>>(self, parts: A) -> Result<Content, A::Error> {
        let parts = Vec::<Part>::deserialize(SeqAccessDeserializer::new(parts))?;
        let text = |part| match part {
            Part::Text { text } | Part::Refusal { refusal: text } => text,
        };
        Ok(Content(parts.into_iter().map(text).collect::<Vec<_>>().join("\n")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn convert(messages: &Value) -> Result<Value, String> {
        let text = messages.to_string();
        let messages: Vec<Message> =
            serde_path_to_error::deserialize(&mut serde_json::Deserializer::from_str(&text))
                .map_err(|error| format!("{}: {}", error.path(), error.inner()))?;
        template_messages(messages).map(Value::Array).map_err(|error| error.to_string())
    }

    #[test]
    fn messages_for_the_template() {
        let call = json!({"id": "call_1", "type": "function", "index": 0, "function": {
            "name": "add", "arguments": "{\"a\": 2}",
        }});
        let messages = json!([
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "name": "Ann", "content": [
                {"type": "text", "text": "Hi"}, {"type": "text", "text": "there"},
            ]},
            {"role": "assistant", "content": null, "refusal": "No.", "tool_calls": []},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No!"}]},
            {"role": "assistant", "content": null, "tool_calls": [call], "reasoning": "Hm"},
            {"role": "tool", "content": "4", "tool_call_id": "call_1"},
        ]);
        let call = json!({"id": "call_1", "type": "function", "function": {
            "name": "add", "arguments": {"a": 2},
        }});
        let expected = json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi\nthere", "name": "Ann"},
            {"role": "assistant", "content": "No."},
            {"role": "assistant", "content": "No!"},
            {
                "role": "assistant", "content": "", "reasoning_content": "Hm",
                "tool_calls": [call],
            },
            {"role": "tool", "content": "4", "tool_call_id": "call_1"},
        ]);
        assert_eq!(convert(&messages).unwrap(), expected);
    }

    #[test]
    fn errors_name_message_and_field() {
        let check = |messages: Value, start: &str| {
            let error = convert(&messages).unwrap_err();
            assert!(error.starts_with(start), "{messages}: {error}");
        };
        check(json!([]), "`messages`: is empty");
        check(json!([{"role": "user"}]), "`messages[0].content`: is absent");
        check(json!([{"content": "a"}]), "[0]: missing field `role`");
        check(json!([{"role": "bot", "content": "a"}]), "[0].role: unknown variant `bot`");
        check(json!([{"role": "user", "content": 1}]), "[0].content: invalid type: integer `1`");
        check(json!([{"role": "user", "text": "a"}]), "[0].text: unknown field `text`");
        check(
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
            "[0].content[0].type: unknown variant `image_url`, expected `text`",
        );
        check(
            json!([{"role": "assistant", "content": "a", "tool_calls": [{}]}]),
            "[0].tool_calls[0]: missing field `type`",
        );
        let call = json!({"id": "c", "type": "function", "function": {
            "name": "f", "arguments": "[1]",
        }});
        check(
            json!([{"role": "assistant", "content": "a", "tool_calls": [call]}]),
            "`messages[0].tool_calls[0].function.arguments`: is not a JSON object",
        );
        check(
            json!([{"role": "user", "content": "a", "tool_calls": [call]}]),
            "`messages[0].tool_calls`: only an assistant",
        );
    }
}
