//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use inflight_tokenizer::{ChatInput, Special, TextPosition, Tokenizer};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::chunks::{ChunkEvents, ChunkWriter};
use super::logprobs::{ChatLogprobs, check_count};
use super::messages::{Message, template_messages};
use super::response::{Ending, OutputFields, ResponseHead, Usage, whole};
use crate::error::ApiError;
use crate::generation::{self, Delta};
use crate::off_thread::off_thread;
use crate::request::{Body, Length, SamplingFields, Surroundings, admit, neutral};
use crate::sse;
use crate::state::ServerState;
use crate::text_stream::TextOptions;

/// Fields of chat completions alone.
#[derive(Debug, Default, Deserialize)]
struct ChatFields {
    messages: Option<Vec<Message>>,
    max_completion_tokens: Option<usize>,
    max_tokens: Option<usize>,
    logprobs: Option<bool>,
    top_logprobs: Option<u32>,
    add_generation_prompt: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
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
    fields: ChatFields,
}

impl ChatRequest {
    fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        let mut body = Body::parse(bytes)?;
        let request = Self { output: body.take()?, sampling: body.take()?, fields: body.take()? };
        body.take_neutral(neutral::COMMON)?;
        body.take_neutral(neutral::CHAT)?;
        body.refuse_rest()?;
        Ok(request)
    }
}

/// Answers a request, whole or in chunks.
pub(crate) async fn create(
    State(state): State<ServerState>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let bytes = admit(&state, &headers, body)?;
    let ChatRequest { output, sampling, mut fields } = ChatRequest::parse(&bytes)?;
    let head = ResponseHead::new(&state, "chatcmpl-", state.model_name(output.model.clone())?);
    let (n, stream) = (output.n()?, output.stream()?);
    let top_logprobs = fields.num_top_logprobs()?;
    let template = sampling.resolve(&Surroundings {
        limits: state.engine().limits(),
        eos_ids: state.tokenizer().eos_ids(),
        length: fields.length()?,
        top_logprobs,
        position: TextPosition::Start,
    })?;

    let rename = fields.rename();
    let messages = fields.messages.take().ok_or(ApiError::Missing { param: "messages" })?;
    let prompt = encode(&state, template_messages(messages)?, fields, bytes.len()).await?;
    let usage = Usage::new(prompt.len(), 0);
    let sequences = template.sequences(&[prompt], n, state.engine().limits())?;
    let deltas = generation::start(&state, sequences)
        .map_err(|error| ApiError::from_start(error, &state, rename))?;
    let mut writer = ChatWriter {
        tokenizer: Arc::clone(state.tokenizer()),
        text: template.text,
        has_role: vec![false; n],
    };
    if let Some(stream_usage) = stream {
        return Ok(sse::respond(deltas, ChunkEvents::new(writer, head, stream_usage, usage)));
    }
    let (choices, usage) = whole(deltas, n, usage, |i, d| writer.whole_choice(i, d)).await?;
    Ok(Json(head.envelope("chat.completion", choices, Some(Some(usage)))).into_response())
}

/// Renders the messages and encodes them. `num_bytes`: about how much that is.
async fn encode(
    state: &ServerState,
    messages: Value,
    fields: ChatFields,
    num_bytes: usize,
) -> Result<Vec<u32>, ApiError> {
    let tokenizer = Arc::clone(state.tokenizer());
    let render_and_encode = move || {
        let input = ChatInput {
            messages: &messages,
            tools: None,
            add_generation_prompt: fields.add_generation_prompt.unwrap_or(true),
            extra: fields.chat_template_kwargs.as_ref(),
        };
        tokenizer.encode_prompt(&tokenizer.render_chat(&input)?, Special::Parse)
    };
    let encoded = off_thread(num_bytes, render_and_encode).await?;
    encoded.map_err(|error| ApiError::from_tokenizer(&error, "messages"))
}

#[derive(Debug, Serialize)]
struct WholeChoice {
    index: usize,
    message: AssistantMessage,
    logprobs: Option<ChatLogprobs>,
    #[serde(flatten)]
    ending: Ending,
}

#[derive(Debug, Serialize)]
struct AssistantMessage {
    role: &'static str,
    content: String,
    refusal: (),
}

#[derive(Debug, Serialize)]
struct ChunkChoice {
    index: usize,
    delta: MessageDelta,
    logprobs: Option<ChatLogprobs>,
    #[serde(flatten)]
    ending: Ending,
}

#[derive(Debug, Default, Serialize)]
struct MessageDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
}

struct ChatWriter {
    tokenizer: Arc<Tokenizer>,
    text: TextOptions,
    /// By sequence: whether its role was told.
    has_role: Vec<bool>,
}

impl ChatWriter {
    fn whole_choice(&mut self, index: usize, delta: Delta) -> WholeChoice {
        let logprobs = ChatLogprobs::new(&self.tokenizer, &delta.tokens);
        let ending = self.ending(&delta);
        let message = AssistantMessage { role: "assistant", content: delta.text, refusal: () };
        WholeChoice { index, message, logprobs, ending }
    }

    fn ending(&self, delta: &Delta) -> Ending {
        Ending::new(delta.finish.as_ref(), &self.text.stops, self.tokenizer.eos_ids())
    }
}

impl ChunkWriter for ChatWriter {
    type Choice = ChunkChoice;
    const OBJECT: &'static str = "chat.completion.chunk";

    fn choices(&mut self, index: usize, delta: Delta) -> Vec<ChunkChoice> {
        let mut choices = Vec::new();
        if !std::mem::replace(&mut self.has_role[index], true) {
            let role = MessageDelta { role: Some("assistant"), content: Some(String::new()) };
            let ending = Ending::default();
            choices.push(ChunkChoice { index, delta: role, logprobs: None, ending });
        }
        let logprobs = ChatLogprobs::new(&self.tokenizer, &delta.tokens);
        let ending = self.ending(&delta);
        let content = (!delta.text.is_empty()).then_some(delta.text);
        let delta = MessageDelta { role: None, content };
        choices.push(ChunkChoice { index, delta, logprobs, ending });
        choices
    }
}
