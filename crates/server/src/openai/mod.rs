//! OpenAI's API, with vLLM's extra fields.
//!
//! Reading order: [`messages`], [`tool_fields`], [`conversation`] (what goes in), [`logprobs`],
//! [`response`], [`chunks`], [`chat_writer`] (what comes out), [`completions`], [`chat`],
//! [`responses`], [`embeddings`], [`models`] (the endpoints).

pub(crate) mod chat;
mod chat_writer;
mod chunks;
pub(crate) mod completions;
pub(crate) mod conversation;
pub(crate) mod embeddings;
mod logprobs;
mod messages;
pub(crate) mod models;
mod prompt_logprobs;
mod response;
pub(crate) mod responses;
mod tool_fields;
