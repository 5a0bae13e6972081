//! `POST /v1/messages/count_tokens`.

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use schemars::JsonSchema;
use serde::Serialize;

use super::AnthropicError;
use super::request::PromptFields;
use crate::chat::encode;
use crate::request::admit;
use crate::state::ServerState;

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct TokenCount {
    input_tokens: usize,
}

/// Says how many tokens a message's prompt would have.
pub(crate) async fn create(
    State(state): State<ServerState>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<TokenCount>, AnthropicError> {
    let bytes = admit(&state, &headers, body)?;
    let fields = PromptFields::parse(&bytes)?;
    state.model_name(fields.model.clone())?;
    let conversation = fields.conversation(&state)?;
    let prompt = encode(&state, conversation, bytes.len(), "messages").await?;
    Ok(Json(TokenCount { input_tokens: prompt.tokens.len() }))
}
