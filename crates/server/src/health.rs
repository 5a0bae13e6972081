//! Whether the server serves, and which version it is.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::error::ApiError;
use crate::state::{Phase, ServerState};

/// 200 while requests are accepted; 503 once the engine has stopped or the server shuts down.
pub(crate) async fn health(State(state): State<ServerState>) -> Response {
    if !state.engine().is_alive() {
        return ApiError::EngineStopped.into_response();
    }
    if state.phase() != Phase::Serving {
        return ApiError::ShuttingDown.into_response();
    }
    (StatusCode::OK, Json(json!({"status": "ok"}))).into_response()
}

pub(crate) async fn version() -> Response {
    Json(json!({"version": env!("CARGO_PKG_VERSION")})).into_response()
}
