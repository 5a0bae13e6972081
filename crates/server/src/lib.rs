//! HTTP and JSON: OpenAI's API in front of the engine.
//!
//! ```text
//! POST body -> request (fields -> RequestSpec, TextOptions) -> generation -> engine
//! client    <- sse <- openai (chunks) <- generation (text deltas) <- text_stream <- tokens
//! ```
//!
//! Reading order: [`engine`] (what the server needs of an engine), [`state`] (what all handlers
//! share), `error`, `request` (what a body says), `text_stream` (one sequence's tokens to text),
//! `generation` (a request's sequences, as a stream of text deltas), `output` (thoughts and tool
//! calls in a text), `chat` (conversations and their answers), `pooling` (states instead
//! of tokens), `sse` (a response as events), `access` (who may ask),
//! `openai` and `anthropic` (their endpoints), `openapi` (what they take and answer), `tokenize`,
//! `health`, `observe` (metrics, timelines), `web` (the page at `/`), [`serve`](serve()) (routes,
//! shutting down), `connections` and `tls` (listening), `batch` (files of requests instead of
//! connections), `files` and `batches` (the same, left here by clients).
//!
//! Invariant: the only room that knows HTTP and JSON.
//! Invariant: a field of a request is obeyed, or does not matter, or is refused by name.
//! Invariant: streamed text concatenated equals the text that is not streamed, byte for byte.
//! Invariant: whoever goes away has all sequences aborted; nothing else keeps them running.

mod access;
mod anthropic;
mod batch;
mod batches;
mod chat;
mod connections;
mod engine;
mod error;
mod files;
mod generation;
mod health;
mod observe;
mod off_thread;
mod openai;
mod openapi;
mod output;
mod pace;
mod pooling;
mod random;
mod request;
mod serve;
mod sse;
mod state;
mod text_stream;
mod tls;
mod tokenize;
mod usage;
mod web;

pub use access::{ApiKey, ApiKeys, CorsOrigins, KeyError, KeyLimits};
pub use batch::{BatchError, BatchProgress, BatchRun};
pub use engine::{EngineAlive, EngineClient, Generate};
pub use files::{FileStore, FilesError};
pub use inflight_engine::Pooling;
pub use observe::{KvCapacity, check_collector};
pub use output::ToolFormat;
pub use serve::{router, serve};
pub use state::{ServerConfig, ServerState};
pub use tls::{Tls, TlsError};
