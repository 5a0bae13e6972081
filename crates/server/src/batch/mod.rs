//! Files of requests instead of connections: OpenAI's batch format, answered line by line.
//!
//! Reading order: [`line`] (one request and its answer), [`files`] (which lines have theirs
//! already), [`run`] (all of them).
//!
//! Invariant: a line of the output is written whole or not at all, and never twice.

mod error;
mod files;
mod line;
mod run;

pub use error::BatchError;
pub use run::{BatchProgress, BatchRun};
