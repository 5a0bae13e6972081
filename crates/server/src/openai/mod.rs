//! OpenAI's API, with vLLM's extra fields.
//!
//! Reading order: [`messages`] (what goes in), [`logprobs`], [`response`], [`chunks`] (what comes
//! out), [`completions`], [`chat`], [`models`] (the endpoints).

pub(crate) mod chat;
mod chunks;
pub(crate) mod completions;
mod logprobs;
mod messages;
pub(crate) mod models;
mod response;
