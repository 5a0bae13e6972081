//! Answers a request, whole or in events.

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use inflight_tokenizer::TextPosition;

use super::events::ResponseEvents;
use super::object::{Ending, ResponseObject, items};
use super::request::ResponseRequest;
use crate::chat::{Block, Blocks, ChatRun, RunSize};
use crate::error::ApiError;
use crate::request::{Length, Surroundings, admit};
use crate::sse;
use crate::state::ServerState;

/// How responses call a field that the engine knows by another name.
fn rename(field: &'static str) -> &'static str {
    match field {
        "prompt" => "input",
        "max_tokens" => "max_output_tokens",
        other => other,
    }
}

pub(crate) async fn create(
    state: ServerState,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let bytes = admit(&state, &headers, body)?;
    let request = ResponseRequest::parse(&bytes)?;
    let is_streaming = request.is_streaming()?;
    let top_logprobs = request.top_logprobs()?;
    let model = state.model_name(request.model())?;
    let mut object = ResponseObject::new(model, &request);
    let ResponseRequest { sampling, fields, .. } = request;
    let template = sampling.resolve(&Surroundings {
        limits: state.engine().limits(),
        tokenizer: state.tokenizer(),
        eos_ids: state.tokenizer().eos_ids(),
        length: fields.max_output_tokens.map_or(Length::Rest, Length::Asked),
        top_logprobs,
        position: TextPosition::Start,
    })?;
    let conversation = fields.conversation(&state)?;
    let size = RunSize { num_outputs: 1, num_bytes: bytes.len() };
    let run = ChatRun::start(&state, conversation, &template, size, rename).await?;
    if is_streaming {
        let events = ResponseEvents::new(state, object, run.reader, run.counts);
        return Ok(sse::respond(run.deltas, events));
    }
    let (mut answers, counts) = run.whole().await?;
    let answer = answers.pop().expect("one answer was asked for");
    let mut blocks = Blocks::of(answer.pieces, || state.style().call_id("call_"));
    if blocks.is_empty() {
        blocks.push(Block::Text(String::new()));
    }
    let ending = Ending::new(answer.finish.as_ref());
    let tokens = &answer.tokens[answer.num_thought_tokens..];
    let output = items(&state, &blocks, tokens, ending);
    object.end(ending, output, counts);
    Ok(Json(object).into_response())
}
