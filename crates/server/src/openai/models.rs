//! `GET /v1/models` and `GET /v1/models/{id}`.

use axum::Json;
use axum::extract::{Path, State};
use schemars::JsonSchema;
use serde::Serialize;

use crate::error::ApiError;
use crate::state::ServerState;

/// A name that requests may use for the model.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Model {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    /// Most tokens of a prompt and its output together; vLLM's addition.
    max_model_len: usize,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ModelList {
    object: &'static str,
    data: Vec<Model>,
}

pub(crate) async fn list(State(state): State<ServerState>) -> Json<ModelList> {
    let names = &state.config().model_names;
    let data = names.iter().map(|name| model(&state, name.clone())).collect();
    Json(ModelList { object: "list", data })
}

/// Names with slashes in them, as hub names have, come undivided.
pub(crate) async fn get(
    State(state): State<ServerState>,
    Path(name): Path<String>,
) -> Result<Json<Model>, ApiError> {
    let name = state.model_name(Some(name))?;
    Ok(Json(model(&state, name)))
}

fn model(state: &ServerState, id: String) -> Model {
    Model {
        id,
        object: "model",
        created: state.started_unix_s(),
        owned_by: "inflight",
        max_model_len: state.engine().limits().max_sequence_len(),
    }
}
