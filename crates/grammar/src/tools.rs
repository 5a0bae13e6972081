//! Constraints of tool calls: what a model writes when it must call a tool.

use inflight_tokenizer::{TokenKind, TokenTable, Tokenizer};
use serde_json::{Value, json};

use crate::{Constraint, GrammarError, lark::literal};

/// A tool that may be called.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// JSON schema of its arguments; an object.
    pub parameters: Value,
}

/// How a model writes its calls.
///
/// ```text
/// before call_start {"name": ..., "arguments": ...} call_end between call_start ... call_end after
/// ```
///
/// The texts may contain names of control tokens, which are then meant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct CallFormat {
    pub before: String,
    pub call_start: String,
    pub call_end: String,
    pub between: String,
    pub after: String,
    /// Field of a call's name; "name" in most formats.
    pub name_field: String,
    /// Field of its arguments; "arguments" in most formats, "parameters" in others.
    pub arguments_field: String,
}

/// One call of one of `tools`, or several if `is_parallel`.
///
/// # Errors
/// Without any tool.
pub fn tool_calls(
    tools: &[Tool],
    format: &CallFormat,
    is_parallel: bool,
    tokenizer: &Tokenizer,
) -> Result<Constraint, GrammarError> {
    if tools.is_empty() {
        return Err(GrammarError::Refused("there is no tool to call".to_owned()));
    }
    let controls = controls(tokenizer.token_table());
    let text = |text: &str| marker(text, &controls);
    let call = ["call_start", "call", "call_end"].join(" ");
    let more = if is_parallel { format!(" (between {call})*") } else { String::new() };
    let mut lines = vec![
        format!("start: before {call}{more} after"),
        format!("before: {}", text(&format.before)),
        format!("call_start: {}", text(&format.call_start)),
        format!("call_end: {}", text(&format.call_end)),
        format!("between: {}", text(&format.between)),
        format!("after: {}", text(&format.after)),
    ];
    let names: Vec<String> = (0..tools.len()).map(|i| format!("call_{i}")).collect();
    lines.push(format!("call: {}", names.join(" | ")));
    for (name, tool) in names.iter().zip(tools) {
        lines.push(format!("{name}: %json {}", call_schema(tool, format)));
    }
    Ok(Constraint::Grammar(lines.join("\n") + "\n"))
}

/// JSON schema of a whole call.
///
/// References of a tool's schema are to its own root, which lies deeper here.
fn call_schema(tool: &Tool, format: &CallFormat) -> Value {
    let mut parameters = tool.parameters.clone();
    rebase_references(&mut parameters, &format!("#/properties/{}", format.arguments_field));
    json!({
        "type": "object",
        "properties": {
            &format.name_field: { "const": tool.name },
            &format.arguments_field: parameters,
        },
        "required": [format.name_field, format.arguments_field],
        "additionalProperties": false,
        "x-guidance": { "whitespace_pattern": crate::compiler::JSON_WHITESPACE },
    })
}

fn rebase_references(schema: &mut Value, root: &str) {
    match schema {
        Value::Object(fields) => {
            for (name, value) in fields.iter_mut() {
                match value {
                    Value::String(target) if name == "$ref" && target.starts_with('#') => {
                        *target = format!("{root}{}", &target[1..]);
                    }
                    value => rebase_references(value, root),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| rebase_references(item, root)),
        _ => {}
    }
}

/// A text as a sequence of literals and control tokens.
fn marker(text: &str, controls: &[(&[u8], u32)]) -> String {
    let bytes = text.as_bytes();
    let mut parts = Vec::new();
    let (mut done, mut at) = (0, 0);
    while at < bytes.len() {
        let found = controls.iter().filter(|(name, _)| bytes[at..].starts_with(name));
        let Some((name, id)) = found.max_by_key(|(name, _)| name.len()) else {
            at += 1;
            continue;
        };
        if done < at {
            parts.push(literal(&text[done..at]));
        }
        parts.push(format!("<[{id}]>"));
        at += name.len();
        done = at;
    }
    if done < bytes.len() || parts.is_empty() {
        parts.push(literal(&text[done..]));
    }
    parts.join(" ")
}

/// Names of all control tokens.
fn controls(table: &TokenTable) -> Vec<(&[u8], u32)> {
    let ids = 0..u32::try_from(table.len()).expect("token ids have 32 bits");
    let is_control =
        |id: &u32| table.kind(*id) == TokenKind::Control && !table.bytes(*id).is_empty();
    ids.filter(is_control).map(|id| (table.bytes(id), id)).collect()
}
