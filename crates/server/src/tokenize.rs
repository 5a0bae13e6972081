//! `POST /tokenize` and `POST /detokenize`, as vLLM has them.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use inflight_tokenizer::Tokenizer;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::chat::encode;
use crate::error::ApiError;
use crate::off_thread::off_thread;
use crate::openai::conversation::ConversationFields;
use crate::openapi::Fields;
use crate::request::prompt::Prompt;
use crate::request::{Body, admit};
use crate::state::ServerState;

#[derive(Debug, Default, Deserialize, JsonSchema)]
struct TokenizeFields {
    model: Option<String>,
    /// A text; without it the request has `messages`.
    prompt: Option<String>,
    add_special_tokens: Option<bool>,
    /// Whether the answer also tells the tokens' texts.
    return_token_strs: Option<bool>,
}

/// What a text consists of.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Tokenized {
    count: usize,
    max_model_len: usize,
    tokens: Vec<u32>,
    token_strs: Option<Vec<String>>,
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
struct DetokenizeFields {
    model: Option<String>,
    tokens: Option<Vec<u32>>,
}

/// The text that tokens stand for.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Detokenized {
    prompt: String,
}

/// What [`tokenize`] takes.
pub(crate) fn describe(fields: Fields<'_>) -> Fields<'_> {
    fields.group::<TokenizeFields>().group::<ConversationFields>()
}

/// What [`detokenize`] takes.
pub(crate) fn describe_back(fields: Fields<'_>) -> Fields<'_> {
    fields.group::<DetokenizeFields>().require("tokens")
}

pub(crate) async fn tokenize(
    State(state): State<ServerState>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Tokenized>, ApiError> {
    let bytes = admit(&state, &headers, body)?;
    let mut body = Body::parse(&bytes)?;
    let fields: TokenizeFields = body.take()?;
    state.model_name(fields.model)?;
    let tokens = match fields.prompt {
        Some(text) => {
            body.refuse_rest()?;
            encode_text(&state, text, fields.add_special_tokens.unwrap_or(true)).await?
        }
        None => {
            let conversation: ConversationFields = body.take()?;
            body.refuse_rest()?;
            if fields.add_special_tokens == Some(true) {
                let reason = "the chat template writes them; goes only with `prompt`";
                return Err(ApiError::unsupported("add_special_tokens", reason));
            }
            let conversation = conversation.resolve(&state).map_err(|error| match error {
                ApiError::Missing { .. } => ApiError::Missing { param: "prompt` or `messages" },
                other => other,
            })?;
            encode(&state, conversation, bytes.len(), "messages").await?.tokens
        }
    };
    let texts = || tokens.iter().map(|id| state.tokenizer().token_text(*id).text.into_owned());
    Ok(Json(Tokenized {
        count: tokens.len(),
        max_model_len: state.engine().limits().max_sequence_len(),
        token_strs: (fields.return_token_strs == Some(true)).then(|| texts().collect()),
        tokens,
    }))
}

async fn encode_text(
    state: &ServerState,
    text: String,
    add_special_tokens: bool,
) -> Result<Vec<u32>, ApiError> {
    let tokenizer = Arc::clone(state.tokenizer());
    let num_bytes = text.len();
    let encode = move || Prompt::Text(text).encode(&tokenizer, add_special_tokens);
    let encoded = off_thread(num_bytes, encode).await?;
    encoded.map_err(|error| ApiError::from_tokenizer(&error, "prompt"))
}

pub(crate) async fn detokenize(
    State(state): State<ServerState>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Detokenized>, ApiError> {
    let bytes = admit(&state, &headers, body)?;
    let mut body = Body::parse(&bytes)?;
    let fields: DetokenizeFields = body.take()?;
    body.refuse_rest()?;
    state.model_name(fields.model)?;
    let tokens = fields.tokens.ok_or(ApiError::Missing { param: "tokens" })?;
    check_tokens(state.tokenizer(), &tokens)?;
    Ok(Json(Detokenized { prompt: state.tokenizer().decode(&tokens, false) }))
}

fn check_tokens(tokenizer: &Tokenizer, tokens: &[u32]) -> Result<(), ApiError> {
    let vocab_size = tokenizer.vocab_size();
    match tokens.iter().find(|id| **id as usize >= vocab_size) {
        Some(id) => {
            let reason = format!("token id {id} is not in the vocabulary of {vocab_size} tokens");
            Err(ApiError::invalid("tokens", reason))
        }
        None => Ok(()),
    }
}
