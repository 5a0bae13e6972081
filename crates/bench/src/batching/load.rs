//! Requests through an engine, with the time of every token.

use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use inflight_backend::{Backend, philox};
use inflight_engine::{
    Engine, EngineError, EngineHandle, FinishReason, RequestSpec, SinkClosed, Tenant, TokenSink,
    Tuning, Update,
};

use crate::gate::Gate;

/// One request of a load.
#[derive(Clone, Debug)]
pub(super) struct Arrival {
    /// When it comes, after the start.
    pub(super) at: Duration,
    pub(super) prompt_len: usize,
    pub(super) output_len: usize,
    /// Whose it is.
    pub(super) tenant: &'static str,
}

/// When a request came and when each of its tokens did.
#[derive(Clone, Debug)]
pub(super) struct Served {
    pub(super) submitted: Instant,
    pub(super) tokens: Vec<Instant>,
}

impl Served {
    /// Seconds from its arrival to its last token.
    pub(super) fn latency_s(&self) -> f64 {
        self.tokens.last().map_or(0.0, |&last| (last - self.submitted).as_secs_f64())
    }

    pub(super) fn first_token_s(&self) -> f64 {
        self.tokens.first().map_or(0.0, |&first| (first - self.submitted).as_secs_f64())
    }

    /// Seconds between its tokens.
    pub(super) fn gaps_s(&self) -> impl Iterator<Item = f64> {
        self.tokens.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64())
    }
}

/// An engine on its thread, for one experiment after the other.
pub struct Rig {
    handle: EngineHandle,
    thread: JoinHandle<Result<(), EngineError>>,
    /// Loads run so far: each has prompts of its own, so that none finds another's prefixes.
    num_loads: u64,
}

impl Rig {
    /// Prepares an engine and starts it.
    ///
    /// # Errors
    /// The device is lost.
    pub fn start<B: Backend>(mut engine: Engine<B>, handle: EngineHandle) -> Result<Self> {
        engine.prepare()?;
        let thread = thread::Builder::new().name("engine".to_owned());
        let thread = thread.spawn(move || engine.run()).context("no thread for the engine")?;
        Ok(Self { handle, thread, num_loads: 0 })
    }

    /// Ends the engine.
    ///
    /// # Errors
    /// Its device was lost before.
    pub fn stop(self) -> Result<()> {
        self.handle.drain();
        let ended = self.thread.join().map_err(|_| anyhow!("the engine panicked"))?;
        ended.context("the engine failed")
    }

    /// Runs a load under a policy. Requests that come at once are all there before the first step.
    pub(super) fn run(&mut self, tuning: &Tuning, arrivals: &[Arrival]) -> Result<Vec<Served>> {
        self.handle.tune(tuning.clone());
        let (sender, ended) = mpsc::channel();
        let is_burst = arrivals.iter().all(|arrival| arrival.at.is_zero());
        let gate = is_burst.then(|| Gate::close(&self.handle)).transpose()?;
        let started = Instant::now();
        for (i, arrival) in arrivals.iter().enumerate() {
            thread::sleep((started + arrival.at).saturating_duration_since(Instant::now()));
            self.submit(i, arrival, sender.clone())?;
        }
        drop(sender);
        if let Some(gate) = gate {
            gate.open()?;
        }
        self.num_loads += 1;
        let mut served = collect(arrivals.len(), &ended)?;
        if is_burst {
            // They came when the gate opened, however long handing them over took.
            let opened = served.iter().map(|served| served.submitted).max().unwrap_or(started);
            served.iter_mut().for_each(|served| served.submitted = opened);
        }
        Ok(served)
    }

    fn submit(
        &self,
        i: usize,
        arrival: &Arrival,
        ended: Sender<(usize, Result<Served>)>,
    ) -> Result<()> {
        let limits = self.handle.limits();
        let key = (self.num_loads << 32) + i as u64;
        let draw = |at: u32| (philox::uniform(key, at) * limits.vocab_size as f64) as u32;
        let prompt_len = u32::try_from(arrival.prompt_len).context("the prompt is too long")?;
        let request = limits.validate(RequestSpec {
            prompt: (0..prompt_len).map(draw).collect(),
            max_tokens: Some(arrival.output_len),
            tenant: Tenant::named(arrival.tenant),
            ..RequestSpec::default()
        })?;
        let tokens = Vec::with_capacity(arrival.output_len);
        let served = Served { submitted: Instant::now(), tokens };
        self.handle.submit(request, Box::new(Stopwatch { i, served, ended }))?;
        Ok(())
    }
}

fn collect(count: usize, ended: &Receiver<(usize, Result<Served>)>) -> Result<Vec<Served>> {
    let mut all: Vec<Option<Served>> = vec![None; count];
    for (i, served) in ended {
        all[i] = Some(served?);
    }
    let served: Vec<_> = all.into_iter().flatten().collect();
    if served.len() < count {
        bail!("the engine forgot a request");
    }
    Ok(served)
}

/// Writes down when tokens come.
struct Stopwatch {
    i: usize,
    served: Served,
    ended: Sender<(usize, Result<Served>)>,
}

impl TokenSink for Stopwatch {
    fn send(&mut self, update: Update) -> Result<(), SinkClosed> {
        let served = match update {
            Update::Prompt(_) => return Ok(()),
            Update::Token(_) => {
                self.served.tokens.push(Instant::now());
                return Ok(());
            }
            Update::Finished(FinishReason::Length | FinishReason::Stop { .. }) => {
                Ok(self.served.clone())
            }
            Update::Finished(reason) => Err(anyhow!("a request ended by {reason:?}")),
        };
        self.ended.send((self.i, served)).map_err(|_| SinkClosed)
    }
}
