//! What can go wrong on a device.

use crate::Dtype;

/// An error of a backend.
///
/// [`BackendError::DeviceLost`] ends the engine; every other variant is reported while loading.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// An allocation failed.
    #[error("{device}: cannot allocate {bytes} bytes for {what}")]
    OutOfMemory {
        /// Which device.
        device: &'static str,
        /// What the memory was for.
        what: String,
        /// How much was asked for.
        bytes: usize,
    },
    /// A weight has a shape or type that the operator cannot take.
    #[error("tensor {tensor}: {reason} (shape {shape:?}, {dtype})")]
    BadTensor {
        /// Name in the weight file.
        tensor: String,
        /// Shape as read.
        shape: Vec<usize>,
        /// Element type as read.
        dtype: Dtype,
        /// What is wrong with it.
        reason: String,
    },
    /// A file could not be mapped.
    #[error("{path}: {source}")]
    File {
        /// Which file.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The device stopped working; nothing enqueued later will run.
    #[error("device lost: {0}")]
    DeviceLost(String),
    /// The machine lacks something that was asked for.
    #[error("{0}")]
    Unsupported(String),
}
