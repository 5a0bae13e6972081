//! The scheduler, with a record of its calls that outlives a failure.

use std::ops::{Deref, DerefMut};

use inflight_scheduler::record::{Record, Recorded};

/// Takes the record of an engine that has failed. Called on the engine's thread.
pub type OnFailure = Box<dyn FnOnce(Record) + Send>;

/// What is left when an engine fails or panics.
pub(crate) struct BlackBox {
    scheduler: Recorded,
    on_failure: Option<OnFailure>,
}

impl BlackBox {
    pub(crate) fn new(scheduler: Recorded) -> Self {
        Self { scheduler, on_failure: None }
    }

    pub(crate) fn on_failure(&mut self, take: OnFailure) {
        self.on_failure = Some(take);
    }

    /// Hands out the record, once.
    pub(crate) fn fail(&mut self) {
        if let Some(take) = self.on_failure.take() {
            take(self.scheduler.record());
        }
    }
}

impl Drop for BlackBox {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.fail();
        }
    }
}

impl Deref for BlackBox {
    type Target = Recorded;

    fn deref(&self) -> &Recorded {
        &self.scheduler
    }
}

impl DerefMut for BlackBox {
    fn deref_mut(&mut self) -> &mut Recorded {
        &mut self.scheduler
    }
}
