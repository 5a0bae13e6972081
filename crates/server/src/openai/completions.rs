//! `POST /v1/completions`.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use inflight_engine::PromptToken;
use inflight_tokenizer::{DecodeOptions, TextPosition, Tokenizer};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::chunks::{ChunkEvents, ChunkWriter};
use super::logprobs::{CompletionLogprobs, check_count};
use super::prompt_logprobs::{EchoedPrompt, PromptLogprobs, check_prompt_logprobs};
use super::response::{Ending, Envelope, MAX_N, OutputFields, ResponseHead, Usage};
use crate::error::ApiError;
use crate::generation::{self, Delta};
use crate::off_thread::off_thread;
use crate::openapi::Fields;
use crate::request::prompt::{Prompt, Prompts};
use crate::request::{
    Body, ConstraintFields, Length, SamplingFields, Surroundings, admit, neutral,
};
use crate::sse;
use crate::state::ServerState;
use crate::text_stream::TextOptions;
use crate::usage::TokenCounts;

const OBJECT: &str = "text_completion";
/// OpenAI's default.
const USUAL_MAX_TOKENS: usize = 16;

/// Fields of completions alone.
#[derive(Debug, Default, Deserialize, JsonSchema)]
struct CompletionFields {
    prompt: Option<Prompts>,
    max_tokens: Option<usize>,
    logprobs: Option<u32>,
    echo: Option<bool>,
    prompt_logprobs: Option<i64>,
    best_of: Option<usize>,
    add_special_tokens: Option<bool>,
}

/// How many of the likeliest tokens are told at each place of the prompt.
#[derive(Clone, Copy, Debug, Default)]
struct AskedOfPrompt {
    /// In a list of its own.
    prompt_logprobs: Option<u32>,
    /// Among the logprobs of the text, which begins with the prompt.
    echoed_logprobs: Option<u32>,
}

/// A whole request.
struct CompletionRequest {
    output: OutputFields,
    sampling: SamplingFields,
    constraint: ConstraintFields,
    fields: CompletionFields,
}

impl CompletionRequest {
    fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        let mut body = Body::parse(bytes)?;
        let request = Self {
            output: body.take()?,
            sampling: body.take()?,
            constraint: body.take()?,
            fields: body.take()?,
        };
        body.take_neutral(neutral::COMMON)?;
        body.take_neutral(neutral::COMPLETIONS)?;
        body.refuse_rest()?;
        Ok(request)
    }

    /// What is asked about the prompts.
    fn asked_of_prompt(&self) -> Result<AskedOfPrompt, ApiError> {
        let CompletionFields { echo, logprobs, prompt_logprobs, .. } = &self.fields;
        let is_streaming = self.output.stream()?.is_some();
        let asked = AskedOfPrompt {
            prompt_logprobs: check_prompt_logprobs(*prompt_logprobs, is_streaming)?,
            echoed_logprobs: logprobs.filter(|_| *echo == Some(true)),
        };
        let says_anything = *echo == Some(true) || asked.prompt_logprobs.is_some();
        if self.fields.max_tokens == Some(0) && !says_anything {
            let reason = "is 0; it must be at least 1, but with `echo` or `prompt_logprobs`";
            return Err(ApiError::invalid("max_tokens", reason));
        }
        Ok(asked)
    }

    fn length(&self) -> Length {
        match self.fields.max_tokens {
            None => Length::Usual(USUAL_MAX_TOKENS),
            // The engine generates what is not told then.
            Some(asked) => Length::Asked(asked.max(1)),
        }
    }

    /// How many outputs each prompt gets, of which the likeliest `n` are told.
    fn best_of(&self) -> Result<usize, ApiError> {
        let (n, best_of) = (self.output.n()?, self.fields.best_of);
        let best_of = best_of.unwrap_or(n);
        if !(n..=MAX_N).contains(&best_of) {
            let reason = format!("is {best_of}; it must be from `n`, which is {n}, to {MAX_N}");
            return Err(ApiError::invalid("best_of", reason));
        }
        if best_of > n && self.output.stream()?.is_some() {
            let reason = "which outputs are best is known at their end; set `stream` to false";
            return Err(ApiError::invalid("best_of", reason));
        }
        Ok(best_of)
    }
}

/// What [`CompletionRequest::parse`] takes.
pub(crate) fn describe(fields: Fields<'_>) -> Fields<'_> {
    fields
        .group::<OutputFields>()
        .group::<SamplingFields>()
        .group::<ConstraintFields>()
        .group::<CompletionFields>()
        .neutral(neutral::COMMON)
        .neutral(neutral::COMPLETIONS)
        .require("prompt")
}

/// A whole answer; parts of one look alike.
pub(crate) type Whole = Envelope<'static, CompletionChoice>;

/// Answers a request, whole or in chunks.
pub(crate) async fn create(
    state: ServerState,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let request = CompletionRequest::parse(&admit(&state, &headers, body)?)?;
    let (best_of, asked_of_prompt) = (request.best_of()?, request.asked_of_prompt()?);
    let length = request.length();
    let CompletionRequest { output, sampling, constraint, mut fields } = request;
    let head = ResponseHead::new(&state, "cmpl-", state.model_name(output.model.clone())?);
    let (n, stream) = (output.n()?, output.stream()?);
    let top_logprobs = fields.logprobs.map(|n| check_count("logprobs", n)).transpose()?;
    let mut template = sampling.resolve(&Surroundings {
        limits: state.engine().limits(),
        tokenizer: state.tokenizer(),
        eos_ids: state.tokenizer().eos_ids(),
        length,
        // Outputs are compared by their logprobs.
        top_logprobs: top_logprobs.or((best_of > n).then_some(0)),
        position: TextPosition::Continuing,
    })?;

    let AskedOfPrompt { prompt_logprobs, echoed_logprobs } = asked_of_prompt;
    template.prompt_logprobs = prompt_logprobs.max(echoed_logprobs);
    template.discards_output = fields.max_tokens == Some(0);
    if let Some(asked) = constraint.asked()? {
        template.grammar = Some(asked.compile(&state).await?);
    }
    let prompts = fields.prompt.take().ok_or(ApiError::Missing { param: "prompt" })?;
    let echo = fields.echo.unwrap_or(false).then_some(template.text.skip_special_tokens);
    let encoded = encode(&state, prompts, fields.add_special_tokens.unwrap_or(true), echo).await?;
    let sequences = template.sequences(&encoded.tokens, best_of, state.engine().limits())?;
    let prompt = encoded.tokens.iter().map(Vec::len).sum();
    let mut counts = TokenCounts { prompt, ..TokenCounts::default() };
    let num_sequences = sequences.len();

    let deltas = generation::start(&state, sequences)
        .await
        .map_err(|error| ApiError::from_start(error, &state, rename))?;
    let num_choices = encoded.tokens.len() * n;
    let mut writer = CompletionWriter {
        tokenizer: Arc::clone(state.tokenizer()),
        text: template.text,
        echoes: (0..num_choices).map(|i| encoded.echoes.get(i / n).cloned()).collect(),
        num_echoed: vec![0; num_choices],
        asked_of_prompt,
        prompts: encoded.tokens,
        n,
    };
    if let Some(stream_usage) = stream {
        return Ok(sse::respond(deltas, ChunkEvents::new(writer, head, stream_usage, counts)));
    }
    let wholes = generation::collect(deltas, num_sequences).await?;
    wholes.iter().for_each(|whole| counts.add(whole));
    let mut wholes = best(wholes, n, best_of);
    if top_logprobs.is_none() {
        wholes.iter_mut().for_each(|whole| whole.tokens.clear());
    }
    let choices = wholes.into_iter().enumerate();
    let choices = choices.map(|(index, whole)| writer.choice(index, whole)).collect();
    let usage = Some(Some(Usage::from(counts)));
    Ok(Json(head.envelope(OBJECT, choices, usage)).into_response())
}

/// Of every `best_of` outputs the `n` that are likeliest by the mean of their tokens' logprobs,
/// the likeliest first.
fn best(wholes: Vec<Delta>, n: usize, best_of: usize) -> Vec<Delta> {
    if best_of == n {
        return wholes;
    }
    let mean = |whole: &Delta| {
        let sum: f32 = whole.tokens.iter().map(|scored| scored.logprob).sum();
        sum / whole.tokens.len().max(1) as f32
    };
    let mut best = Vec::new();
    let mut wholes = wholes.into_iter().peekable();
    while wholes.peek().is_some() {
        let mut outputs: Vec<_> = wholes.by_ref().take(best_of).collect();
        outputs.sort_by(|a, b| mean(b).total_cmp(&mean(a)));
        outputs.truncate(n);
        best.extend(outputs);
    }
    best
}

/// How completions call a field that the engine knows by another name.
fn rename(field: &'static str) -> &'static str {
    match field {
        "top_logprobs" => "logprobs",
        other => other,
    }
}

struct Encoded {
    tokens: Vec<Vec<u32>>,
    /// The prompts as texts, if they are to be echoed.
    echoes: Vec<String>,
}

/// `echo`: whether echoed prompts leave out control tokens; `None`: no echo.
async fn encode(
    state: &ServerState,
    Prompts(prompts): Prompts,
    add_special_tokens: bool,
    echo: Option<bool>,
) -> Result<Encoded, ApiError> {
    let tokenizer = Arc::clone(state.tokenizer());
    let num_bytes = prompts.iter().map(Prompt::num_bytes).sum();
    off_thread(num_bytes, move || {
        let encode = |prompt: &Prompt| prompt.encode(&tokenizer, add_special_tokens);
        let tokens = prompts.iter().map(encode).collect::<Result<_, _>>();
        let tokens = tokens.map_err(|error| ApiError::from_tokenizer(&error, "prompt"))?;
        let echoes = echo.map_or_else(Vec::new, |skip_special_tokens| {
            prompts.iter().map(|prompt| prompt.text(&tokenizer, skip_special_tokens)).collect()
        });
        Ok(Encoded { tokens, echoes })
    })
    .await?
}

/// A choice, whole or a chunk's: they look alike.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct CompletionChoice {
    index: usize,
    text: String,
    logprobs: Option<CompletionLogprobs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs>,
    #[serde(flatten)]
    ending: Ending,
}

struct CompletionWriter {
    tokenizer: Arc<Tokenizer>,
    text: TextOptions,
    /// By sequence: what its text starts with, until it was written.
    echoes: Vec<Option<String>>,
    /// By sequence: characters of that.
    num_echoed: Vec<usize>,
    asked_of_prompt: AskedOfPrompt,
    prompts: Vec<Vec<u32>>,
    /// Choices for each prompt.
    n: usize,
}

impl CompletionWriter {
    fn choice(&mut self, index: usize, delta: Delta) -> CompletionChoice {
        let AskedOfPrompt { prompt_logprobs, echoed_logprobs } = self.asked_of_prompt;
        let told = |num_top| PromptLogprobs::new(&self.tokenizer, &delta.prompt, num_top);
        let prompt_logprobs = prompt_logprobs.map(told);
        let echo = self.echoes[index].take();
        if let Some(echo) = &echo {
            self.num_echoed[index] = echo.chars().count();
        }
        let logprobs = match (&echo, echoed_logprobs) {
            (Some(_), Some(num_top)) => {
                let prompt = self.echoed(index, delta.prompt);
                let tokens = &delta.tokens;
                Some(CompletionLogprobs::with_prompt(&self.tokenizer, &prompt, tokens, num_top))
            }
            _ => CompletionLogprobs::new(&self.tokenizer, &delta.tokens, self.num_echoed[index]),
        };
        CompletionChoice {
            index,
            logprobs,
            prompt_logprobs,
            text: echo.unwrap_or_default() + &delta.text,
            ending: Ending::new(delta.finish.as_ref(), &self.text.stops, self.tokenizer.eos_ids()),
        }
    }
}

impl CompletionWriter {
    /// The prompt of a choice, of which `rest` tells how likely it was.
    fn echoed(&self, index: usize, rest: Vec<PromptToken>) -> EchoedPrompt {
        let decode = DecodeOptions {
            skip_special_tokens: self.text.skip_special_tokens,
            position: TextPosition::Start,
        };
        let tokens = &self.prompts[index / self.n];
        EchoedPrompt::new(&self.tokenizer, tokens, rest, decode, self.num_echoed[index])
    }
}

impl ChunkWriter for CompletionWriter {
    type Choice = CompletionChoice;
    const OBJECT: &'static str = OBJECT;

    fn choices(
        &mut self,
        index: usize,
        delta: Delta,
        counts: &mut TokenCounts,
    ) -> Vec<CompletionChoice> {
        counts.add(&delta);
        vec![self.choice(index, delta)]
    }
}
