//! Routes, shutting down.

use std::time::Duration;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::{Method, Uri};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::Response;
use axum::routing::{get, post};
use tokio::net::TcpListener;

use crate::access::{ErrorForm, pass};
use crate::anthropic::{count_tokens, messages};
use crate::batches;
use crate::connections::Connections;
use crate::error::ApiError;
use crate::files::{endpoints as files, upload};
use crate::health::{health, live, ready, version};
use crate::observe::{debug, follow, requests, scrape};
use crate::openai::{chat, completions, embeddings, models, responses};
use crate::openapi;
use crate::state::{Phase, ServerState};
use crate::tls::Tls;
use crate::tokenize::{detokenize, tokenize};
use crate::web;

/// How long responses may take to end after their sequences were aborted.
const ABORT_GRACE: Duration = Duration::from_secs(2);

/// All routes.
pub fn router(state: ServerState) -> Router {
    let max_body_bytes = state.config().max_body_bytes;
    Router::new()
        .route("/v1/completions", post(completions::create))
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/responses", post(responses::create))
        .route("/v1/embeddings", post(embeddings::create))
        .route("/v1/messages", post(messages::create))
        .route("/v1/messages/count_tokens", post(count_tokens::create))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::get))
        .merge(kept_routes())
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/health", get(health))
        .route("/health/live", get(live))
        .route("/health/ready", get(ready))
        .route("/version", get(version))
        .route("/", get(web::index))
        .route("/docs", get(web::docs))
        .route("/openapi.json", get(openapi::serve))
        .route("/web/docs.js", get(web::docs_script))
        .route("/web/style.css", get(web::style))
        .route("/web/chat.js", get(web::chat_script))
        .route("/web/dashboard.js", get(web::dashboard_script))
        .route("/metrics", get(scrape::metrics))
        .route("/debug/timeline", get(debug::timeline))
        .route("/debug/state", get(debug::snapshot))
        .route("/debug/replay", get(debug::replay))
        .route("/debug/requests", get(requests::list))
        .route("/debug/requests/{id}", get(requests::get))
        .fallback(unknown_route)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn_with_state(state.clone(), pass))
        .layer(from_fn(follow))
        .layer(DefaultBodyLimit::max(max_body_bytes))
        .with_state(state)
}

/// Of what clients leave here.
fn kept_routes() -> Router<ServerState> {
    let upload = post(upload::create)
        .layer(DefaultBodyLimit::max(upload::MAX_FILE_BYTES + upload::FORM_BYTES));
    Router::new()
        .route("/v1/files", upload.get(files::list))
        .route("/v1/files/{id}", get(files::get).delete(files::delete))
        .route("/v1/files/{id}/content", get(files::content))
        .route("/v1/batches", post(batches::endpoints::create).get(batches::endpoints::list))
        .route("/v1/batches/{id}", get(batches::endpoints::get))
        .route("/v1/batches/{id}/cancel", post(batches::endpoints::cancel))
}

async fn unknown_route(method: Method, uri: Uri) -> Response {
    let path = uri.path().to_owned();
    ErrorForm::of(&path).response(ApiError::UnknownRoute { method, path })
}

async fn method_not_allowed(method: Method, uri: Uri) -> Response {
    let path = uri.path().to_owned();
    ErrorForm::of(&path).response(ApiError::MethodNotAllowed { method, path })
}

/// Serves until `shutdown` resolves and then ends in order.
///
/// ```text
/// shutdown             no new connections, no new requests; running ones go on
/// + shutdown_timeout   running ones are aborted and told so
/// + 2 s                returns, whatever is left
/// ```
/// It returns earlier if nothing is left to wait for.
pub async fn serve(
    listener: TcpListener,
    tls: Option<Tls>,
    state: ServerState,
    shutdown: impl Future<Output = ()> + Send + 'static,
) {
    batches::resume(&state);
    let connections = Connections::new(state.clone(), router(state.clone()), tls);
    let drain = async {
        shutdown.await;
        tracing::info!("shutting down: running requests may finish");
        state.set_phase(Phase::Draining);
        give_up(&state).await;
    };
    tokio::select! {
        () = connections.serve(listener) => {}
        () = drain => {}
    }
}

/// Resolves when a server that was told to shut down has had all the time it gets.
async fn give_up(state: &ServerState) {
    tokio::time::sleep(state.config().shutdown_timeout).await;
    tracing::warn!("aborting the requests that still run");
    state.set_phase(Phase::Aborting);
    tokio::time::sleep(ABORT_GRACE).await;
}
