//! Fields that say what an output must be.

use inflight_engine::SharedGrammar;
use inflight_grammar::{Constraint, GrammarError};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

use crate::error::ApiError;
use crate::state::ServerState;

/// OpenAI's field, vLLM's, and llama.cpp's. At most one of them may be used.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
pub(crate) struct ConstraintFields {
    response_format: Option<ResponseFormat>,
    structured_outputs: Option<StructuredOutputs>,
    guided_json: Option<JsonOrText>,
    guided_regex: Option<String>,
    guided_grammar: Option<String>,
    guided_choice: Option<Vec<String>>,
    grammar: Option<String>,
    #[schemars(extend("type" = ["object", "boolean", "null"]))]
    json_schema: Option<Value>,
}

/// OpenAI's `response_format`; of `json_object`, llama.cpp takes a schema.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum ResponseFormat {
    Text,
    JsonObject {
        #[schemars(extend("type" = ["object", "boolean", "null"]))]
        schema: Option<Value>,
    },
    JsonSchema {
        json_schema: NamedSchema,
    },
}

/// A schema with a name for it, which changes nothing. It is obeyed whether `strict` or not.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NamedSchema {
    #[expect(dead_code, reason = "required of clients, but of no use")]
    name: String,
    #[expect(dead_code, reason = "for people")]
    description: Option<String>,
    #[schemars(required, extend("type" = ["object", "boolean"]))]
    schema: Option<Value>,
    #[expect(dead_code, reason = "a schema is always obeyed")]
    strict: Option<bool>,
}

/// vLLM's `structured_outputs`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct StructuredOutputs {
    json: Option<JsonOrText>,
    json_object: Option<bool>,
    regex: Option<String>,
    grammar: Option<String>,
    choice: Option<Vec<String>>,
}

/// A schema as JSON, or as a text that holds JSON.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
enum JsonOrText {
    Text(String),
    Json(#[schemars(extend("type" = ["object", "boolean"]))] Value),
}

/// A constraint and the field that asked for it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Asked {
    pub(crate) constraint: Constraint,
    pub(crate) field: String,
}

impl ResponseFormat {
    /// What it asks for; `None`: nothing. `field`: what the API calls it.
    pub(crate) fn asked(self, field: &str) -> Result<Option<Asked>, ApiError> {
        Ok(match self {
            Self::Text => None,
            Self::JsonObject { schema: None } => Some(Asked::new(Constraint::JsonObject, field)),
            Self::JsonObject { schema: Some(schema) } => {
                let field = format!("{field}.schema");
                Some(Asked::new(Constraint::JsonSchema(schema), field))
            }
            Self::JsonSchema { json_schema } => {
                let field = format!("{field}.json_schema.schema");
                let Some(schema) = json_schema.schema else {
                    return Err(ApiError::invalid(field, "is missing"));
                };
                Some(Asked::new(Constraint::JsonSchema(schema), field))
            }
        })
    }
}

impl ConstraintFields {
    /// What is asked for; `None`: nothing.
    ///
    /// # Errors
    /// More than one thing is asked for, or a text is no JSON.
    pub(crate) fn asked(self) -> Result<Option<Asked>, ApiError> {
        let mut all = Vec::new();
        if let Some(format) = self.response_format {
            all.extend(format.asked("response_format")?);
        }
        let outputs = self.structured_outputs.unwrap_or_default();
        if outputs.json_object == Some(true) {
            all.push(Asked::new(Constraint::JsonObject, "structured_outputs.json_object"));
        }
        for (schema, field) in
            [(outputs.json, "structured_outputs.json"), (self.guided_json, "guided_json")]
        {
            all.extend(schema.map(|schema| schema.asked(field)).transpose()?);
        }
        let mut push = |constraint: Option<Constraint>, field: &str| {
            all.extend(constraint.map(|constraint| Asked::new(constraint, field)));
        };
        push(outputs.regex.map(Constraint::Regex), "structured_outputs.regex");
        push(outputs.grammar.map(Constraint::Grammar), "structured_outputs.grammar");
        push(outputs.choice.map(Constraint::Choice), "structured_outputs.choice");
        push(self.guided_regex.map(Constraint::Regex), "guided_regex");
        push(self.guided_grammar.map(Constraint::Grammar), "guided_grammar");
        push(self.guided_choice.map(Constraint::Choice), "guided_choice");
        push(self.grammar.map(Constraint::Grammar), "grammar");
        push(self.json_schema.map(Constraint::JsonSchema), "json_schema");
        match &all[..] {
            [first, second, ..] => {
                let reason = format!("goes not together with `{}`", first.field);
                Err(ApiError::invalid(&second.field, reason))
            }
            _ => Ok(all.pop()),
        }
    }
}

impl JsonOrText {
    fn asked(self, field: &str) -> Result<Asked, ApiError> {
        let schema = match self {
            Self::Json(schema) => schema,
            Self::Text(text) => serde_json::from_str(&text)
                .map_err(|error| ApiError::invalid(field, format!("is no JSON: {error}")))?,
        };
        Ok(Asked::new(Constraint::JsonSchema(schema), field))
    }
}

impl Asked {
    pub(crate) fn new(constraint: Constraint, field: impl Into<String>) -> Self {
        Self { constraint, field: field.into() }
    }

    /// Compiles the constraint beside the threads that serve connections.
    ///
    /// # Errors
    /// What about it is wrong or cannot be enforced, under the field's name.
    pub(crate) async fn compile(self, state: &ServerState) -> Result<SharedGrammar, ApiError> {
        let Self { constraint, field } = self;
        let compiler = state.clone();
        let compile = move || compiler.grammars().compile(&constraint);
        let compiled = tokio::task::spawn_blocking(compile).await;
        let compiled = compiled.map_err(|error| {
            tracing::error!(%error, "compiling a grammar failed");
            ApiError::internal()
        })?;
        compiled.map_err(|error| match error {
            GrammarError::Busy => ApiError::CompilersBusy,
            error => ApiError::invalid(field, error.to_string()),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn asked(fields: Value) -> Result<Option<Asked>, ApiError> {
        ConstraintFields::deserialize(fields).unwrap().asked()
    }

    #[test]
    fn every_way_to_ask_is_understood() {
        let schema = || Constraint::JsonSchema(json!({ "type": "integer" }));
        let named = json!({ "name": "n", "schema": { "type": "integer" }, "strict": true });
        let text = r#"{"type": "integer"}"#;
        let choice = || Constraint::Choice(vec!["a".to_owned(), "b".to_owned()]);
        let cases = [
            (json!({ "response_format": { "type": "text" } }), None),
            (json!({ "structured_outputs": {} }), None),
            (
                json!({ "response_format": { "type": "json_object" } }),
                Some((Constraint::JsonObject, "response_format")),
            ),
            (
                json!({ "response_format": {
                    "type": "json_object", "schema": { "type": "integer" },
                } }),
                Some((schema(), "response_format.schema")),
            ),
            (
                json!({ "response_format": { "type": "json_schema", "json_schema": named } }),
                Some((schema(), "response_format.json_schema.schema")),
            ),
            (
                json!({ "structured_outputs": { "json": { "type": "integer" } } }),
                Some((schema(), "structured_outputs.json")),
            ),
            (
                json!({ "structured_outputs": { "json": text } }),
                Some((schema(), "structured_outputs.json")),
            ),
            (
                json!({ "structured_outputs": { "json_object": true } }),
                Some((Constraint::JsonObject, "structured_outputs.json_object")),
            ),
            (
                json!({ "structured_outputs": { "regex": "a" } }),
                Some((Constraint::Regex("a".to_owned()), "structured_outputs.regex")),
            ),
            (
                json!({ "structured_outputs": { "grammar": "a" } }),
                Some((Constraint::Grammar("a".to_owned()), "structured_outputs.grammar")),
            ),
            (
                json!({ "structured_outputs": { "choice": ["a", "b"] } }),
                Some((choice(), "structured_outputs.choice")),
            ),
            (json!({ "guided_json": text }), Some((schema(), "guided_json"))),
            (
                json!({ "guided_regex": "a" }),
                Some((Constraint::Regex("a".to_owned()), "guided_regex")),
            ),
            (
                json!({ "guided_grammar": "a" }),
                Some((Constraint::Grammar("a".to_owned()), "guided_grammar")),
            ),
            (json!({ "guided_choice": ["a", "b"] }), Some((choice(), "guided_choice"))),
            (json!({ "grammar": "a" }), Some((Constraint::Grammar("a".to_owned()), "grammar"))),
            (json!({ "json_schema": { "type": "integer" } }), Some((schema(), "json_schema"))),
        ];
        for (fields, expected) in cases {
            let expected = expected.map(|(constraint, field)| Asked::new(constraint, field));
            assert_eq!(asked(fields.clone()).unwrap(), expected, "{fields}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let check = |fields: Value, expected: &str| match asked(fields) {
            Err(ApiError::Invalid { param, .. }) => assert_eq!(param, expected),
            other => panic!("{other:?}"),
        };
        check(json!({ "guided_regex": "a", "guided_choice": ["a"] }), "guided_choice");
        check(json!({ "guided_json": "{" }), "guided_json");
        let nameless = json!({ "type": "json_schema", "json_schema": { "name": "n" } });
        check(json!({ "response_format": nameless }), "response_format.json_schema.schema");
    }
}
