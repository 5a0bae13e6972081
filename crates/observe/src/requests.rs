//! Each request's own timeline: when it waited, which steps computed it, when it gave way.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use inflight_engine::{RequestId, RowKind, RowRecord, Span, StepRecord};

/// Requests that are remembered; then the oldest are forgotten.
const MAX_REQUESTS: usize = 1024;
/// Stretches of a request; what comes then is added to the last.
const MAX_STRETCHES: usize = 256;

/// What the steps tell of one request. Times are since the engine started.
///
/// ```text
/// accepted        first row                                          last
///    |--- queue -----|- prefill -|- prefill -|--- decode ---|  (gave way)  |- prefill -|- decode
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestTimeline {
    /// When it was submitted; `None`, if that step's record was lost.
    pub accepted: Option<Duration>,
    /// Prompt tokens that were found in the prefix cache when it first began.
    pub num_cached_tokens: usize,
    /// Stretches of steps, in order.
    pub stretches: Vec<Stretch>,
    /// How often it gave way to others.
    pub num_preemptions: usize,
}

/// Steps that did the same for a request: a chunk of its prompt, or one token after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// What they did.
    pub kind: RowKind,
    /// Whether the request had given way before, so that this begins its return.
    pub is_return: bool,
    /// Number of the first batch.
    pub first_batch: u64,
    /// Number of the last.
    pub last_batch: u64,
    /// Steps it was in; others between the first and the last were without it.
    pub num_steps: u64,
    /// Tokens that were computed.
    pub num_tokens: usize,
    /// When the host began to stage the first.
    pub staged: Duration,
    /// From the begin of the first's computing to the end of the last's.
    pub compute: Span,
    /// When the host had taken in the last one's results.
    pub collected: Duration,
}

impl RequestTimeline {
    /// From its being accepted to its first step.
    #[must_use]
    pub fn queue(&self) -> Option<Span> {
        let end = self.stretches.first()?.staged;
        Some(Span { start: self.accepted?.min(end), end })
    }

    /// When it was not in memory, having given way: from its last step to its return.
    pub fn absences(&self) -> impl Iterator<Item = Span> {
        self.stretches.windows(2).filter(|pair| pair[1].is_return).map(|pair| Span {
            start: pair[0].collected,
            end: pair[1].staged.max(pair[0].collected),
        })
    }

    fn add(&mut self, row: &RowRecord, step: &StepRecord) {
        let is_return = row.is_fresh && !self.stretches.is_empty();
        self.num_preemptions += usize::from(is_return);
        if self.stretches.is_empty() {
            self.num_cached_tokens = row.start;
        }
        let is_full = self.stretches.len() >= MAX_STRETCHES;
        if let Some(last) = self.stretches.last_mut()
            && (is_full || (!is_return && row.kind == RowKind::Decode && last.kind == row.kind))
        {
            last.last_batch = step.batch;
            last.num_steps += 1;
            last.num_tokens += row.len;
            last.compute.end = last.compute.end.max(step.compute.end);
            last.collected = step.collect.end;
            return;
        }
        self.stretches.push(Stretch {
            kind: row.kind,
            is_return,
            first_batch: step.batch,
            last_batch: step.batch,
            num_steps: 1,
            num_tokens: row.len,
            staged: step.stage.start,
            compute: step.compute,
            collected: step.collect.end,
        });
    }
}

/// The latest requests' timelines.
#[derive(Debug, Default)]
pub(crate) struct RequestTimelines {
    by_id: HashMap<RequestId, RequestTimeline>,
    /// Oldest first.
    order: VecDeque<RequestId>,
}

impl RequestTimelines {
    /// Adds what a step tells; steps come in order.
    pub(crate) fn add(&mut self, step: &StepRecord) {
        for (id, submitted) in &step.accepted {
            self.find_or_add(*id).accepted = Some(*submitted);
        }
        for row in &step.rows {
            self.find_or_add(row.id).add(row, step);
        }
    }

    pub(crate) fn get(&self, id: RequestId) -> Option<&RequestTimeline> {
        self.by_id.get(&id)
    }

    fn find_or_add(&mut self, id: RequestId) -> &mut RequestTimeline {
        if !self.by_id.contains_key(&id) {
            if self.order.len() == MAX_REQUESTS
                && let Some(oldest) = self.order.pop_front()
            {
                self.by_id.remove(&oldest);
            }
            self.order.push_back(id);
        }
        self.by_id.entry(id).or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn row(id: u64, kind: RowKind, start: usize, len: usize, is_fresh: bool) -> RowRecord {
        RowRecord { id: RequestId(id), kind, start, len, is_fresh }
    }

    /// A step that is staged at `10 * batch` ms, computes for 5 ms and is collected after 8.
    fn step(batch: u64, rows: Vec<RowRecord>) -> StepRecord {
        let at = 10 * batch;
        let span = |start, end| Span { start: ms(start), end: ms(end) };
        StepRecord {
            batch,
            rows,
            stage: span(at, at + 1),
            compute: span(at + 2, at + 7),
            collect: span(at + 7, at + 8),
            ..StepRecord::default()
        }
    }

    #[test]
    fn steps_become_chunks_decodes_and_absences() {
        let mut all = RequestTimelines::default();
        let first = step(1, vec![row(7, RowKind::Prefill, 16, 30, true)]);
        all.add(&StepRecord { accepted: vec![(RequestId(7), ms(3))], ..first });
        all.add(&step(2, vec![row(7, RowKind::Prefill, 46, 4, false)]));
        all.add(&step(3, vec![row(7, RowKind::Decode, 50, 1, false)]));
        all.add(&step(4, vec![row(8, RowKind::Decode, 9, 1, false)]));
        all.add(&step(5, vec![row(7, RowKind::Decode, 51, 1, false)]));
        all.add(&step(9, vec![row(7, RowKind::Prefill, 0, 52, true)]));
        let told = all.get(RequestId(7)).unwrap();
        assert_eq!(told.queue(), Some(Span { start: ms(3), end: ms(10) }));
        assert_eq!((told.num_cached_tokens, told.num_preemptions), (16, 1));
        let stretches: Vec<_> = told
            .stretches
            .iter()
            .map(|s| (s.kind, s.first_batch, s.last_batch, s.num_steps, s.num_tokens, s.is_return))
            .collect();
        assert_eq!(
            stretches,
            [
                (RowKind::Prefill, 1, 1, 1, 30, false),
                (RowKind::Prefill, 2, 2, 1, 4, false),
                (RowKind::Decode, 3, 5, 2, 2, false),
                (RowKind::Prefill, 9, 9, 1, 52, true),
            ]
        );
        assert_eq!(told.stretches[2].compute, Span { start: ms(32), end: ms(57) });
        let absences: Vec<_> = told.absences().collect();
        assert_eq!(absences, [Span { start: ms(58), end: ms(90) }]);
    }

    #[test]
    fn what_is_remembered_has_limits() {
        let mut all = RequestTimelines::default();
        for id in 0..MAX_REQUESTS as u64 + 5 {
            all.add(&step(id + 1, vec![row(id, RowKind::Prefill, 0, 2, true)]));
        }
        assert!(all.get(RequestId(4)).is_none() && all.get(RequestId(5)).is_some());
        let mut all = RequestTimelines::default();
        for batch in 1..=1000 {
            all.add(&step(batch, vec![row(1, RowKind::Prefill, 0, 2, batch == 1)]));
        }
        let told = all.get(RequestId(1)).unwrap();
        assert_eq!(told.stretches.len(), MAX_STRETCHES);
        assert_eq!(told.stretches.iter().map(|s| s.num_tokens).sum::<usize>(), 2000);
    }
}
