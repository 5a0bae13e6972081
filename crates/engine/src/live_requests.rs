//! The requests that the engine has accepted and not yet ended.

use std::collections::HashMap;

use inflight_scheduler::SequenceId;

use crate::{FinishReason, SamplingParams, handle::Client};

/// What the engine keeps beside the scheduler's sequence.
pub(crate) struct LiveRequest {
    pub(crate) client: Client,
    pub(crate) sampling: SamplingParams,
    pub(crate) min_tokens: usize,
    pub(crate) stop_token_ids: Vec<u32>,
    /// Its row among the sampled rows of the latest batch that sampled it.
    pub(crate) output_row: Option<usize>,
}

/// Requests by their sequence.
#[derive(Default)]
pub(crate) struct LiveRequests {
    by_id: HashMap<SequenceId, LiveRequest>,
}

impl LiveRequests {
    pub(crate) fn insert(&mut self, id: SequenceId, request: LiveRequest) {
        self.by_id.insert(id, request);
    }

    /// The request of a sequence that the scheduler knows.
    pub(crate) fn get_mut(&mut self, id: SequenceId) -> &mut LiveRequest {
        self.by_id.get_mut(&id).expect("the scheduler knows live requests only")
    }

    /// Ends a request with its one final message. Nothing happens if it has ended before.
    pub(crate) fn finish(&mut self, id: SequenceId, reason: FinishReason) {
        if let Some(request) = self.by_id.remove(&id) {
            request.client.finish(reason);
        }
    }

    /// Ends all requests.
    pub(crate) fn finish_all(&mut self, reason: &FinishReason) {
        for (_, request) in self.by_id.drain() {
            request.client.finish(reason.clone());
        }
    }
}
