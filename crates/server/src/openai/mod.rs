//! OpenAI's API, with vLLM's extra fields.
//!
//! Reading order: [`error`] (OpenAI's error shape), [`body`] (a body's fields, none unseen),
//! [`neutral`] (fields that change nothing), [`sampling`] (fields that all generating endpoints
//! share), [`prompt`] and [`messages`] (what goes in), [`logprobs`] and [`response`] (what comes
//! out), [`completions`], [`chat`], [`models`] (the endpoints).

mod body;
pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod error;
mod logprobs;
mod messages;
pub(crate) mod models;
mod neutral;
mod prompt;
mod response;
mod sampling;

pub(crate) use error::ApiError;
pub(crate) use response::{ChunkWriter, ResponseHead, StreamUsage, Usage};
