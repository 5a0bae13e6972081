//! What a batch is to clients.
//!
//! # Source
//! OpenAI's API reference, "The Batch object".

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::batch::Flaw;

/// A batch.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
pub(crate) struct Batch {
    pub(crate) id: String,
    pub(crate) object: BatchKind,
    pub(crate) endpoint: String,
    /// Why it failed.
    pub(crate) errors: Option<Flaws>,
    pub(crate) input_file_id: String,
    pub(crate) completion_window: String,
    pub(crate) status: Status,
    pub(crate) output_file_id: Option<String>,
    pub(crate) error_file_id: Option<String>,
    pub(crate) created_at: u64,
    pub(crate) in_progress_at: Option<u64>,
    pub(crate) expires_at: u64,
    pub(crate) finalizing_at: Option<u64>,
    pub(crate) completed_at: Option<u64>,
    pub(crate) failed_at: Option<u64>,
    pub(crate) expired_at: Option<u64>,
    pub(crate) cancelling_at: Option<u64>,
    pub(crate) cancelled_at: Option<u64>,
    pub(crate) request_counts: Counts,
    pub(crate) metadata: Option<BTreeMap<String, String>>,
}

/// There is one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum BatchKind {
    #[default]
    Batch,
}

/// How far a batch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "BatchStatus")]
pub(crate) enum Status {
    Validating,
    Failed,
    InProgress,
    Finalizing,
    Completed,
    Expired,
    Cancelling,
    Cancelled,
}

impl Status {
    /// Whether nothing more will happen.
    pub(crate) fn is_final(self) -> bool {
        matches!(self, Self::Failed | Self::Completed | Self::Expired | Self::Cancelled)
    }
}

/// Lines of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[schemars(rename = "BatchRequestCounts")]
pub(crate) struct Counts {
    pub(crate) total: u64,
    pub(crate) completed: u64,
    pub(crate) failed: u64,
}

/// What is wrong with the lines of a batch.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[schemars(rename = "BatchErrors")]
pub(crate) struct Flaws {
    object: ListKind,
    data: Vec<Flaw>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum ListKind {
    #[default]
    List,
}

impl Flaws {
    pub(crate) fn new(data: Vec<Flaw>) -> Self {
        Self { object: ListKind::List, data }
    }
}
