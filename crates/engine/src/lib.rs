//! The loop: while the device computes batch N, the host plans, stages and launches batch N+1.
//!
//! Reading order: [`request`] (what comes in), [`update`] (what goes out), [`handle`] (the callers'
//! side), [`engine`] (the loop), [`io_slot`] and [`staging`] (how a batch gets to the device),
//! [`runner`] (what the device then runs), [`grammar`], [`grammar_workers`], [`history`] and
//! [`late`] (what an output may be), [`probes`] (what is asked of prompts), [`trace`] and
//! [`memory_stats`] (when all that happened, and what became of memory), [`black_box`] (what is
//! left when it fails).
//!
//! Invariant: one thread owns scheduler, IO slots and streams; nothing is locked.
//! Invariant: no text, no JSON, no async here.
//! Invariant: every accepted request gets exactly one final message.

mod black_box;
mod block_checks;
mod block_mover;
mod cache_file;
mod config;
mod engine;
mod error;
mod file_tier;
mod grammar;
mod grammar_workers;
mod handle;
mod history;
mod io_slot;
mod kv_keep;
mod late;
mod live_requests;
mod memory_stats;
mod probes;
mod request;
mod runner;
mod snapshot;
mod staging;
mod trace;
mod update;

pub use black_box::OnFailure;
pub use cache_file::CacheFileOptions;
pub use config::EngineConfig;
pub use engine::{Engine, Scores};
pub use error::EngineError;
pub use grammar::{Allowed, Grammar, Matcher, SharedGrammar};
pub use handle::{EngineHandle, EngineStats, SubmitError, Tuning};
pub use history::{DryBreakers, DryParams};
#[cfg(feature = "damage")]
pub use inflight_scheduler::Damage;
pub use inflight_scheduler::record::{Planned, Record, RecordError, Replay, ReplayedStep};
pub use inflight_scheduler::{
    Batching, Decision, Gate, HeldBack, Lapse, LimitedBy, MemoryConfig, Mixing, Order, Policy,
    Preemption, Share, Targets, Tenant,
};
pub use kv_keep::{KvKeep, KvTerms, KvWindow, OtherWindows};
pub use memory_stats::MemoryStats;
pub use request::{
    InvalidRequest, Pooling, RequestId, RequestLimits, RequestSpec, SamplingParams, ValidRequest,
};
pub use snapshot::{EngineSnapshot, RequestSnapshot};
pub use trace::{LaunchKind, RowKind, RowRecord, Span, StepRecord};
pub use update::{FinishReason, PromptToken, SinkClosed, TokenSink, TokenUpdate, Update};
