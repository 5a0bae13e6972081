//! What of a field's type is allowed, and what depends on the model.

use inflight_engine::RequestLimits;
use serde_json::{Map, Value, json};

use crate::state::ServerState;

/// Fields of bodies whose values are limited, by name. Where an endpoint has a field of the same
/// name and another type, nothing is said of it.
fn of_field(name: &str, kind: Kind, state: &ServerState) -> Option<Value> {
    let limits = state.engine().limits();
    let longest = limits.max_sequence_len().saturating_sub(1);
    Some(match (name, kind) {
        ("temperature", Kind::Number) => json!({"minimum": 0, "maximum": 100}),
        ("top_p" | "typical_p", Kind::Number) => json!({"exclusiveMinimum": 0, "maximum": 1}),
        ("min_p" | "xtc_probability" | "xtc_threshold", Kind::Number) => {
            json!({"minimum": 0, "maximum": 1})
        }
        ("presence_penalty" | "frequency_penalty", Kind::Number) => {
            json!({"minimum": -2, "maximum": 2})
        }
        ("repetition_penalty", Kind::Number) => json!({"exclusiveMinimum": 0}),
        ("dry_multiplier", Kind::Number) => json!({"minimum": 0}),
        ("top_k" | "dry_penalty_last_n", Kind::Integer) => json!({"minimum": -1}),
        ("n" | "best_of", Kind::Integer) => json!({"minimum": 1, "maximum": 128}),
        ("logprobs" | "top_logprobs" | "prompt_logprobs", Kind::Integer) => {
            json!({"minimum": 0, "maximum": 20})
        }
        ("max_tokens" | "max_completion_tokens" | "max_output_tokens", Kind::Integer) => {
            json!({"minimum": 1, "maximum": longest})
        }
        ("dimensions", Kind::Integer) => json!({"minimum": 1}),
        ("timeout_ms", Kind::Integer) => json!({"minimum": 1, "maximum": 604_800_000}),
        ("priority", Kind::Integer) if !state.config().orders_by_priority => {
            json!({"minimum": 0, "maximum": 0})
        }
        ("user", Kind::Text) => json!({"maxLength": 256}),
        ("cache_salt", Kind::Text) => json!({"minLength": 1, "maxLength": 1024}),
        ("model", Kind::Text) => {
            let names = state.config().model_names.iter().map(|name| json!(name));
            json!({"enum": names.chain([Value::Null]).collect::<Vec<_>>()})
        }
        ("messages", Kind::List) => json!({"minItems": 1}),
        ("tools", Kind::List) => json!({"maxItems": 1024}),
        ("bad_words", Kind::List) => json!({"items": {"type": "string", "pattern": "[^ ]"}}),
        ("stop_sequences", Kind::List) => json!({
            "maxItems": 16, "items": {"type": "string", "minLength": 1, "maxLength": 1024},
        }),
        ("logit_bias", Kind::Object) => json!({
            "propertyNames": {"pattern": "^[0-9]+$"}, "maxProperties": 1024,
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }),
        ("stop_token_ids" | "tokens", Kind::List) => {
            json!({"items": {"type": "integer", "format": "token-id"}})
        }
        _ => return None,
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Number,
    Integer,
    Text,
    List,
    Object,
}

impl Kind {
    /// What a schema is of, null aside.
    fn of(schema: &Value) -> Option<Self> {
        let kinds = match schema.get("type")? {
            Value::String(kind) => vec![kind.as_str()],
            Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
            _ => return None,
        };
        kinds.into_iter().find_map(|kind| match kind {
            "number" => Some(Self::Number),
            "integer" => Some(Self::Integer),
            "string" => Some(Self::Text),
            "array" => Some(Self::List),
            "object" => Some(Self::Object),
            _ => None,
        })
    }
}

/// Adds the limits of a body's fields to its schema.
pub(super) fn limit_fields(body: &mut Value, state: &ServerState) {
    let Some(properties) = body.get_mut("properties").and_then(Value::as_object_mut) else {
        return;
    };
    for (name, schema) in properties {
        let limits = Kind::of(schema).and_then(|kind| of_field(name, kind, state));
        let (Some(Value::Object(limits)), Value::Object(schema)) = (limits, schema) else {
            continue;
        };
        schema.extend(limits);
    }
}

/// Says, everywhere in a schema, which numbers there are: those of the type, and of the vocabulary.
pub(super) fn limit_numbers(schema: &mut Value, limits: &RequestLimits) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(|item| limit_numbers(item, limits)),
        Value::Object(fields) => {
            if let Some(range) = range_of(fields, limits) {
                let Value::Object(range) = range else { return };
                for (name, value) in range {
                    if name == "format" {
                        fields.insert(name, value);
                    } else {
                        fields.entry(name).or_insert(value);
                    }
                }
            }
            fields.values_mut().for_each(|value| limit_numbers(value, limits));
        }
        _ => {}
    }
}

fn range_of(schema: &Map<String, Value>, limits: &RequestLimits) -> Option<Value> {
    Some(match schema.get("format")?.as_str()? {
        "token-id" => {
            let last = limits.vocab_size.saturating_sub(1);
            json!({"format": "uint32", "minimum": 0, "maximum": last})
        }
        "uint8" => json!({"minimum": 0, "maximum": u8::MAX}),
        "uint32" => json!({"minimum": 0, "maximum": u32::MAX}),
        "uint" | "uint64" => json!({"format": "uint64", "minimum": 0, "maximum": u64::MAX}),
        "int32" => json!({"minimum": i32::MIN, "maximum": i32::MAX}),
        "int64" => json!({"minimum": i64::MIN, "maximum": i64::MAX}),
        "float" => json!({"minimum": f32::MIN, "maximum": f32::MAX}),
        _ => return None,
    })
}
