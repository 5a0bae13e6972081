//! The latest requests, with the times of their sequences.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use inflight_engine::RequestId;

use super::http_request::{HttpRequest, current};
use super::metrics::Ending;
use super::otlp::SpanSender;

/// Requests that are remembered; then the oldest are forgotten.
const MAX_REQUESTS: usize = 1024;

/// The latest requests.
#[derive(Debug, Default)]
pub(crate) struct RequestLog {
    /// Oldest first.
    kept: Mutex<VecDeque<Arc<RequestEntry>>>,
    /// Who gets them when they have ended.
    pub(super) spans: OnceLock<SpanSender>,
}

/// One request.
#[derive(Debug)]
pub(crate) struct RequestEntry {
    pub(super) http: Arc<HttpRequest>,
    sequences: Mutex<Vec<SequenceEntry>>,
    /// Sequences that have not ended.
    num_open: AtomicUsize,
}

/// One of a request's sequences.
#[derive(Clone, Debug)]
pub(crate) struct SequenceEntry {
    pub(super) engine_id: Option<RequestId>,
    pub(super) prompt_len: usize,
    pub(super) num_cached_tokens: usize,
    pub(super) num_tokens: usize,
    pub(super) accepted: Instant,
    /// When it got its first row.
    pub(super) started: Option<Instant>,
    pub(super) first_token: Option<Instant>,
    pub(super) last_token: Option<Instant>,
    /// When and how it ended; `None`: it has not.
    pub(super) ended: Option<(Instant, Ending)>,
}

/// Where a sequence notes what becomes of it.
#[derive(Debug)]
pub(super) struct SequenceNote {
    entry: Arc<RequestEntry>,
    index: usize,
}

impl RequestLog {
    /// A sequence of the request whose handler calls is accepted; `None`, if no handler does.
    pub(super) fn begin(&self, sequence: SequenceEntry) -> Option<SequenceNote> {
        let http = current()?;
        let entry = http.entry.get_or_init(|| {
            let (sequences, num_open) = (Mutex::default(), AtomicUsize::new(0));
            let entry = Arc::new(RequestEntry { http: Arc::clone(&http), sequences, num_open });
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            if kept.len() == MAX_REQUESTS {
                kept.pop_front();
            }
            kept.push_back(Arc::clone(&entry));
            entry
        });
        entry.num_open.fetch_add(1, Ordering::AcqRel);
        let mut sequences = entry.lock();
        sequences.push(sequence);
        let index = sequences.len() - 1;
        drop(sequences);
        Some(SequenceNote { entry: Arc::clone(entry), index })
    }

    /// A sequence has ended as `sequence` says.
    pub(super) fn end(&self, note: &SequenceNote, sequence: SequenceEntry) {
        let engine_id = note.entry.lock()[note.index].engine_id;
        note.entry.lock()[note.index] = SequenceEntry { engine_id, ..sequence };
        if note.entry.num_open.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(spans) = self.spans.get()
        {
            spans.send(&note.entry);
        }
    }

    /// Requests whose traces could not be sent; `None`, if nobody wants traces.
    pub(super) fn num_dropped_traces(&self) -> Option<u64> {
        self.spans.get().map(SpanSender::num_dropped)
    }

    /// The request of that name: its own, one that its answer bears, or the engine's number.
    pub(super) fn find(&self, name: &str) -> Option<Arc<RequestEntry>> {
        let number = name.parse().ok().map(RequestId);
        let is_named = |entry: &&Arc<RequestEntry>| {
            entry.http.id == name
                || entry.http.names().iter().any(|other| other == name)
                || (number.is_some() && entry.lock().iter().any(|s| s.engine_id == number))
        };
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter().rev().find(is_named).cloned()
    }

    /// All of them, the latest first.
    pub(super) fn latest(&self) -> Vec<Arc<RequestEntry>> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter().rev().cloned().collect()
    }
}

impl RequestEntry {
    /// Its sequences as they are now.
    pub(super) fn sequences(&self) -> Vec<SequenceEntry> {
        self.lock().clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<SequenceEntry>> {
        self.sequences.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SequenceNote {
    /// The engine calls the sequence `id`.
    pub(super) fn submitted_as(&self, id: RequestId) {
        self.entry.lock()[self.index].engine_id = Some(id);
    }
}
