//! A request's sequences in the engine, as one stream of text deltas.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use futures_util::stream::{self, Stream, StreamExt};
use inflight_engine::{
    FinishReason, InvalidRequest, Lapse, PromptToken, RequestId, RequestSpec, SinkClosed,
    SubmitError, TokenSink, TokenUpdate, Update, ValidRequest,
};
use inflight_tokenizer::TokenizerError;
use tokio::sync::{mpsc, watch};

use crate::engine::Generate;
use crate::observe::{Ending, RequestClock};
use crate::state::{Phase, ServerState};
use crate::text_stream::{TextOptions, TextStream};

/// Most updates that wait for a client; one that is further behind is given up. Reached only by
/// outputs that are longer than this, as a channel never holds more than `max_tokens` and the end.
const MAX_WAITING_UPDATES: usize = 65_536;

/// What one sequence is to do.
#[derive(Clone, Debug)]
pub(crate) struct SequenceSpec {
    pub(crate) request: RequestSpec,
    pub(crate) text: TextOptions,
    /// Whether only the prompt is of interest: what is generated is not told.
    pub(crate) discards_output: bool,
}

/// Why a request was not started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error(transparent)]
    Invalid(#[from] InvalidRequest),
    #[error(transparent)]
    Refused(#[from] SubmitError),
    #[error(transparent)]
    Stops(#[from] TokenizerError),
    #[error(transparent)]
    Ended(#[from] GenerationError),
}

/// Why a request that was started did not end well.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum GenerationError {
    #[error("the engine failed: {0}")]
    Failed(String),
    #[error("the client did not take its tokens fast enough")]
    TooSlow,
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("the request's time was up before its answer was complete")]
    DeadlineExceeded,
    #[error("the request waited in the queue for longer than the server allows")]
    QueueTimeout { retry_after_s: u64 },
}

/// A token with its logprobs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ScoredToken {
    pub(crate) token: u32,
    pub(crate) logprob: f32,
    /// The likeliest tokens, likeliest first, as many as were asked for.
    pub(crate) top: Vec<(u32, f32)>,
    /// Where the token's text starts, in characters of the generated text.
    pub(crate) offset: usize,
}

/// Why a text ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    /// A stop string, by its place in the request's list.
    StopString(usize),
    StopToken(u32),
    Length,
}

/// What came since the delta before.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Delta {
    pub(crate) text: String,
    /// Tokens generated, whether or not they show in the text.
    pub(crate) num_tokens: usize,
    /// Tokens of the prompt that did not have to be computed; told once for every prompt.
    pub(crate) num_cached_tokens: usize,
    /// The prompt's tokens but the first, if their logprobs were asked for; in the first delta.
    pub(crate) prompt: Vec<PromptToken>,
    /// Those tokens, if logprobs were asked for.
    pub(crate) tokens: Vec<ScoredToken>,
    /// Set in a sequence's last delta, and only there.
    pub(crate) finish: Option<Finish>,
}

/// The deltas of all sequences as they come, each with the place of its sequence. Ends after the
/// last sequence ended; after an error nothing more is worth reading. Dropped, it aborts them all.
pub(crate) type Deltas =
    Pin<Box<dyn Stream<Item = (usize, Result<Delta, GenerationError>)> + Send>>;

/// Starts all sequences, or none. Where one may lapse in the queue this waits until the first has
/// something to say, so that a request that lapses there is answered by an error with a status of
/// its own, streamed or not.
///
/// # Errors
/// The first sequence that is invalid, refused, or lapses in the queue.
pub(crate) async fn start(
    state: &ServerState,
    mut specs: Vec<SequenceSpec>,
) -> Result<Deltas, StartError> {
    specs.iter_mut().for_each(|spec| put_on_account(state, &mut spec.request));
    let has_timeout = specs.iter().any(|spec| spec.request.timeout.is_some());
    let mut deltas = submit_all(state, specs)?;
    if has_timeout || state.config().limits_queue_time {
        match deltas.next().await {
            Some((_, Err(error))) => return Err(StartError::Ended(error)),
            first => deltas = stream::iter(first).chain(deltas).boxed(),
        }
    }
    Ok(deltas)
}

/// Whoever has a key of a name is served under that name, and for no longer than the server allows.
pub(crate) fn put_on_account(state: &ServerState, request: &mut RequestSpec) {
    if let Some(tenant) = state.caller().tenant() {
        request.tenant = tenant;
    }
    let limit = state.config().request_timeout;
    request.timeout = request.timeout.into_iter().chain(limit).min();
}

fn submit_all(state: &ServerState, specs: Vec<SequenceSpec>) -> Result<Deltas, StartError> {
    let mut checked = Vec::with_capacity(specs.len());
    for spec in specs {
        check_priority(state, spec.request.priority)?;
        let request = state.engine().limits().validate(spec.request)?;
        let text = TextStream::new(state.tokenizer(), &spec.text)?;
        checked.push((request, text, spec.discards_output));
    }
    let mut sequences = Vec::with_capacity(checked.len());
    // The latest prompt, and the first output for it: the others share what that one computes.
    let mut first: Option<(Vec<u32>, RequestId)> = None;
    for (index, (request, text, discards_output)) in checked.into_iter().enumerate() {
        let prompt = request.prompt().to_vec();
        // Whoever asks about its prompt computes it.
        let may_share = !request.asks_about_prompt();
        let leader =
            first.as_ref().filter(|first| may_share && first.0 == prompt).map(|first| first.1);
        // A refusal drops, and thereby aborts, those that were accepted before.
        let mut sequence = Sequence::submit(state, request.sharing_prompt_of(leader), text)?;
        sequence.counts_prompt = leader.is_none();
        sequence.discards_output = discards_output;
        if leader.is_none() {
            state.caller().spend_prompt(prompt.len());
            first = sequence.request.id.map(|id| (prompt, id));
        }
        let numbered = move |sequence: Sequence| async move {
            let (item, sequence) = sequence.next().await?;
            Some(((index, item), sequence))
        };
        sequences.push(Box::pin(stream::unfold(sequence, numbered)));
    }
    Ok(stream::select_all(sequences).boxed())
}

/// A priority that would change nothing is refused, as vLLM does.
pub(crate) fn check_priority(state: &ServerState, priority: i32) -> Result<(), InvalidRequest> {
    if priority == 0 || state.config().orders_by_priority {
        return Ok(());
    }
    let reason =
        format!("is {priority}, but this server does not go by --scheduling-policy priority");
    Err(InvalidRequest { field: "priority", reason })
}

/// Waits for all sequences and joins each one's deltas.
///
/// # Errors
/// The first sequence that failed; the others are aborted then.
pub(crate) async fn collect(
    mut deltas: Deltas,
    num_sequences: usize,
) -> Result<Vec<Delta>, GenerationError> {
    let mut wholes = vec![Delta::default(); num_sequences];
    while let Some((index, delta)) = deltas.next().await {
        let (whole, delta) = (&mut wholes[index], delta?);
        whole.text += &delta.text;
        whole.num_tokens += delta.num_tokens;
        whole.num_cached_tokens += delta.num_cached_tokens;
        whole.prompt.extend(delta.prompt);
        whole.tokens.extend(delta.tokens);
        whole.finish = delta.finish;
    }
    Ok(wholes)
}

/// One sequence: tokens come in from the engine, text goes out.
struct Sequence {
    state: ServerState,
    clock: RequestClock,
    request: Submitted,
    updates: mpsc::Receiver<Update>,
    phase: watch::Receiver<Phase>,
    text: TextStream,
    /// Whether it is still to tell what of its prompt was cached; only the first output does.
    counts_prompt: bool,
    discards_output: bool,
    /// Since the last delta.
    pending: Delta,
    ended: bool,
}

impl Sequence {
    fn submit(
        state: &ServerState,
        request: ValidRequest,
        text: TextStream,
    ) -> Result<Self, SubmitError> {
        let num_prompt_updates =
            if request.asks_about_prompt() { request.prompt().len() } else { 0 };
        let capacity = request.max_tokens().saturating_add(num_prompt_updates + 1);
        let capacity = capacity.min(MAX_WAITING_UPDATES);
        let (sender, updates) = mpsc::channel(capacity);
        let clock = RequestClock::accept(state.metrics(), request.prompt().len());
        let sink = ChannelSink { sender, started: clock.start_mark() };
        let id = state.engine().submit(request, Box::new(sink))?;
        clock.submitted_as(id);
        Ok(Self {
            request: Submitted { engine: Arc::clone(state.engine()), id: Some(id) },
            state: state.clone(),
            clock,
            updates,
            phase: state.watch_phase(),
            text,
            counts_prompt: true,
            discards_output: false,
            pending: Delta::default(),
            ended: false,
        })
    }

    /// The next delta that has text or ends the sequence; `None` after the end.
    async fn next(mut self) -> Option<(Result<Delta, GenerationError>, Self)> {
        if self.ended {
            return None;
        }
        while self.pending.text.is_empty() && self.pending.finish.is_none() {
            if let Err(error) = self.advance().await {
                self.ended = true;
                return Some((Err(error), self));
            }
        }
        if self.pending.finish.is_some() {
            self.ended = true;
            self.state.pace().record(self.clock.elapsed());
        }
        Some((Ok(std::mem::take(&mut self.pending)), self))
    }

    async fn advance(&mut self) -> Result<(), GenerationError> {
        match self.receive().await? {
            Update::Prompt(tokens) => self.pending.prompt.extend(tokens),
            Update::Token(_) if self.discards_output => {}
            Update::Token(update) => self.take_token(update),
            Update::Finished(reason) => self.take_end(reason)?,
        }
        Ok(())
    }

    async fn receive(&mut self) -> Result<Update, GenerationError> {
        let aborting = self.phase.wait_for(|phase| *phase == Phase::Aborting);
        tokio::select! {
            biased;
            // The end always comes, unless the channel was full when it was sent.
            update = self.updates.recv() => update.ok_or(GenerationError::TooSlow),
            _ = aborting => Err(GenerationError::ShuttingDown),
        }
    }

    fn take_token(&mut self, update: TokenUpdate) {
        self.pending.num_tokens += 1;
        self.clock.token(update.num_cached_tokens);
        self.state.caller().spend_generated();
        if std::mem::take(&mut self.counts_prompt) {
            self.pending.num_cached_tokens = update.num_cached_tokens;
        }
        if let Some(logprob) = update.logprob {
            let (token, top) = (update.token, update.top_logprobs);
            let offset = self.text.num_chars();
            self.pending.tokens.push(ScoredToken { token, logprob, top, offset });
        }
        self.pending.text += &self.text.push(update.token);
        if let Some(stop) = self.text.stopped_by() {
            self.pending.finish = Some(Finish::StopString(stop));
            self.clock.end(Ending::Stop);
            self.request.abort();
        }
    }

    fn take_end(&mut self, reason: FinishReason) -> Result<(), GenerationError> {
        self.request.id = None;
        self.clock.end(match &reason {
            FinishReason::Stop { .. } => Ending::Stop,
            FinishReason::Length => Ending::Length,
            FinishReason::Aborted => Ending::Abort,
            FinishReason::Failed(_) | FinishReason::Lapsed(_) => Ending::Error,
        });
        let finish = finish_of(reason, &self.state)?;
        let finish = if self.discards_output { Finish::Length } else { finish };
        self.pending.text += &self.text.finish();
        let stop_string = self.text.stopped_by().map(Finish::StopString);
        self.pending.finish = Some(stop_string.unwrap_or(finish));
        Ok(())
    }
}

/// What the engine's last message means for the client.
///
/// # Errors
/// The request did not end well.
pub(crate) fn finish_of(
    reason: FinishReason,
    state: &ServerState,
) -> Result<Finish, GenerationError> {
    match reason {
        FinishReason::Stop { token } => Ok(Finish::StopToken(token)),
        FinishReason::Length => Ok(Finish::Length),
        FinishReason::Aborted => Err(GenerationError::TooSlow),
        FinishReason::Lapsed(Lapse::Deadline) => Err(GenerationError::DeadlineExceeded),
        FinishReason::Lapsed(Lapse::QueueTime) => {
            Err(GenerationError::QueueTimeout { retry_after_s: state.retry_after_s() })
        }
        FinishReason::Failed(reason) => Err(GenerationError::Failed(reason)),
    }
}

/// A request that the engine works on; dropped, it is aborted.
pub(crate) struct Submitted {
    pub(crate) engine: Arc<dyn Generate>,
    /// `None` once the engine needs no telling any more.
    pub(crate) id: Option<RequestId>,
}

impl Submitted {
    fn abort(&mut self) {
        if let Some(id) = self.id.take() {
            self.engine.abort(id);
        }
    }
}

impl Drop for Submitted {
    fn drop(&mut self) {
        self.abort();
    }
}

/// The engine's end of a sequence's channel.
struct ChannelSink {
    sender: mpsc::Sender<Update>,
    started: Arc<OnceLock<Instant>>,
}

impl TokenSink for ChannelSink {
    fn started(&mut self) {
        // Told once; a second time would not matter.
        let _ = self.started.set(Instant::now());
    }

    fn send(&mut self, update: Update) -> Result<(), SinkClosed> {
        self.sender.try_send(update).map_err(|_| SinkClosed)
    }
}
