//! Tools as chat completions spell them.

use schemars::JsonSchema;
use serde::Deserialize;

use crate::chat::{Tool, ToolChoice};
use crate::error::ApiError;

/// A member of `tools`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
#[schemars(rename = "ChatTool")]
pub(crate) enum ToolField {
    Function { function: Tool },
}

impl ToolField {
    pub(crate) fn into_tool(self) -> Tool {
        let Self::Function { function } = self;
        function
    }
}

/// `tool_choice`: a word, or the one function to call.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
#[schemars(rename = "ChatToolChoice")]
pub(crate) enum ToolChoiceField {
    Word(#[schemars(extend("enum" = ["none", "auto", "required"]))] String),
    Named(NamedTool),
}

/// No enum with a tag: of those that stand in an untagged one, serde also takes a variant's number
/// for its tag.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "ChatNamedTool")]
pub(crate) struct NamedTool {
    #[expect(dead_code, reason = "there is one type")]
    r#type: FunctionKind,
    function: FunctionName,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum FunctionKind {
    Function,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct FunctionName {
    name: String,
}

/// Whether the model calls tools.
///
/// # Errors
/// A word that is none.
pub(crate) fn tool_choice(field: Option<ToolChoiceField>) -> Result<ToolChoice, ApiError> {
    match field {
        None => Ok(ToolChoice::Auto),
        Some(ToolChoiceField::Word(word)) => choice_of_word(&word),
        Some(ToolChoiceField::Named(named)) => Ok(ToolChoice::Named(named.function.name)),
    }
}

/// The choice that a word stands for.
///
/// # Errors
/// It stands for none.
pub(crate) fn choice_of_word(word: &str) -> Result<ToolChoice, ApiError> {
    match word {
        "none" => Ok(ToolChoice::None),
        "auto" => Ok(ToolChoice::Auto),
        "required" => Ok(ToolChoice::Required),
        other => {
            let reason = format!("is {other:?}; it must be none, auto, required or a function");
            Err(ApiError::invalid("tool_choice", reason))
        }
    }
}
