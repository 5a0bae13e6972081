//! Files of requests instead of connections: OpenAI's batch format, answered line by line.
//!
//! Reading order: [`line`] (one request and its answer), [`files`] (which lines have theirs
//! already), [`check`] (what is wrong with lines before they are asked), [`run`] (all of them).
//!
//! Invariant: a line of the output is written whole or not at all, and never twice.

mod check;
mod error;
mod files;
mod line;
mod run;

pub(crate) use check::{Flaw, check_lines};
pub use error::BatchError;
pub(crate) use line::URLS;
pub use run::{BatchProgress, BatchRun};
