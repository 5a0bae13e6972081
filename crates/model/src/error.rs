//! What can be wrong with a model.

use std::path::Path;

use inflight_backend::BackendError;

/// An error found while reading a model's files or loading its weights.
///
/// Each names the file, and the tensor or field, so that the user can find it.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file or folder cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// Which one.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file or folder is not what it should be.
    #[error("{path}: {reason}")]
    BadFile {
        /// Which one.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A tensor is damaged, of an unknown type, or of another shape than the configuration says.
    #[error("{path}: tensor {tensor}: {reason}")]
    BadTensor {
        /// File that holds it.
        path: String,
        /// Its name there.
        tensor: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A tensor that the architecture needs is in none of the files.
    #[error("{path}: tensor {tensor} is missing")]
    MissingTensor {
        /// File or folder that should hold it.
        path: String,
        /// Its name there.
        tensor: String,
    },
    /// A field of the configuration is missing, of the wrong type, out of range or not supported.
    #[error("{path}: {field}: {reason}")]
    BadConfig {
        /// File that holds the configuration.
        path: String,
        /// The field's name there.
        field: String,
        /// What is wrong with it.
        reason: String,
    },
    /// No architecture of this name is known.
    #[error("{path}: architecture {name} is not supported; known are {known}")]
    UnknownArchitecture {
        /// File that holds the configuration.
        path: String,
        /// What it asks for.
        name: String,
        /// What it could ask for.
        known: String,
    },
    /// A device refused the weights or had no room for them.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

impl ModelError {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.display().to_string(), source }
    }

    pub(crate) fn bad_file(path: &str, reason: impl Into<String>) -> Self {
        Self::BadFile { path: path.to_owned(), reason: reason.into() }
    }

    pub(crate) fn bad_tensor(path: &str, tensor: &str, reason: impl Into<String>) -> Self {
        Self::BadTensor { path: path.to_owned(), tensor: tensor.to_owned(), reason: reason.into() }
    }

    pub(crate) fn missing_tensor(path: &str, tensor: &str) -> Self {
        Self::MissingTensor { path: path.to_owned(), tensor: tensor.to_owned() }
    }

    pub(crate) fn bad_config(path: &str, field: &str, reason: impl Into<String>) -> Self {
        Self::BadConfig { path: path.to_owned(), field: field.to_owned(), reason: reason.into() }
    }
}
