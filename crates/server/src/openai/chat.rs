//! `POST /v1/chat/completions`.

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use inflight_tokenizer::TextPosition;
use schemars::JsonSchema;
use serde::Deserialize;

use super::chat_writer::{ChatWriter, ChunkChoice, WholeChoice};
use super::chunks::ChunkEvents;
use super::conversation::ConversationFields;
use super::logprobs::check_count;
use super::prompt_logprobs::{PromptLogprobs, check_prompt_logprobs};
use super::response::{Envelope, OutputFields, ResponseHead, Usage};
use crate::chat::{ChatRun, RunSize};
use crate::error::ApiError;
use crate::openapi::Fields;
use crate::request::{
    Body, ConstraintFields, Length, SamplingFields, Surroundings, admit, neutral,
};
use crate::sse;
use crate::state::ServerState;

/// Fields of chat completions alone.
#[derive(Debug, Default, Deserialize, JsonSchema)]
struct ChatFields {
    max_completion_tokens: Option<usize>,
    max_tokens: Option<usize>,
    logprobs: Option<bool>,
    top_logprobs: Option<u32>,
    prompt_logprobs: Option<i64>,
    /// vLLM's: whether the answer tells what the model thought.
    include_reasoning: Option<bool>,
}

impl ChatFields {
    fn length(&self) -> Result<Length, ApiError> {
        match (self.max_completion_tokens, self.max_tokens) {
            (Some(new), Some(old)) if new != old => {
                let reason = format!("is {old}, but max_completion_tokens is {new}; give one");
                Err(ApiError::invalid("max_tokens", reason))
            }
            (new, old) => Ok(new.or(old).map_or(Length::Rest, Length::Asked)),
        }
    }

    fn num_top_logprobs(&self) -> Result<Option<u32>, ApiError> {
        match (self.logprobs.unwrap_or(false), self.top_logprobs) {
            (true, count) => check_count("top_logprobs", count.unwrap_or(0)).map(Some),
            (false, None | Some(0)) => Ok(None),
            (false, Some(_)) => {
                Err(ApiError::invalid("top_logprobs", "goes only with `logprobs`: true"))
            }
        }
    }

    /// How this request calls a field that the engine knows by another name.
    fn rename(&self) -> fn(&'static str) -> &'static str {
        match self.max_completion_tokens {
            Some(_) => |field| match field {
                "prompt" => "messages",
                "max_tokens" => "max_completion_tokens",
                other => other,
            },
            None => |field| if field == "prompt" { "messages" } else { field },
        }
    }
}

/// A whole request.
struct ChatRequest {
    output: OutputFields,
    sampling: SamplingFields,
    constraint: ConstraintFields,
    conversation: ConversationFields,
    fields: ChatFields,
}

impl ChatRequest {
    fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        let mut body = Body::parse(bytes)?;
        let request = Self {
            output: body.take()?,
            sampling: body.take()?,
            constraint: body.take()?,
            conversation: body.take()?,
            fields: body.take()?,
        };
        body.take_neutral(neutral::COMMON)?;
        body.take_neutral(neutral::CHAT)?;
        body.refuse_rest()?;
        Ok(request)
    }
}

/// What [`ChatRequest::parse`] takes.
pub(crate) fn describe(fields: Fields<'_>) -> Fields<'_> {
    fields
        .group::<OutputFields>()
        .group::<SamplingFields>()
        .group::<ConstraintFields>()
        .group::<ConversationFields>()
        .group::<ChatFields>()
        .neutral(neutral::COMMON)
        .neutral(neutral::CHAT)
        .require("messages")
}

/// A whole answer.
pub(crate) type Whole = Envelope<'static, WholeChoice>;
/// A part of one.
pub(crate) type Chunk = Envelope<'static, ChunkChoice>;

/// Answers a request, whole or in chunks.
pub(crate) async fn create(
    state: ServerState,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let bytes = admit(&state, &headers, body)?;
    let ChatRequest { output, sampling, constraint, conversation, fields } =
        ChatRequest::parse(&bytes)?;
    let head = ResponseHead::new(&state, "chatcmpl-", state.model_name(output.model.clone())?);
    let (num_outputs, stream) = (output.n()?, output.stream()?);
    let prompt_logprobs = check_prompt_logprobs(fields.prompt_logprobs, stream.is_some())?;
    let mut template = sampling.resolve(&Surroundings {
        limits: state.engine().limits(),
        tokenizer: state.tokenizer(),
        eos_ids: state.tokenizer().eos_ids(),
        length: fields.length()?,
        top_logprobs: fields.num_top_logprobs()?,
        position: TextPosition::Start,
    })?;
    template.prompt_logprobs = prompt_logprobs;
    let (rename, tells_reasoning) = (fields.rename(), fields.include_reasoning.unwrap_or(true));
    let mut conversation = conversation.resolve(&state)?;
    conversation.asked = constraint.asked()?;
    let size = RunSize { num_outputs, num_bytes: bytes.len() };
    let run = ChatRun::start(&state, conversation, &template, size, rename).await?;
    let mut writer = ChatWriter::new(&state, template.text, num_outputs, tells_reasoning);
    if let Some(stream_usage) = stream {
        let ChatRun { deltas, reader, counts, .. } = run;
        let events = ChunkEvents::new(writer.streaming(reader), head, stream_usage, counts);
        return Ok(sse::respond(deltas, events));
    }
    let (answers, counts) = run.whole().await?;
    let told = |num_top| PromptLogprobs::new(state.tokenizer(), &answers[0].prompt, num_top);
    let prompt_logprobs = prompt_logprobs.map(told);
    let choices = answers.into_iter().enumerate();
    let choices = choices.map(|(index, answer)| writer.whole_choice(index, answer)).collect();
    let usage = Some(Some(Usage::from(counts)));
    let mut envelope = head.envelope("chat.completion", choices, usage);
    envelope.prompt_logprobs = prompt_logprobs;
    Ok(Json(envelope).into_response())
}
