//! What the server needs of an engine.

use std::{sync::Arc, time::Duration};

use inflight_engine::{
    EngineHandle, EngineSnapshot, EngineStats, Record, RequestId, RequestLimits, SubmitError,
    TokenSink, ValidRequest,
};
use inflight_observe::StepRecorder;
use tokio::sync::watch;

/// An engine as handlers see it. The real one is [`EngineClient`]; tests script their own.
pub trait Generate: Send + Sync {
    /// What requests are checked against.
    fn limits(&self) -> &RequestLimits;

    /// Accepts a request or refuses it at once. An accepted one gets exactly one final message.
    ///
    /// # Errors
    /// The queue is full, or the engine takes no more requests.
    fn submit(
        &self,
        request: ValidRequest,
        sink: Box<dyn TokenSink>,
    ) -> Result<RequestId, SubmitError>;

    /// Ends a request early; does nothing if it has ended.
    fn abort(&self, id: RequestId);

    /// Figures as of the last step.
    fn stats(&self) -> &EngineStats;

    /// Whether the engine still serves.
    fn is_alive(&self) -> bool;

    /// What keeps its last steps, if anything does.
    fn recorder(&self) -> Option<&StepRecorder> {
        None
    }

    /// What runs and waits in it now. Blocks until the step that it is at has been launched; `None`
    /// if it does not tell in time.
    fn inspect(&self, timeout: Duration) -> Option<EngineSnapshot> {
        let _ = timeout;
        None
    }

    /// What its scheduler was told and decided; `None` if it does not tell in time.
    fn record(&self, timeout: Duration) -> Option<Record> {
        let _ = timeout;
        None
    }

    /// For how long there has been work and the engine did not get on.
    fn stalled_for(&self) -> Duration;
}

/// The engine of this process.
pub struct EngineClient {
    handle: EngineHandle,
    alive: watch::Receiver<()>,
    recorder: Option<Arc<StepRecorder>>,
}

/// Held by the engine's thread while it runs; dropped, the engine counts as dead.
pub struct EngineAlive(#[expect(dead_code, reason = "only its drop matters")] watch::Sender<()>);

impl EngineClient {
    /// Pairs a handle with the sign of life that the engine's thread must hold.
    pub fn new(handle: EngineHandle) -> (Self, EngineAlive) {
        let (sender, alive) = watch::channel(());
        (Self { handle, alive, recorder: None }, EngineAlive(sender))
    }

    /// With what keeps the engine's last steps.
    #[must_use]
    pub fn recorded_by(self, recorder: Arc<StepRecorder>) -> Self {
        Self { recorder: Some(recorder), ..self }
    }

    /// Resolves when the engine has ended, for whatever reason.
    pub fn ended(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut alive = self.alive.clone();
        async move { while alive.changed().await.is_ok() {} }
    }

    /// The engine's own handle.
    pub fn handle(&self) -> &EngineHandle {
        &self.handle
    }
}

impl Generate for EngineClient {
    fn limits(&self) -> &RequestLimits {
        self.handle.limits()
    }

    fn submit(
        &self,
        request: ValidRequest,
        sink: Box<dyn TokenSink>,
    ) -> Result<RequestId, SubmitError> {
        self.handle.submit(request, sink)
    }

    fn abort(&self, id: RequestId) {
        self.handle.abort(id);
    }

    fn stats(&self) -> &EngineStats {
        self.handle.stats()
    }

    fn is_alive(&self) -> bool {
        self.alive.has_changed().is_ok()
    }

    fn stalled_for(&self) -> Duration {
        self.handle.stalled_for()
    }

    fn recorder(&self) -> Option<&StepRecorder> {
        self.recorder.as_deref()
    }

    fn inspect(&self, timeout: Duration) -> Option<EngineSnapshot> {
        self.handle.inspect().recv_timeout(timeout).ok()
    }

    fn record(&self, timeout: Duration) -> Option<Record> {
        self.handle.record().recv_timeout(timeout).ok()
    }
}
