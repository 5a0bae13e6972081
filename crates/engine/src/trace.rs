//! What happened in each step and when: for timelines, and for finding bubbles.

use std::{
    sync::mpsc::{SyncSender, TrySendError},
    time::Duration,
};

use inflight_backend::{Backend, BackendError, Clock};
use inflight_scheduler::Decision;

use crate::io_slot::{Interval, IoSlot};

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
    pub d2h: Span,
}

/// Measures host time since the engine started, and places device time beside it.
pub(crate) struct TraceClock<B: Backend> {
    clock: Clock,
    origin: Duration,
    /// Happened at `origin`, give or take half of what recording it and waiting for it took.
    origin_event: B::Event,
    /// Who wants to know.
    records: Vec<SyncSender<StepRecord>>,
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
        Ok(Self { clock, origin, origin_event, records: Vec::new() })
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
