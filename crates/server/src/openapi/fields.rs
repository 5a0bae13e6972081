//! The fields of a request's body, put together from the groups that an endpoint takes.

use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

use crate::request::neutral::{Neutral, Values};

/// A body's schema in the making: what [`Body`](crate::request::Body) does to a request, done to
/// its description.
pub(crate) struct Fields<'g> {
    generator: &'g mut SchemaGenerator,
    properties: Map<String, Value>,
    required: Vec<String>,
}

impl<'g> Fields<'g> {
    pub(super) fn new(generator: &'g mut SchemaGenerator) -> Self {
        Self { generator, properties: Map::new(), required: Vec::new() }
    }

    /// The fields of a struct, as `Body::take` reads them.
    #[must_use]
    pub(crate) fn group<T: JsonSchema>(mut self) -> Self {
        let mut schema = T::json_schema(self.generator).to_value();
        if let Some(Value::Object(properties)) = schema.get_mut("properties").map(Value::take) {
            // The first group that knows a field takes it.
            for (name, property) in properties {
                self.properties.entry(name).or_insert(property);
            }
        }
        self
    }

    /// Fields that change nothing, as `Body::take_neutral` reads them.
    #[must_use]
    pub(crate) fn neutral(mut self, table: &[Neutral]) -> Self {
        for Neutral { name, values } in table {
            let schema = match values {
                Values::All => json!({"description": "Accepted; changes nothing."}),
                Values::Only(allowed) => {
                    let parsed = allowed.iter().map(|text| serde_json::from_str(text));
                    let mut values: Vec<Value> = parsed.filter_map(Result::ok).collect();
                    values.push(Value::Null);
                    json!({"enum": values, "description": "Other values are not supported."})
                }
            };
            self.properties.entry(*name).or_insert(schema);
        }
        self
    }

    /// Says that a field must be there, and not null.
    #[must_use]
    pub(crate) fn require(mut self, name: &str) -> Self {
        if let Some(schema) = self.properties.get_mut(name) {
            refuse_null(schema);
        }
        self.required.push(name.to_owned());
        self
    }

    /// The schema of the whole body: whatever no group took is refused.
    pub(super) fn finish(self) -> Value {
        json!({
            "type": "object",
            "properties": self.properties,
            "required": self.required,
            "additionalProperties": false,
        })
    }
}

fn refuse_null(schema: &mut Value) {
    if let Some(Value::Array(types)) = schema.get_mut("type") {
        types.retain(|kind| kind != "null");
    }
    if let Some(Value::Array(choices)) = schema.get_mut("anyOf") {
        choices.retain(|choice| choice["type"] != "null");
    }
}
