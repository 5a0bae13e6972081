//! What may be asked of an engine before it runs, and by whoever drives it step by step.

use std::sync::mpsc::SyncSender;

use inflight_backend::Backend;
use inflight_scheduler::{Policy, Scheduler, SchedulerError, record::Record};

use super::Engine;
use crate::{EngineError, FinishReason, OnFailure, StepRecord};

impl<B: Backend> Engine<B> {
    /// Has the scheduler decide by `policy`, from the next plan on.
    ///
    /// # Errors
    /// When the policy does not work with the engine's limits; the message names the field.
    pub fn set_policy(&mut self, policy: Policy) -> Result<(), SchedulerError> {
        self.scheduler.set_policy(policy)
    }

    /// Sends a record of every step to `records` too. Never blocks: a full channel loses records.
    pub fn trace_to(&mut self, records: SyncSender<StepRecord>) {
        self.clock.send_to(records);
    }

    /// Has `take` get the record of what the scheduler was told and decided, if the engine fails.
    pub fn on_failure(&mut self, take: OnFailure) {
        self.scheduler.on_failure(take);
    }

    /// Ends all requests, as the engine cannot go on.
    pub fn fail(&mut self, error: &EngineError) {
        tracing::error!(%error, "the engine stops");
        self.scheduler.fail();
        self.requests.finish_all(&FinishReason::Failed(error.to_string()));
    }

    /// Who waits and runs, in which blocks: to be checked between steps.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// Plants a bug; false if there is nothing now that could go wrong like this.
    #[cfg(feature = "damage")]
    pub fn damage(&mut self, damage: inflight_scheduler::Damage) -> bool {
        self.scheduler.damage(damage)
    }

    /// What the scheduler was told and decided so far.
    pub fn record(&mut self) -> Record {
        self.scheduler.record()
    }
}
