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
    let controls = controls(tokenizer.token_table());
    let text = |text: &str| marker(text, &controls);
    let call = ["call_start", "call", "call_end"].join(" ");
    let more = if is_parallel { format!(" (between {call})*") } else { String::new() };
    let lines = vec![
        format!("start: before {call}{more} after"),
        format!("before: {}", text(&format.before)),
        format!("call_start: {}", text(&format.call_start)),
    ];
    with_calls(lines, tools, format, &controls)
}

/// Any text, in which calls, wherever the model begins one, are of `tools`: what it says is free
/// until a call's mark, what follows that is not.
///
/// ```text
/// [text call_start call call_end]... text        marks around each call
/// [text before call between call... after] text  one mark before all of them
/// call between call... | text that is no object  no marks: a call is the whole output
/// ```
///
/// # Errors
/// Without any tool.
pub fn optional_tool_calls(
    tools: &[Tool],
    format: &CallFormat,
    is_parallel: bool,
    tokenizer: &Tokenizer,
) -> Result<Constraint, GrammarError> {
    let controls = controls(tokenizer.token_table());
    let is_bare = format.before.is_empty() && format.call_start.is_empty();
    let more = if is_parallel { "(between call_start call call_end)*" } else { "" };
    let calls = format!("call_start call call_end {more} after");
    let mut lines = match (is_bare, format.before.is_empty()) {
        (true, _) => vec![
            format!("start: plain | {calls}"),
            "plain: PLAIN?".to_owned(),
            r"PLAIN: /\s*([^{\s](?s:.*))?/".to_owned(),
            "call_start: \"\"".to_owned(),
        ],
        (false, true) => vec![
            if is_parallel {
                "start: (call_start call call_end)* tail after".to_owned()
            } else {
                "start: call_start call call_end tail after | tail".to_owned()
            },
            format!("call_start: {}", after_text(&format.call_start, &controls)),
        ],
        (false, false) => vec![
            format!("start: tail | before {calls}"),
            format!("before: {}", after_text(&format.before, &controls)),
            format!("call_start: {}", marker(&format.call_start, &controls)),
        ],
    };
    lines.extend(["tail: TEXT?".to_owned(), "TEXT: /(?s:.+)/".to_owned()]);
    if let Some(trigger) = trigger(format, &controls) {
        lines.push(format!("trigger[lazy]: /(?s:.*){}/", escaped(trigger)));
    }
    with_calls(lines, tools, format, &controls)
}

/// A grammar of these rules and those of calls but for what stands before each.
fn with_calls(
    mut lines: Vec<String>,
    tools: &[Tool],
    format: &CallFormat,
    controls: &[(&[u8], u32)],
) -> Result<Constraint, GrammarError> {
    if tools.is_empty() {
        return Err(GrammarError::Refused("there is no tool to call".to_owned()));
    }
    let CallFormat { call_end, between, after, .. } = format;
    let marks = [("call_end", call_end), ("between", between), ("after", after)];
    lines.extend(marks.map(|(rule, text)| format!("{rule}: {}", marker(text, controls))));
    lines.extend(call_rules(tools, format));
    Ok(Constraint::Grammar(lines.join("\n") + "\n"))
}

/// The rule for one call, and those that it consists of.
fn call_rules(tools: &[Tool], format: &CallFormat) -> Vec<String> {
    let names: Vec<String> = (0..tools.len()).map(|i| format!("call_{i}")).collect();
    let mut lines = vec![format!("call: {}", names.join(" | "))];
    for (name, tool) in names.iter().zip(tools) {
        lines.push(format!("{name}: %json {}", call_schema(tool, format)));
    }
    lines
}

/// The text that begins calls, if it is text: control tokens cannot be part of one.
fn trigger<'a>(format: &'a CallFormat, controls: &[(&[u8], u32)]) -> Option<&'a str> {
    let opening = if format.before.is_empty() { &format.call_start } else { &format.before };
    let is_control = controls.iter().any(|(name, _)| opening.as_bytes().starts_with(name));
    let trigger = opening.trim_end();
    (!is_control && !trigger.is_empty()).then_some(trigger)
}

/// Any text, then `opening`.
fn after_text(opening: &str, controls: &[(&[u8], u32)]) -> String {
    if controls.iter().any(|(name, _)| opening.as_bytes().starts_with(name)) {
        return format!("TEXT? {}", marker(opening, controls));
    }
    let rest = &opening[opening.trim_end().len()..];
    format!("trigger {}", literal(rest))
}

/// A text as a regular expression between slashes.
fn escaped(text: &str) -> String {
    let mut regex = String::new();
    for c in text.chars() {
        if !c.is_alphanumeric() && c.is_ascii() && c != '_' && c != ' ' && c != '<' && c != '>' {
            regex.push('\\');
        }
        regex.push(c);
    }
    regex
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
