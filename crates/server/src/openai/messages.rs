//! The messages of a chat.

use std::fmt;

use serde::de::value::SeqAccessDeserializer;
use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use crate::error::ApiError;

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    System,
    /// OpenAI's newer name for the system, which models' templates do not know.
    Developer,
    User,
    Assistant,
    Tool,
}

impl Role {
    fn template_name(self) -> &'static str {
        match self {
            Self::System | Self::Developer => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// One turn.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Message {
    role: Role,
    content: Option<Content>,
    name: Option<String>,
    tool_call_id: Option<String>,
    refusal: Option<String>,
    tool_calls: Option<Vec<Value>>,
}

/// A text, or parts that are texts.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Content(String);

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum Part {
    Text { text: String },
}

/// The messages as chat templates take them.
///
/// # Errors
/// No message, a message without content, tool calls.
pub(crate) fn template_messages(messages: Vec<Message>) -> Result<Value, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "is empty; it must have at least one message"));
    }
    let one = |(index, message): (usize, Message)| message.into_template(index);
    messages.into_iter().enumerate().map(one).collect::<Result<_, _>>().map(Value::Array)
}

impl Message {
    fn into_template(self, index: usize) -> Result<Value, ApiError> {
        let param = |field: &str| format!("messages[{index}].{field}");
        if self.tool_calls.is_some_and(|calls| !calls.is_empty()) {
            return Err(ApiError::unsupported(param("tool_calls"), "leave it out"));
        }
        // A refusal is what the assistant said instead of content.
        let content = self.content.map(|content| content.0).or(self.refusal);
        let content = content.ok_or_else(|| {
            ApiError::invalid(param("content"), "is absent; it must be a string or text parts")
        })?;
        let mut message = Map::new();
        message.insert("role".to_owned(), self.role.template_name().into());
        message.insert("content".to_owned(), content.into());
        for (field, value) in [("name", self.name), ("tool_call_id", self.tool_call_id)] {
            message.extend(value.map(|value| (field.to_owned(), value.into())));
        }
        Ok(Value::Object(message))
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ContentVisitor)
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
        let texts: Vec<_> = parts.into_iter().map(|Part::Text { text }| text).collect();
        Ok(Content(texts.join("\n")))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn convert(messages: Value) -> Result<Value, String> {
        let deserializer = messages.to_string();
        let deserializer = &mut serde_json::Deserializer::from_str(&deserializer);
        let messages: Vec<Message> = serde_path_to_error::deserialize(deserializer)
            .map_err(|error| format!("{}: {}", error.path(), error.inner()))?;
        template_messages(messages).map_err(|error| error.to_string())
    }

    #[test]
    fn messages_for_the_template() {
        let messages = json!([
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "name": "Ann", "content": [
                {"type": "text", "text": "Hi"}, {"type": "text", "text": "there"},
            ]},
            {"role": "assistant", "content": null, "refusal": "No.", "tool_calls": []},
            {"role": "tool", "content": "4", "tool_call_id": "call_1"},
        ]);
        let expected = json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi\nthere", "name": "Ann"},
            {"role": "assistant", "content": "No."},
            {"role": "tool", "content": "4", "tool_call_id": "call_1"},
        ]);
        assert_eq!(convert(messages).unwrap(), expected);
    }

    #[test]
    fn errors_name_message_and_field() {
        let check = |messages: Value, start: &str| {
            let error = convert(messages.clone()).unwrap_err();
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
            "`messages[0].tool_calls` is not supported",
        );
    }
}
