//! Why a batch cannot go on.

use std::io;

/// Why a batch cannot begin or go on. What is wrong with one line is told in its answer.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// A file cannot be read or written.
    #[error("{path}: {error}")]
    File {
        /// Which.
        path: String,
        /// Why.
        error: io::Error,
    },
    /// Another process writes the same output.
    #[error("{path} is being written by another run")]
    Busy {
        /// Which file.
        path: String,
    },
    /// The output has lines that no batch has written, or another batch.
    #[error("{path} has another batch's answers, or none at all, in line {line}: {reason}")]
    Foreign {
        /// Which file.
        path: String,
        /// From 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// The engine has ended.
    #[error("the engine has ended")]
    EngineEnded,
}
