//! What happened in each step and when: for timelines, and for finding bubbles.

use std::{
    sync::mpsc::{SyncSender, TrySendError},
    time::Duration,
};

use inflight_backend::{Backend, BackendError, Clock};
use inflight_scheduler::{Batch, Decision, Row};

use crate::{
    RequestId,
    io_slot::{Interval, IoSlot},
};

/// A stretch of time since the engine started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// Begin.
    pub start: Duration,
    /// End.
    pub end: Duration,
}

/// One step: what it ran, what the host did for it and when the device did its part.
///
/// ```text
/// host     admit plan stage launch              blocked collect
/// h2d                       [    ]
/// compute                         [            ]
/// d2h                                           [ ]
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(missing_docs)]
pub struct StepRecord {
    /// Counts the engine's batches, from 1.
    pub batch: u64,
    pub num_rows: usize,
    pub num_tokens: usize,
    pub num_sampled: usize,
    /// What the plan decided, and why.
    pub decision: Decision,
    /// Who is in the batch, in row order.
    pub rows: Vec<RowRecord>,
    /// Requests that came since the step before, and when they were submitted.
    pub accepted: Vec<(RequestId, Duration)>,
    /// How the forward pass was launched.
    pub launched_as: LaunchKind,
    /// Whether launching it allocated memory of the device.
    pub allocated: bool,
    pub admit: Span,
    pub plan: Span,
    pub stage: Span,
    pub launch: Span,
    /// The host works out and ships what rows under a grammar may draw, while the device computes
    /// their forward pass; empty if there are none.
    pub late: Span,
    /// The host waits for `d2h_done`: the only place where it waits for the device.
    pub blocked: Span,
    pub collect: Span,
    pub h2d: Span,
    pub compute: Span,
    /// Part of computing: the forward pass is done, but what rows under a grammar may draw is not
    /// there yet, so the device has nothing to do.
    pub stalled: Span,
    pub d2h: Span,
}

/// How a forward pass was launched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LaunchKind {
    /// Operator by operator, on a device that has no graphs.
    #[default]
    NoGraphs,
    /// As a graph, in one call.
    Graph,
    /// As a graph that had to be captured first.
    CapturedGraph,
    /// Operator by operator, on a device that has graphs for other steps: this one holds prefill.
    WithoutGraph,
}

/// One sequence's share of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowRecord {
    /// Whose.
    pub id: RequestId,
    /// What of it.
    pub kind: RowKind,
    /// Tokens before the row's first one.
    pub start: usize,
    /// Tokens computed.
    pub len: usize,
    /// Whether the sequence has just been admitted, for the first time or again.
    pub is_fresh: bool,
}

/// What a row computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowKind {
    /// A part of a prompt, or of what was computed before the sequence gave way.
    Prefill,
    /// The token that was generated last.
    Decode,
}

impl From<&Row> for RowRecord {
    fn from(row: &Row) -> Self {
        let is_decode = row.len == 1 && row.start >= row.prompt_len;
        Self {
            id: RequestId(row.id.0),
            kind: if is_decode { RowKind::Decode } else { RowKind::Prefill },
            start: row.start,
            len: row.len,
            is_fresh: row.fresh,
        }
    }
}

/// Measures host time since the engine started, and places device time beside it.
pub(crate) struct TraceClock<B: Backend> {
    clock: Clock,
    origin: Duration,
    /// Happened at `origin`, give or take half of what recording it and waiting for it took.
    origin_event: B::Event,
    /// Who wants to know.
    records: Vec<SyncSender<StepRecord>>,
    /// Requests that came since the latest record began.
    accepted: Vec<(RequestId, Duration)>,
}

impl<B: Backend> TraceClock<B> {
    /// Starts the clock: `stream` must be idle.
    pub(crate) fn start(backend: &B, stream: &B::Stream) -> Result<Self, BackendError> {
        let origin_event = backend.create_event()?;
        let clock = backend.clock();
        let before = clock.now();
        backend.record(&origin_event, stream)?;
        backend.synchronize(&origin_event)?;
        // The event happened between the two readings of the host's clock: half-way is off least.
        let origin = before + (clock.now() - before) / 2;
        let (records, accepted) = (Vec::new(), Vec::new());
        Ok(Self { clock, origin, origin_event, records, accepted })
    }

    /// Sends every step's record to `records` too; a channel that is full loses records.
    pub(crate) fn send_to(&mut self, records: SyncSender<StepRecord>) {
        self.records.push(records);
    }

    /// Time since the engine started.
    pub(crate) fn now(&self) -> Duration {
        self.at(self.clock.now())
    }

    /// A moment of the clock as time since the engine started.
    pub(crate) fn at(&self, moment: Duration) -> Duration {
        moment.saturating_sub(self.origin)
    }

    /// The clock itself, for those who hand over requests.
    pub(crate) fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Notes that a request came.
    pub(crate) fn note_accepted(&mut self, id: RequestId, submitted: Duration) {
        if !self.records.is_empty() {
            self.accepted.push((id, submitted));
        }
    }

    /// Writes down who is in the batch of `record`, and who came since.
    pub(crate) fn note_rows(&mut self, record: &mut StepRecord, batch: &Batch) {
        if !self.records.is_empty() {
            record.rows = batch.rows.iter().map(RowRecord::from).collect();
            record.accepted = std::mem::take(&mut self.accepted);
        }
    }

    /// Completes `record` with the device's times and sends it. The slot's batch must have been
    /// collected.
    pub(crate) fn send(
        &mut self,
        backend: &B,
        io: &IoSlot<B>,
        mut record: StepRecord,
    ) -> Result<(), BackendError> {
        if self.records.is_empty() {
            return Ok(());
        }
        record.h2d = self.device_span(backend, &io.h2d)?;
        record.compute = self.device_span(backend, &io.compute)?;
        record.d2h = self.device_span(backend, &io.d2h)?;
        if record.late != Span::default() {
            let start = backend.elapsed(&self.origin_event, &io.forward_done)?;
            let end = backend.elapsed(&self.origin_event, &io.late_ready)?;
            record.stalled = Span { start, end: end.max(start) };
        }
        let is_gone = |sent| matches!(sent, Err(TrySendError::Disconnected(_)));
        self.records.retain(|records| !is_gone(records.try_send(record.clone())));
        Ok(())
    }

    fn device_span(&self, backend: &B, interval: &Interval<B>) -> Result<Span, BackendError> {
        Ok(Span {
            start: backend.elapsed(&self.origin_event, &interval.started)?,
            end: backend.elapsed(&self.origin_event, &interval.done)?,
        })
    }
}
