//! The loop: while the device computes batch N, the host plans, stages and launches batch N+1.
//!
//! Reading order: [`request`] (what comes in), [`update`] (what goes out), [`handle`] (the callers'
//! side).
//!
//! Invariant: one thread owns scheduler, IO slots and streams; nothing is locked.
//! Invariant: no text, no JSON, no async here.
//! Invariant: every accepted request gets exactly one final message.

mod handle;
mod request;
mod update;

pub use handle::{EngineHandle, EngineStats, SubmitError};
pub use request::{InvalidRequest, RequestId, RequestLimits, RequestSpec, SamplingParams, ValidRequest};
pub use update::{FinishReason, SinkClosed, TokenSink, TokenUpdate, Update};
