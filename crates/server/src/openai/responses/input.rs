//! Input items to messages.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::chat::Turns;
use crate::error::ApiError;
use crate::openai::messages::{Role, parse_arguments};
use crate::request::StringOr;

/// A text, or what was said so far.
pub(crate) type Input = StringOr<Map<String, Value>>;

type Content = StringOr<Part>;

/// A turn. `id` and `status` are there if the item comes from a response; they change nothing.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "fields that are known and change nothing")]
#[schemars(rename = "InputMessage")]
pub(super) struct Message {
    #[schemars(extend("enum" = ["message", null]))]
    r#type: Option<String>,
    id: Option<String>,
    status: Option<String>,
    role: Role,
    content: Content,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schemars(rename = "InputPart")]
enum Part {
    InputText { text: String },
    OutputText { text: String },
    ReasoningText { text: String },
    Refusal { refusal: String },
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "fields that are known and change nothing")]
#[schemars(rename = "InputFunctionCall")]
pub(super) struct FunctionCall {
    #[schemars(required, extend("enum" = ["function_call"]))]
    r#type: Option<String>,
    id: Option<String>,
    status: Option<String>,
    call_id: String,
    name: String,
    arguments: String,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "fields that are known and change nothing")]
#[schemars(rename = "InputFunctionOutput")]
pub(super) struct FunctionOutput {
    #[schemars(required, extend("enum" = ["function_call_output"]))]
    r#type: Option<String>,
    id: Option<String>,
    status: Option<String>,
    call_id: String,
    output: Content,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "fields that are known and change nothing")]
#[schemars(rename = "InputReasoning")]
pub(super) struct Reasoning {
    #[schemars(required, extend("enum" = ["reasoning"]))]
    r#type: Option<String>,
    id: Option<String>,
    status: Option<String>,
    content: Option<Vec<Part>>,
    /// Made of the thoughts, for people.
    summary: Option<Value>,
    /// Null where thoughts are not secret.
    encrypted_content: Option<Value>,
}

/// What [`take_item`] reads, for the API's description.
#[derive(JsonSchema)]
#[schemars(untagged)]
#[expect(dead_code, reason = "it is described, not made")]
pub(super) enum InputItem {
    Message(Message),
    FunctionCall(FunctionCall),
    FunctionOutput(FunctionOutput),
    Reasoning(Reasoning),
}

fn text_of(content: Content) -> String {
    match content {
        StringOr::String(text) => text,
        StringOr::List(parts) => joined(parts),
    }
}

fn joined(parts: Vec<Part>) -> String {
    let text = |part| match part {
        Part::InputText { text }
        | Part::OutputText { text }
        | Part::ReasoningText { text }
        | Part::Refusal { refusal: text } => text,
    };
    parts.into_iter().map(text).collect::<Vec<_>>().join("\n")
}

/// The messages for the template.
///
/// # Errors
/// An item that is malformed or of an unknown type.
pub(crate) fn messages(instructions: Option<&str>, input: Input) -> Result<Vec<Value>, ApiError> {
    let mut turns = Turns::system(instructions);
    match input {
        StringOr::String(text) => turns.text("user", &text),
        StringOr::List(items) if items.is_empty() => {
            return Err(ApiError::invalid("input", "is empty; it must have at least one item"));
        }
        StringOr::List(items) => {
            for (index, item) in items.into_iter().enumerate() {
                take_item(&mut turns, item, &format!("input[{index}]"))?;
            }
        }
    }
    Ok(turns.into_messages())
}

fn take_item(turns: &mut Turns, item: Map<String, Value>, param: &str) -> Result<(), ApiError> {
    let kind = match item.get("type") {
        None => "message".to_owned(),
        Some(Value::String(kind)) => kind.clone(),
        Some(_) => return Err(ApiError::invalid(format!("{param}.type"), "must be a string")),
    };
    match kind.as_str() {
        "message" => {
            let message: Message = read(item, param)?;
            turns.text(message.role.template_name(), &text_of(message.content));
        }
        "function_call" => {
            let call: FunctionCall = read(item, param)?;
            let param = || format!("{param}.arguments");
            turns.call(&call.call_id, &call.name, parse_arguments(&call.arguments, param)?);
        }
        "function_call_output" => {
            let result: FunctionOutput = read(item, param)?;
            turns.result(&result.call_id, &text_of(result.output));
        }
        "reasoning" => {
            let reasoning: Reasoning = read(item, param)?;
            turns.reasoning(&joined(reasoning.content.unwrap_or_default()));
        }
        "item_reference" => {
            let reason = "responses are not stored; send the item itself";
            return Err(ApiError::unsupported(param, reason));
        }
        other => {
            return Err(ApiError::unsupported(param, format!("there are no {other:?} items here")));
        }
    }
    Ok(())
}

fn read<T: for<'de> Deserialize<'de>>(
    item: Map<String, Value>,
    param: &str,
) -> Result<T, ApiError> {
    serde_json::from_value(Value::Object(item))
        .map_err(|error| ApiError::invalid(param, error.to_string()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn convert(input: Value) -> Result<Value, String> {
        let input: Input = serde_json::from_value(input).map_err(|error| error.to_string())?;
        messages(Some("Be brief."), input).map(Value::Array).map_err(|error| error.to_string())
    }

    #[test]
    fn items_to_messages() {
        let items = json!([
            {"role": "user", "content": [{"type": "input_text", "text": "2 + 2?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
                {"type": "reasoning_text", "text": "Hm."},
            ]},
            {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "add",
             "arguments": "{\"a\": 2}", "status": "completed"},
            {"type": "function_call_output", "call_id": "c", "output": "4"},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "4", "annotations": [], "logprobs": []}]},
        ]);
        let expected = json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "2 + 2?"},
            {
                "role": "assistant", "content": "", "reasoning_content": "Hm.",
                "tool_calls": [{"id": "c", "type": "function", "function": {
                    "name": "add", "arguments": {"a": 2},
                }}],
            },
            {"role": "tool", "content": "4", "tool_call_id": "c"},
            {"role": "assistant", "content": "4"},
        ]);
        assert_eq!(convert(items).unwrap(), expected);
        let hi = json!([
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
        ]);
        assert_eq!(convert(json!("Hi")).unwrap(), hi);
    }

    #[test]
    fn errors_name_the_item() {
        let check = |items: Value, start: &str| {
            let error = convert(items.clone()).unwrap_err();
            assert!(error.starts_with(start), "{items}: {error}");
        };
        check(json!(3), "invalid type: integer `3`, expected a string or a list");
        check(json!([]), "`input`: is empty");
        check(json!([{"role": "user"}]), "`input[0]`: missing field `content`");
        check(json!([{"role": "user", "content": "a", "x": 1}]), "`input[0]`: unknown field `x`");
        check(json!([{"type": "item_reference", "id": "a"}]), "`input[0]` is not supported");
        check(json!([{"type": "computer_call"}]), "`input[0]` is not supported: there are no");
        let call = json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": "["});
        check(json!([call]), "`input[0].arguments`: is not a JSON object");
    }
}
