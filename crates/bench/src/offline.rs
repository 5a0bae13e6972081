//! Many requests at once through an engine: what comes out, and when every step happened.

use std::{
    sync::{
        atomic::{AtomicU64, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};
use inflight_backend::{Backend, philox};
use inflight_engine::{
    Engine, EngineError, EngineHandle, FinishReason, RequestSpec, SamplingParams, SharedGrammar,
    SinkClosed, StepRecord, TokenSink, Update,
};
use inflight_observe::StepRecorder;

use crate::gate::Gate;

/// Records that wait to be taken; they are taken every [`POLL`].
const MAX_WAITING_RECORDS: usize = 1 << 16;
/// How often progress is shown and records are taken.
const POLL: Duration = Duration::from_millis(50);
/// Tokens of each warm-up request: a prefill and a decode step.
const WARM_UP_TOKENS: usize = 2;

/// What the requests are. All are known before the first step, and none ends but by length.
#[derive(Clone, Debug, PartialEq)]
pub struct OfflineWorkload {
    /// How long each request is; prompts are drawn at random and differ from each other.
    pub lengths: Vec<RequestLengths>,
    /// But for so many tokens that all begin with.
    pub shared_prefix: usize,
    /// Requests take turns with these; each adds its number to the seed. Not empty.
    pub sampling: Vec<SamplingParams>,
    /// What each output must be; it must have no end within an output. `None`: anything.
    pub grammar: Option<SharedGrammar>,
    /// Whether the same prompts go through the engine first, since a device loads code when it
    /// first runs it.
    pub warm_up: bool,
}

/// Tokens of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLengths {
    /// Tokens of its prompt.
    pub input: usize,
    /// Tokens that it generates.
    pub output: usize,
}

impl OfflineWorkload {
    /// Tokens of all prompts.
    pub fn num_input_tokens(&self) -> usize {
        self.lengths.iter().map(|lengths| lengths.input).sum()
    }

    /// Tokens that all requests generate.
    pub fn num_output_tokens(&self) -> usize {
        self.lengths.iter().map(|lengths| lengths.output).sum()
    }
}

/// What a run gave.
#[derive(Clone, Debug)]
pub struct OfflineRun {
    /// From the moment the engine sees all requests to the last one's end.
    pub wall: Duration,
    /// Each request's tokens.
    pub tokens: Vec<Vec<u32>>,
    /// Every step of the run, in order; those of the warm-up are left out.
    pub steps: Vec<StepRecord>,
    /// Steps whose records were lost, as the engine never waits for whoever takes them.
    pub num_lost_steps: u64,
}

/// Who is told of every step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// The run, which keeps them.
    Run,
    /// The recorder that servers have.
    Recorder,
    /// Nobody: the engine then writes nothing down.
    Nobody,
}

/// Runs `workload` on an engine that has not run yet, which must take one request more than the
/// workload has. `progress` is told how many tokens were generated.
///
/// # Errors
/// A request that the engine refuses, or the engine's own failure.
pub fn run_offline<B: Backend>(
    engine: Engine<B>,
    handle: EngineHandle,
    workload: &OfflineWorkload,
    progress: &mut dyn FnMut(u64),
) -> Result<OfflineRun> {
    run_watched(engine, handle, workload, Watch::Run, progress)
}

/// The same; unless the run watches, all its steps count as lost.
///
/// # Errors
/// As [`run_offline`]'s, and no thread for a recorder.
pub fn run_watched<B: Backend>(
    mut engine: Engine<B>,
    handle: EngineHandle,
    workload: &OfflineWorkload,
    watch: Watch,
    progress: &mut dyn FnMut(u64),
) -> Result<OfflineRun> {
    let (sender, records) = mpsc::sync_channel(MAX_WAITING_RECORDS);
    if workload.warm_up {
        engine.prepare()?;
    }
    let _recorder = match watch {
        Watch::Run => {
            engine.trace_to(sender);
            None
        }
        Watch::Recorder => {
            let (recorder, sender) = StepRecorder::start()?;
            engine.trace_to(sender);
            Some(recorder)
        }
        Watch::Nobody => None,
    };
    if workload.warm_up {
        let running = Running { thread: spawn(engine)?, handle, records };
        submit(&running.handle, workload, Some(WARM_UP_TOKENS))?.wait(|| ())?;
        let gate = Gate::close(&running.handle)?;
        let counts = Counts::of(&running.handle);
        let submitted = submit(&running.handle, workload, None)?;
        let started = Instant::now();
        gate.open()?;
        return running.finish(submitted, started, counts, progress);
    }
    let counts = Counts::of(&handle);
    let submitted = submit(&handle, workload, None)?;
    let started = Instant::now();
    let running = Running { thread: spawn(engine)?, handle, records };
    running.finish(submitted, started, counts, progress)
}

fn spawn<B: Backend>(engine: Engine<B>) -> Result<JoinHandle<Result<(), EngineError>>> {
    let thread = thread::Builder::new().name("engine".to_owned());
    thread.spawn(move || engine.run()).context("no thread for the engine")
}

struct Running {
    handle: EngineHandle,
    thread: JoinHandle<Result<(), EngineError>>,
    records: Receiver<StepRecord>,
}

/// What the engine had done before the run.
#[derive(Clone, Copy, Debug)]
struct Counts {
    steps: u64,
    tokens: u64,
}

impl Counts {
    fn of(handle: &EngineHandle) -> Self {
        let stats = handle.stats();
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Self { steps: load(&stats.num_steps), tokens: load(&stats.num_generated_tokens) }
    }
}

impl Running {
    fn finish(
        self,
        submitted: Submitted,
        started: Instant,
        before: Counts,
        progress: &mut dyn FnMut(u64),
    ) -> Result<OfflineRun> {
        let mut steps = Vec::new();
        let answers = submitted.wait(|| {
            steps.extend(self.records.try_iter());
            progress(Counts::of(&self.handle).tokens - before.tokens);
        });
        self.handle.drain();
        let ended = self.thread.join().map_err(|_| anyhow!("the engine panicked"))?;
        let answers = answers?;
        ended.context("the engine failed")?;
        steps.extend(self.records.try_iter());
        steps.retain(|step| step.batch > before.steps);
        let num_steps = Counts::of(&self.handle).steps - before.steps;
        let last = answers.iter().map(|answer| answer.ended).max().unwrap_or(started);
        Ok(OfflineRun {
            wall: last.saturating_duration_since(started),
            tokens: answers.into_iter().map(|answer| answer.tokens).collect(),
            num_lost_steps: num_steps - steps.len() as u64,
            steps,
        })
    }
}

/// A request's tokens, and when the last came.
struct Answer {
    tokens: Vec<u32>,
    ended: Instant,
}

/// Requests that the engine has, and where their answers come.
struct Submitted {
    num_requests: usize,
    answers: Receiver<(usize, Result<Answer>)>,
}

impl Submitted {
    /// Waits for all answers, calling `poll` now and then.
    fn wait(self, mut poll: impl FnMut()) -> Result<Vec<Answer>> {
        let mut all: Vec<Option<Answer>> = (0..self.num_requests).map(|_| None).collect();
        let mut num_missing = self.num_requests;
        while num_missing > 0 {
            match self.answers.recv_timeout(POLL) {
                Ok((request, answer)) => {
                    all[request] = Some(answer?);
                    num_missing -= 1;
                    continue; // look at progress only when there is time
                }
                Err(RecvTimeoutError::Timeout) => poll(),
                Err(RecvTimeoutError::Disconnected) => bail!("the engine forgot a request"),
            }
        }
        poll();
        Ok(all.into_iter().flatten().collect())
    }
}

/// Hands all requests in; with `max_tokens` none generates more.
fn submit(
    handle: &EngineHandle,
    workload: &OfflineWorkload,
    max_tokens: Option<usize>,
) -> Result<Submitted> {
    let (sender, answers) = mpsc::channel();
    let num_requests = workload.lengths.len();
    for (request, &lengths) in workload.lengths.iter().enumerate() {
        let output = max_tokens.map_or(lengths.output, |most| most.min(lengths.output));
        let lengths = RequestLengths { output, ..lengths };
        let spec = spec(workload, request, lengths, handle.limits().vocab_size)?;
        let request_of_engine = handle.limits().validate(spec)?;
        let tokens = Vec::with_capacity(output);
        let sink = Collector { request, tokens, answers: sender.clone() };
        handle.submit(request_of_engine, Box::new(sink))?;
    }
    Ok(Submitted { num_requests, answers })
}

fn spec(
    workload: &OfflineWorkload,
    request: usize,
    lengths: RequestLengths,
    vocab_size: usize,
) -> Result<RequestSpec> {
    let seed = |i| if (i as usize) < workload.shared_prefix { u64::MAX } else { request as u64 };
    let draw = |i| (philox::uniform(seed(i), i) * vocab_size as f64) as u32;
    let mut sampling = workload.sampling[request % workload.sampling.len()].clone();
    sampling.seed = sampling.seed.wrapping_add(request as u64);
    let input_len = u32::try_from(lengths.input).context("the prompts are too long")?;
    Ok(RequestSpec {
        prompt: (0..input_len).map(draw).collect(),
        max_tokens: Some(lengths.output),
        sampling,
        grammar: workload.grammar.clone(),
        ..RequestSpec::default()
    })
}

/// Keeps a request's tokens until its end, so that the engine's thread only ever pushes one.
struct Collector {
    request: usize,
    tokens: Vec<u32>,
    answers: Sender<(usize, Result<Answer>)>,
}

impl TokenSink for Collector {
    fn send(&mut self, update: Update) -> Result<(), SinkClosed> {
        let answer = match update {
            Update::Prompt(_) => return Ok(()),
            Update::Token(update) => {
                self.tokens.push(update.token);
                return Ok(());
            }
            Update::Finished(FinishReason::Failed(reason)) => Err(anyhow!("{reason}")),
            Update::Finished(_) => {
                Ok(Answer { tokens: std::mem::take(&mut self.tokens), ended: Instant::now() })
            }
        };
        self.answers.send((self.request, answer)).map_err(|_| SinkClosed)
    }
}
