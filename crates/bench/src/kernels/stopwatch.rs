//! Times of operators, by events on a stream.

use std::{cell::Cell, time::Duration};

use anyhow::Result;
use inflight_backend::{Backend, BackendError};

/// What one measurement lasts, if a single call does not last longer.
const TARGET: Duration = Duration::from_millis(3);
/// Most calls of one measurement.
const MAX_CALLS: usize = 256;
/// Measurements, of which the median counts.
const NUM_REPEATS: usize = 5;

/// A stream with two events.
pub(super) struct Stopwatch<'a, B: Backend> {
    pub(super) backend: &'a B,
    pub(super) stream: B::Stream,
    started: B::Event,
    ended: B::Event,
}

impl<'a, B: Backend> Stopwatch<'a, B> {
    pub(super) fn new(backend: &'a B) -> Result<Self> {
        Ok(Self {
            backend,
            stream: backend.create_stream("bench")?,
            started: backend.create_event()?,
            ended: backend.create_event()?,
        })
    }

    /// Seconds of one call of `enqueue`, which is told how many calls there were before: it then
    /// takes other memory each time. Devices with graphs run the calls as one, so that the host's
    /// launches do not count.
    pub(super) fn seconds(
        &self,
        enqueue: &dyn Fn(usize) -> Result<(), BackendError>,
    ) -> Result<f64> {
        let count = Cell::new(0);
        let call = || enqueue(count.replace(count.get() + 1));
        call()?; // the first time prepares what an operator needs
        let once = self.time(&|| call())?;
        let fits = TARGET.as_secs_f64() / once.as_secs_f64().max(1e-7);
        let num_calls = (fits as usize).clamp(1, MAX_CALLS);
        let calls = || (0..num_calls).try_for_each(|_| call());
        let times: Vec<Duration> = match self.backend.capture(&self.stream, &calls) {
            Ok(graph) => self.times(&|| self.backend.replay(&graph, &self.stream))?,
            Err(BackendError::Unsupported(_)) => self.times(&calls)?,
            Err(error) => return Err(error.into()),
        };
        Ok(times[NUM_REPEATS / 2].as_secs_f64() / num_calls as f64)
    }

    /// Waits until all that was enqueued is done.
    pub(super) fn finish(&self) -> Result<()> {
        self.backend.record(&self.ended, &self.stream)?;
        Ok(self.backend.synchronize(&self.ended)?)
    }

    /// Sorted.
    fn times(&self, enqueue: &dyn Fn() -> Result<(), BackendError>) -> Result<Vec<Duration>> {
        enqueue()?;
        let mut times = (0..NUM_REPEATS).map(|_| self.time(enqueue)).collect::<Result<Vec<_>>>()?;
        times.sort();
        Ok(times)
    }

    fn time(&self, enqueue: &dyn Fn() -> Result<(), BackendError>) -> Result<Duration> {
        self.backend.record(&self.started, &self.stream)?;
        enqueue()?;
        self.finish()?;
        Ok(self.backend.elapsed(&self.started, &self.ended)?)
    }
}
