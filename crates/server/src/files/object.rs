//! What a file is to clients.
//!
//! # Source
//! OpenAI's API reference, "The File object".

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Purpose {
    /// Requests of a batch.
    Batch,
    /// Their answers.
    BatchOutput,
}

/// A file.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
pub(crate) struct FileObject {
    pub(crate) id: String,
    pub(crate) object: FileKind,
    pub(crate) bytes: u64,
    pub(crate) created_at: u64,
    pub(crate) filename: String,
    pub(crate) purpose: Purpose,
    pub(crate) status: FileStatus,
}

/// There is one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FileKind {
    #[default]
    File,
}

/// A file that is there needs nothing more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FileStatus {
    #[default]
    Processed,
}

/// That a file is gone.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Deleted {
    pub(crate) id: String,
    pub(crate) object: FileKind,
    pub(crate) deleted: bool,
}
