//! What ends the engine, or keeps it from starting.

use inflight_backend::BackendError;
use inflight_scheduler::SchedulerError;

/// An error of the engine. A bad request is not one: it is refused by
/// [`RequestLimits::validate`](crate::RequestLimits::validate).
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The device failed; every request has been told.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The limits do not work together.
    #[error(transparent)]
    Scheduler(#[from] SchedulerError),
    /// The file for cold prefixes cannot be used.
    #[error("cache file {}: {reason}", path.display())]
    CacheFile {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// No threads to follow grammars on.
    #[error("a thread cannot be started: {0}")]
    Thread(#[from] std::io::Error),
}
