//! `POST /v1/embeddings`.
//!
//! An embedding is the model's state after the last token, or the mean of those after all tokens,
//! normed as before the output matrix and then to length 1: what vLLM tells of a causal model. With
//! `dimensions` its first ones are told, to length 1 again, as models trained for that want it.
//!
//! # Source
//! Kusupati et al., "Matryoshka Representation Learning", 2022.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::ApiError;
use crate::off_thread::off_thread;
use crate::openapi::Fields;
use crate::pooling;
use crate::request::prompt::{Prompt, Prompts};
use crate::request::{Body, Service, admit, neutral};
use crate::state::ServerState;

#[derive(Debug, Default, Deserialize, JsonSchema)]
struct EmbeddingFields {
    model: Option<String>,
    input: Option<Prompts>,
    encoding_format: Option<Encoding>,
    dimensions: Option<usize>,
    add_special_tokens: Option<bool>,
    priority: Option<i32>,
    timeout_ms: Option<u64>,
    user: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Encoding {
    #[default]
    Float,
    /// Little-endian f32, in base64.
    Base64,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct EmbeddingList {
    object: &'static str,
    data: Vec<Embedding>,
    model: String,
    usage: Usage,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Embedding {
    object: &'static str,
    index: usize,
    embedding: Vector,
}

#[derive(Debug, Serialize, JsonSchema)]
#[serde(untagged)]
enum Vector {
    Floats(Vec<f32>),
    Base64(String),
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "EmbeddingUsage")]
struct Usage {
    prompt_tokens: usize,
    total_tokens: usize,
}

/// How embeddings call a field that the engine knows by another name.
fn rename(field: &'static str) -> &'static str {
    if field == "prompt" || field == "max_tokens" { "input" } else { field }
}

/// What [`create`] takes.
pub(crate) fn describe(fields: Fields<'_>) -> Fields<'_> {
    fields.group::<EmbeddingFields>().neutral(neutral::EMBEDDINGS).require("input")
}

pub(crate) async fn create(
    state: ServerState,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<EmbeddingList>, ApiError> {
    let bytes = admit(&state, &headers, body)?;
    let mut body = Body::parse(&bytes)?;
    let fields: EmbeddingFields = body.take()?;
    body.take_neutral(neutral::EMBEDDINGS)?;
    body.refuse_rest()?;
    let model = state.model_name(fields.model)?;
    let service = Service::resolve(fields.priority, fields.timeout_ms, fields.user.as_deref())?;
    let input = fields.input.ok_or(ApiError::Missing { param: "input" })?;
    let prompts = encode(&state, input, fields.add_special_tokens.unwrap_or(true)).await?;
    let num_tokens = prompts.iter().map(Vec::len).sum();
    if fields.dimensions == Some(0) {
        return Err(ApiError::invalid("dimensions", "is 0; it must be at least 1"));
    }
    let states = pooling::states(&state, prompts, &service, rename).await?;
    let states = states.into_iter().map(|state| shortened(state, fields.dimensions));
    let states: Vec<_> = states.collect::<Result<_, _>>()?;
    let encoding = fields.encoding_format.unwrap_or_default();
    let embedding = |(index, state): (usize, Vec<f32>)| Embedding {
        object: "embedding",
        index,
        embedding: encoded(unit(state), encoding),
    };
    Ok(Json(EmbeddingList {
        object: "list",
        data: states.into_iter().enumerate().map(embedding).collect(),
        model,
        usage: Usage { prompt_tokens: num_tokens, total_tokens: num_tokens },
    }))
}

async fn encode(
    state: &ServerState,
    Prompts(prompts): Prompts,
    add_special_tokens: bool,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let tokenizer = Arc::clone(state.tokenizer());
    let num_bytes = prompts.iter().map(Prompt::num_bytes).sum();
    let encode = move || -> Result<Vec<_>, _> {
        prompts.iter().map(|prompt| prompt.encode(&tokenizer, add_special_tokens)).collect()
    };
    let encoded = off_thread(num_bytes, encode).await?;
    encoded.map_err(|error| ApiError::from_tokenizer(&error, "input"))
}

/// The first dimensions of a state, or all of them.
fn shortened(mut state: Vec<f32>, dimensions: Option<usize>) -> Result<Vec<f32>, ApiError> {
    let (asked, has) = (dimensions.unwrap_or(state.len()), state.len());
    if asked > has {
        let reason = format!("is {asked}; the model's embeddings have {has}");
        return Err(ApiError::invalid("dimensions", reason));
    }
    state.truncate(asked);
    Ok(state)
}

/// The vector of length 1 in the same direction.
fn unit(mut vector: Vec<f32>) -> Vec<f32> {
    let length = vector.iter().map(|x| x * x).sum::<f32>().sqrt().max(f32::MIN_POSITIVE);
    vector.iter_mut().for_each(|x| *x /= length);
    vector
}

fn encoded(vector: Vec<f32>, encoding: Encoding) -> Vector {
    match encoding {
        Encoding::Float => Vector::Floats(vector),
        Encoding::Base64 => {
            let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
            Vector::Base64(base64(&bytes))
        }
    }
}

/// # Source
/// RFC 4648, section 4.
fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let byte = |at: usize| u32::from(chunk.get(at).copied().unwrap_or(0));
        let word = byte(0) << 16 | byte(1) << 8 | byte(2);
        for digit in 0..4 {
            let index = word >> (18 - 6 * digit) & 63;
            let is_padding = digit > chunk.len();
            text.push(if is_padding { '=' } else { char::from(ALPHABET[index as usize]) });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_of_the_rfc() {
        for (bytes, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }

    #[test]
    fn vectors_of_length_one() {
        assert_eq!(unit(vec![3.0, 0.0, -4.0]), [0.6, 0.0, -0.8]);
        assert_eq!(unit(vec![0.0]), [0.0]);
    }
}
