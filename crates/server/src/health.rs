//! Whether the server serves, and which version it is.

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::Serialize;

use crate::error::ApiError;
use crate::state::{Phase, ServerState};

/// All is well.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Health {
    status: &'static str,
}

/// Which server this is.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Version {
    version: &'static str,
}

/// 200 while requests are accepted; 503 once the engine has stopped or the server shuts down.
pub(crate) async fn health(State(state): State<ServerState>) -> Response {
    if !state.engine().is_alive() {
        return ApiError::EngineStopped.into_response();
    }
    if state.phase() != Phase::Serving {
        return ApiError::ShuttingDown.into_response();
    }
    Json(Health { status: "ok" }).into_response()
}

/// 200 as long as the engine lives: a process that fails here is to be started again.
pub(crate) async fn live(State(state): State<ServerState>) -> Response {
    if !state.engine().is_alive() {
        return ApiError::EngineStopped.into_response();
    }
    Json(Health { status: "live" }).into_response()
}

/// 200 while requests are accepted and get on: also fails when work waits and no step is taken.
pub(crate) async fn ready(State(state): State<ServerState>) -> Response {
    let stalled = state.engine().stalled_for();
    if state.engine().is_alive()
        && state.phase() == Phase::Serving
        && stalled > state.config().stall_timeout
    {
        return ApiError::Stalled { seconds: stalled.as_secs() }.into_response();
    }
    health(State(state)).await
}

pub(crate) async fn version() -> Json<Version> {
    Json(Version { version: env!("CARGO_PKG_VERSION") })
}
