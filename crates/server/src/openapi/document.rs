//! The whole document, and `GET /openapi.json`.

use axum::Json;
use axum::extract::State;
use schemars::generate::{Contract, SchemaSettings};
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

use super::endpoints::{Generators, all};
use super::ranges::limit_numbers;
use crate::anthropic::ErrorBody as AnthropicErrorBody;
use crate::error::ErrorBody;
use crate::state::ServerState;

const COMPONENTS: &str = "/components/schemas";

/// Answers with the document of this server: its model's names, its limits, its keys.
pub(crate) async fn serve(State(state): State<ServerState>) -> Json<Value> {
    Json(state.openapi(|| document(&state)).clone())
}

fn document(state: &ServerState) -> Value {
    let needs_key = !state.accounts().is_empty();
    let mut make = Generators {
        read: generator(Contract::Deserialize),
        written: generator(Contract::Serialize),
        state,
    };
    let mut paths = Map::new();
    for operation in all(&mut make) {
        let path = paths.entry(operation.path).or_insert_with(|| json!({}));
        path[operation.method] = operation.to_json(needs_key);
    }
    let mut document = json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Inflight",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "What this server accepts and answers. A field that is not named here \
                            is refused.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": schemas(&mut make)},
    });
    if needs_key {
        document["components"]["securitySchemes"] = json!({
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        });
        document["security"] = json!([{"bearer": []}, {"header": []}]);
    }
    limit_numbers(&mut document, state.engine().limits());
    document
}

fn generator(contract: Contract) -> SchemaGenerator {
    let set = |settings: &mut SchemaSettings| {
        settings.definitions_path = COMPONENTS.into();
        settings.meta_schema = None;
        settings.contract = contract;
    };
    SchemaSettings::draft2020_12().with(set).into_generator()
}

/// Of all types that were met, and of errors.
fn schemas(make: &mut Generators<'_>) -> Map<String, Value> {
    let mut schemas = make.read.take_definitions(true);
    let error = <ErrorBody<'_> as JsonSchema>::json_schema(&mut make.written).to_value();
    let anthropic = AnthropicErrorBody::json_schema(&mut make.written).to_value();
    for (name, schema) in make.written.take_definitions(true) {
        let other = schemas.insert(name.clone(), schema.clone());
        debug_assert!(other.is_none_or(|other| other == schema), "{name} is two things");
    }
    schemas.insert("Error".to_owned(), error);
    schemas.insert("AnthropicError".to_owned(), anthropic);
    schemas
}
