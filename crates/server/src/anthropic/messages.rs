//! `POST /v1/messages`.

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use inflight_tokenizer::TextPosition;

use super::AnthropicError;
use super::events::MessageEvents;
use super::object::{Ending, MessageObject};
use super::request::MessageRequest;
use crate::chat::{Block, Blocks, ChatRun, RunSize};
use crate::error::ApiError;
use crate::request::{Length, Surroundings, admit};
use crate::sse;
use crate::state::ServerState;

/// How messages call a field that the engine knows by another name.
fn rename(field: &'static str) -> &'static str {
    if field == "prompt" { "messages" } else { field }
}

/// Answers a request, whole or in events.
pub(crate) async fn create(
    state: ServerState,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, AnthropicError> {
    let bytes = admit(&state, &headers, body)?;
    let MessageRequest { prompt, answer, sampling } = MessageRequest::parse(&bytes)?;
    let model = state.model_name(prompt.model.clone())?;
    let max_tokens = answer.max_tokens.ok_or(ApiError::Missing { param: "max_tokens" })?;
    let template = sampling.resolve(&Surroundings {
        limits: state.engine().limits(),
        tokenizer: state.tokenizer(),
        eos_ids: state.tokenizer().eos_ids(),
        length: Length::Asked(max_tokens),
        top_logprobs: None,
        position: TextPosition::Start,
    })?;
    let conversation = prompt.conversation(&state)?;
    let size = RunSize { num_outputs: 1, num_bytes: bytes.len() };
    let run = ChatRun::start(&state, conversation, &template, size, rename).await?;
    let stops = template.text.stops;
    let mut object = MessageObject::new(model, run.counts);
    if answer.stream.unwrap_or(false) {
        let ChatRun { deltas, reader, counts, .. } = run;
        let (blocks, finish) = (Blocks::default(), None);
        let events = MessageEvents { state, object, reader, counts, stops, blocks, finish };
        return Ok(sse::respond(deltas, events));
    }
    let (mut answers, counts) = run.whole().await?;
    let answer = answers.pop().expect("one answer was asked for");
    let blocks = Blocks::of(answer.pieces, || state.style().call_id("toolu_"));
    let has_calls = blocks.iter().any(|block| matches!(block, Block::Call(_)));
    object.end(blocks, Ending::new(answer.finish.as_ref(), &stops, has_calls), counts);
    Ok(Json(object).into_response())
}
