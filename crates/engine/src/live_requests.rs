//! The requests that the engine has accepted and not yet ended.

use std::collections::HashMap;

use inflight_scheduler::SequenceId;

use crate::{
    FinishReason, Pooling, SamplingParams, grammar_workers::Progress, handle::Client, probes::Probe,
};

/// What the engine keeps beside the scheduler's sequence.
pub(crate) struct LiveRequest {
    pub(crate) client: Client,
    pub(crate) sampling: SamplingParams,
    pub(crate) min_tokens: usize,
    pub(crate) stop_token_ids: Vec<u32>,
    /// Where its output is in the request's grammar, if it has one.
    pub(crate) grammar: Option<Progress>,
    /// The state that is told instead of its token.
    pub(crate) pooling: Option<Pooling>,
    /// What is asked of its prompt's tokens.
    pub(crate) probe: Option<Probe>,
    /// Its row among the sampled rows of the latest batch that sampled it.
    pub(crate) output_row: Option<usize>,
}

impl LiveRequest {
    /// Whether it can only be said how a token is drawn when the token before it is known.
    pub(crate) fn is_late(&self) -> bool {
        self.grammar.is_some() || self.sampling.looks_back()
    }

    /// Whether a worker is still following its grammar.
    pub(crate) fn is_worked_on(&self) -> bool {
        matches!(self.grammar, Some(Progress::Working))
    }

    /// Whether its grammar allows `token` next; what it may draw must be known.
    pub(crate) fn allows(&self, token: u32) -> bool {
        match &self.grammar {
            Some(Progress::Known(next)) => next.allows(token),
            Some(Progress::Working) => false,
            None => true,
        }
    }
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

    /// The request of a sequence that may have ended.
    pub(crate) fn find(&mut self, id: SequenceId) -> Option<&mut LiveRequest> {
        self.by_id.get_mut(&id)
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
