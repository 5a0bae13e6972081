//! The callers' side of the engine.

use std::sync::{
    Arc, LazyLock,
    atomic::{AtomicU64, AtomicUsize, Ordering},
    mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
};
use std::time::{Duration, Instant};

use inflight_backend::Clock;
use inflight_scheduler::{Policy, Scheduler, record::Record};

use crate::{
    EngineSnapshot, FinishReason, MemoryStats, PromptToken, RequestId, RequestLimits, SinkClosed,
    TokenSink, TokenUpdate, Update, ValidRequest,
};

/// What callers tell the engine.
pub(crate) enum Command {
    Submit(Box<Submission>),
    Abort(RequestId),
    /// From the next step on, plan by this policy and with this overlap.
    Tune(Box<Tuning>),
    /// Tell what runs and waits.
    Inspect(SyncSender<EngineSnapshot>),
    /// Tell what the scheduler was told and decided.
    Record(SyncSender<Record>),
    /// Serve what was accepted, then end.
    Drain,
}

/// What may change while an engine runs, for experiments that compare on one engine.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuning {
    /// Whether batch N+1 is planned and launched while batch N computes.
    pub overlap: bool,
    /// What decides beside the limits.
    pub policy: Policy,
}

/// An accepted request on its way to the engine.
pub(crate) struct Submission {
    pub(crate) id: RequestId,
    pub(crate) request: ValidRequest,
    pub(crate) client: Client,
    /// When it was handed over, on the handle's clock: its timeout counts from here.
    pub(crate) submitted: Duration,
}

/// Who waits for a request's updates. Sends exactly one final message, come what may: dropped
/// without one, it says that the engine stopped.
pub(crate) struct Client {
    /// `None` once the final message was sent.
    sink: Option<Box<dyn TokenSink>>,
    has_started: bool,
    /// Given back before the final message: who has that sees the place free.
    ticket: Option<Ticket>,
}

impl Client {
    /// Says, the first time, that the request has a row.
    pub(crate) fn start(&mut self) {
        if !std::mem::replace(&mut self.has_started, true)
            && let Some(sink) = &mut self.sink
        {
            sink.started();
        }
    }

    pub(crate) fn send(&mut self, update: TokenUpdate) -> Result<(), SinkClosed> {
        self.sink.as_mut().ok_or(SinkClosed)?.send(Update::Token(update))
    }

    pub(crate) fn send_prompt(&mut self, tokens: Vec<PromptToken>) -> Result<(), SinkClosed> {
        self.sink.as_mut().ok_or(SinkClosed)?.send(Update::Prompt(tokens))
    }

    pub(crate) fn send_state(&mut self, state: Vec<f32>) -> Result<(), SinkClosed> {
        self.sink.as_mut().ok_or(SinkClosed)?.send_state(state)
    }

    pub(crate) fn finish(mut self, reason: FinishReason) {
        self.send_final(reason);
    }

    fn send_final(&mut self, reason: FinishReason) {
        self.ticket = None;
        if let Some(mut sink) = self.sink.take() {
            // Whoever went away does not miss the message.
            let _ = sink.send(Update::Finished(reason));
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.send_final(FinishReason::Failed("the engine stopped".to_string()));
    }
}

/// One of the places that the bounded queue has; given back when dropped.
struct Ticket {
    outstanding: Arc<AtomicUsize>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.outstanding.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Why a request was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// As many requests are running and waiting as are allowed; try again later.
    #[error("the queue is full: {max_outstanding} requests are running or waiting")]
    QueueFull {
        /// The limit.
        max_outstanding: usize,
    },
    /// The engine has stopped or is draining.
    #[error("the engine is shutting down")]
    Stopped,
}

/// Hands requests to the engine. Cheap to clone; usable from any thread.
#[derive(Clone)]
pub struct EngineHandle {
    pub(crate) commands: SyncSender<Command>,
    pub(crate) limits: RequestLimits,
    pub(crate) outstanding: Arc<AtomicUsize>,
    pub(crate) max_outstanding: usize,
    pub(crate) next_id: Arc<AtomicU64>,
    pub(crate) stats: Arc<EngineStats>,
    pub(crate) clock: Clock,
}

/// Figures that the engine publishes once a step.
#[derive(Debug, Default)]
pub struct EngineStats {
    /// Sequences being computed.
    pub num_running: AtomicUsize,
    /// Sequences that wait for blocks or for a row.
    pub num_waiting: AtomicUsize,
    /// Blocks of the KV cache that nobody needs: free ones, and those kept as prefixes.
    pub num_free_blocks: AtomicUsize,
    /// Blocks that are kept only because a prompt may begin with them.
    pub num_cached_blocks: AtomicUsize,
    /// Blocks of the swap space that nobody owns.
    pub num_free_swap_blocks: AtomicUsize,
    /// Blocks of the KV cache.
    pub num_total_blocks: AtomicUsize,
    /// Steps launched.
    pub num_steps: AtomicU64,
    /// Tokens that went through the model: prompts, generated ones, and both again after a
    /// preemption.
    pub num_computed_tokens: AtomicU64,
    /// Tokens of prefixes that rows of a batch shared and did not read for themselves.
    pub num_cascaded_tokens: AtomicU64,
    /// Tokens generated.
    pub num_generated_tokens: AtomicU64,
    /// Those of them whose keys and values were moved to the host.
    pub num_swaps: AtomicU64,
    /// Sequences that gave way to others and are computed again.
    pub num_preemptions: AtomicU64,
    /// Prefixes and the host's memory.
    pub memory: MemoryStats,
    /// When the engine last got on, or got something to do: milliseconds since [`ORIGIN`].
    progress_ms: AtomicU64,
}

/// Where all engines' clocks of progress begin.
static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);

impl EngineStats {
    /// Notes that a step was launched or collected, or that an idle engine got something to do.
    pub(crate) fn note_progress(&self) {
        let now_ms = u64::try_from(ORIGIN.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.progress_ms.fetch_max(now_ms, Ordering::Relaxed);
    }

    /// Takes over the scheduler's figures; `moved` are blocks moved to the host and from it.
    pub(crate) fn publish(&self, scheduler: &Scheduler, moved: [u64; 2]) {
        let set = |cell: &AtomicUsize, value| cell.store(value, Ordering::Relaxed);
        set(&self.num_running, scheduler.num_running());
        set(&self.num_waiting, scheduler.num_waiting());
        set(&self.num_free_blocks, scheduler.num_free_blocks());
        set(&self.num_total_blocks, scheduler.config().num_blocks);
        set(&self.num_cached_blocks, scheduler.num_cached_blocks());
        set(&self.num_free_swap_blocks, scheduler.num_free_swap_blocks());
        self.num_preemptions.store(scheduler.num_preemptions(), Ordering::Relaxed);
        self.num_swaps.store(scheduler.num_swaps(), Ordering::Relaxed);
        self.memory.publish(scheduler, moved, self.num_steps.load(Ordering::Relaxed));
    }

    fn since_progress(&self) -> Duration {
        let progress = Duration::from_millis(self.progress_ms.load(Ordering::Relaxed));
        ORIGIN.elapsed().saturating_sub(progress)
    }
}

impl EngineHandle {
    /// What [`RequestLimits::validate`] checks against.
    pub fn limits(&self) -> &RequestLimits {
        &self.limits
    }

    /// Figures as of the last step.
    pub fn stats(&self) -> &EngineStats {
        &self.stats
    }

    /// Requests running or waiting.
    pub fn num_outstanding(&self) -> usize {
        self.outstanding.load(Ordering::Acquire)
    }

    /// For how long there has been work and no step was launched or collected.
    pub fn stalled_for(&self) -> Duration {
        let has_work = self.num_outstanding() > 0;
        if has_work { self.stats.since_progress() } else { Duration::ZERO }
    }

    /// Accepts a request or refuses it at once.
    ///
    /// # Errors
    /// [`SubmitError`]; `sink` gets nothing then. Otherwise it gets exactly one final message.
    pub fn submit(
        &self,
        request: ValidRequest,
        sink: Box<dyn TokenSink>,
    ) -> Result<RequestId, SubmitError> {
        let full = SubmitError::QueueFull { max_outstanding: self.max_outstanding };
        let client = Client {
            sink: Some(sink),
            has_started: false,
            ticket: Some(self.take_ticket().ok_or(full)?),
        };
        let id = RequestId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let submission = Submission { id, request, client, submitted: self.clock.now() };
        let (error, command) = match self.commands.try_send(Command::Submit(Box::new(submission))) {
            Ok(()) => return Ok(id),
            Err(TrySendError::Full(command)) => (full, command),
            Err(TrySendError::Disconnected(command)) => (SubmitError::Stopped, command),
        };
        if let Command::Submit(mut refused) = command {
            refused.client.sink = None;
        }
        Err(error)
    }

    /// Asks the engine to end a request; its final message is `Aborted` unless it ended before.
    pub fn abort(&self, id: RequestId) {
        // An engine that has stopped has ended every request already.
        let _ = self.commands.send(Command::Abort(id));
    }

    /// Changes how the engine goes on, from its next step.
    ///
    /// # Panics
    /// The engine's thread does, when the policy does not work with its limits:
    /// [`Engine::set_policy`](crate::Engine::set_policy) says so before it runs.
    pub fn tune(&self, tuning: Tuning) {
        // An engine that has stopped takes no steps.
        let _ = self.commands.send(Command::Tune(Box::new(tuning)));
    }

    /// Asks the engine what runs and waits; the answer comes between two steps. Costs the engine a
    /// walk over all requests, so it is for people, not for every step.
    pub fn inspect(&self) -> Receiver<EngineSnapshot> {
        let (sender, snapshot) = sync_channel(1);
        // An engine that has stopped drops the sender, and the receiver learns of it.
        let _ = self.commands.try_send(Command::Inspect(sender));
        snapshot
    }

    /// Asks the engine what its scheduler was told and decided, so that it can be done again. Costs
    /// the engine a pass over some megabytes.
    pub fn record(&self) -> Receiver<Record> {
        let (sender, record) = sync_channel(1);
        let _ = self.commands.try_send(Command::Record(sender));
        record
    }

    /// Asks the engine to serve what it has accepted and then end. Later requests are refused.
    pub fn drain(&self) {
        // An engine that has stopped has nothing to drain.
        let _ = self.commands.send(Command::Drain);
    }

    fn take_ticket(&self) -> Option<Ticket> {
        if self.num_outstanding() == 0 {
            self.stats.note_progress();
        }
        let taken = self.outstanding.fetch_add(1, Ordering::AcqRel);
        let ticket = Ticket { outstanding: Arc::clone(&self.outstanding) };
        (taken < self.max_outstanding).then_some(ticket)
    }
}
