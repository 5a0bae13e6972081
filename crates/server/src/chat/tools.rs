//! Functions that a model may call.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::error::ApiError;

/// Most tools of a request.
const MAX_TOOLS: usize = 1024;
/// OpenAI's limit.
const MAX_NAME_CHARS: usize = 64;

/// A function, as OpenAI describes it.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Tool {
    #[schemars(regex(pattern = "^[A-Za-z0-9_.-]{1,64}$"))]
    pub(crate) name: String,
    pub(crate) description: Option<String>,
    /// JSON schema of its arguments.
    pub(crate) parameters: Option<Map<String, Value>>,
    /// Whether calls must fit the schema.
    pub(crate) strict: Option<bool>,
}

/// Whether the model calls tools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    /// It does not know of them.
    None,
    /// It decides.
    #[default]
    Auto,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

impl Tool {
    /// As templates take it.
    pub(crate) fn template(&self) -> Value {
        let mut function = Map::new();
        function.insert("name".to_owned(), self.name.clone().into());
        let description = self.description.clone().unwrap_or_default();
        function.insert("description".to_owned(), description.into());
        let none = || Map::from_iter([("type".to_owned(), "object".into())]);
        let parameters = self.parameters.clone().unwrap_or_else(none);
        function.insert("parameters".to_owned(), parameters.into());
        json!({"type": "function", "function": function})
    }
}

/// Checks names, and that a named choice is one of them. `field`: what the API calls the list.
///
/// # Errors
/// What is wrong with which field.
pub(crate) fn check_tools(
    tools: &[Tool],
    choice: &ToolChoice,
    field: impl Fn(usize) -> String,
) -> Result<(), ApiError> {
    if tools.len() > MAX_TOOLS {
        let reason = format!("has {} entries; at most {MAX_TOOLS} are allowed", tools.len());
        return Err(ApiError::invalid("tools", reason));
    }
    let is_name = |name: &str| {
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        (1..=MAX_NAME_CHARS).contains(&name.len()) && name.chars().all(is_allowed)
    };
    for (index, tool) in tools.iter().enumerate() {
        if !is_name(&tool.name) {
            let reason =
                format!("{:?} is not 1 to {MAX_NAME_CHARS} letters, digits, _, - or .", tool.name);
            return Err(ApiError::invalid(field(index), reason));
        }
        if tools[..index].iter().any(|other| other.name == tool.name) {
            let reason = format!("there is more than one tool `{}`", tool.name);
            return Err(ApiError::invalid(field(index), reason));
        }
    }
    match choice {
        ToolChoice::Required | ToolChoice::Named(_) if tools.is_empty() => {
            Err(ApiError::invalid("tool_choice", "asks for a call, but there are no `tools`"))
        }
        ToolChoice::Named(name) if tools.iter().all(|tool| tool.name != *name) => {
            Err(ApiError::invalid("tool_choice", format!("there is no tool `{name}`")))
        }
        _ => Ok(()),
    }
}

/// What a model is told about tools whose template does not tell it.
pub(crate) fn instructions(tools: &[Value]) -> String {
    let functions: Vec<_> = tools.iter().map(|tool| tool["function"].to_string()).collect();
    format!(
        "You can call functions. These are available, each as a JSON object with its name, what \
         it does and the JSON schema of its arguments:\n<tools>\n{}\n</tools>\n\
         To call one, answer with nothing but its name and arguments in this form:\n\
         <tool_call>\n{{\"name\": \"...\", \"arguments\": {{...}}}}\n</tool_call>\n\
         Call functions only if they help with the request.",
        functions.join("\n")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(json: Value) -> Tool {
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn tools_as_templates_take_them() {
        let bare = json!({"type": "function", "function": {
            "name": "now", "description": "", "parameters": {"type": "object"},
        }});
        assert_eq!(tool(json!({"name": "now"})).template(), bare);
    }

    #[test]
    fn wrong_tools_are_named() {
        let check = |tools: &[&str], choice: ToolChoice, expected: &str| {
            let tools: Vec<_> = tools.iter().map(|name| tool(json!({"name": name}))).collect();
            let error = check_tools(&tools, &choice, |i| format!("tools[{i}]")).unwrap_err();
            assert!(error.to_string().starts_with(expected), "{error}");
        };
        check(&["a", "a"], ToolChoice::Auto, "`tools[1]`: there is more than one tool `a`");
        check(&["a b"], ToolChoice::Auto, "`tools[0]`: \"a b\" is not");
        check(&[""], ToolChoice::Auto, "`tools[0]`");
        check(&[], ToolChoice::Required, "`tool_choice`: asks for a call");
        check(&["a"], ToolChoice::Named("b".to_owned()), "`tool_choice`: there is no tool `b`");
    }
}
