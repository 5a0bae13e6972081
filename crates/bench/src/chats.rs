//! Chats that come back beside running streams: what it costs to have their beginnings on the
//! device, on the host, or nowhere.
//!
//! ```text
//!   streams   ════════════════════════════════════════════════   tokens a second, all the while
//!   chats       │   │   │   │   │   one every interval: time to its first token
//!   phases    alone │ device │ host │ recomputed
//! ```
//!
//! On the device: a few chats that it just had. On the host: round robin over more chats than the
//! device can hold. Recomputed: the same round robin, each visit with a salt of its own, so that
//! nothing of it is found.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use inflight_backend::{Backend, philox};
use inflight_engine::{
    Engine, EngineHandle, FinishReason, RequestSpec, SinkClosed, TokenSink, Update,
};
use serde::Serialize;

/// What is served.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatsWorkload {
    /// Chats in turn; together they are longer than the KV cache.
    pub num_chats: usize,
    /// Chats in turn while all of them are to be on the device.
    pub num_warm_chats: usize,
    /// Tokens of a chat's beginning, which it sends again with every turn.
    pub prefix_len: usize,
    /// New tokens of a turn.
    pub turn_len: usize,
    /// Tokens generated in a turn.
    pub output_len: usize,
    /// Requests that generate all the while.
    pub num_streams: usize,
    /// Tokens of a stream's prompt, and tokens that it generates until it begins anew.
    pub stream_len: (usize, usize),
    /// From one turn's beginning to the next.
    pub interval: Duration,
    /// Turns of a phase.
    pub turns_per_phase: usize,
}

/// What a run gave.
#[derive(Clone, Debug, Serialize)]
pub struct ChatsReport {
    /// In the order in which they were measured.
    pub phases: Vec<ChatsPhase>,
}

/// What a phase gave.
#[derive(Clone, Debug, Serialize)]
pub struct ChatsPhase {
    /// Where the chats' beginnings were.
    pub name: &'static str,
    /// Turns measured.
    pub num_turns: usize,
    /// Milliseconds to a turn's first token: the median, and what nine of ten stayed within.
    pub ttft_ms: [f64; 2],
    /// Tokens a second of all streams together.
    pub stream_tokens_per_s: f64,
    /// Tokens of the turns' prompts that needed no computing, as a share of all.
    pub cached_share: f64,
    /// Blocks that came from the host.
    pub num_fetched_blocks: u64,
    /// Blocks evicted before they were copied there.
    pub num_lost_blocks: u64,
}

/// Serves the chats on an engine that has not run yet.
///
/// # Errors
/// A request that the engine refuses, or the engine's own failure.
pub fn run_chats<B: Backend>(
    mut engine: Engine<B>,
    handle: EngineHandle,
    workload: &ChatsWorkload,
    progress: &mut dyn FnMut(&str),
) -> Result<ChatsReport> {
    engine.prepare()?;
    let thread = thread::Builder::new().name("engine".to_owned()).spawn(|| engine.run());
    let thread = thread.context("no thread for the engine")?;
    let mut load = Load::new(handle.clone(), workload.clone());
    let measured = load.measure(progress);
    load.end();
    handle.drain();
    let ended = thread.join().map_err(|_| anyhow!("the engine panicked"))?;
    let phases = measured?;
    ended.context("the engine failed")?;
    Ok(ChatsReport { phases })
}

/// Requests on their way.
struct Load {
    handle: EngineHandle,
    workload: ChatsWorkload,
    events: Receiver<Event>,
    sender: Sender<Event>,
    /// Tokens of all streams.
    streamed: Arc<AtomicU64>,
    /// Running streams by number.
    streams: HashMap<usize, inflight_engine::RequestId>,
    num_turns: u64,
}

enum Event {
    StreamEnded(usize),
    TurnEnded(Result<Turn>),
}

/// One turn of a chat.
#[derive(Clone, Copy, Debug)]
struct Turn {
    ttft: Duration,
    num_cached: usize,
}

/// Which chats a phase has.
struct Visits {
    num_chats: usize,
    /// Whether each visit has a salt of its own.
    is_salted: bool,
}

impl Load {
    fn new(handle: EngineHandle, workload: ChatsWorkload) -> Self {
        let (sender, events) = mpsc::channel();
        let (streamed, streams) = (Arc::default(), HashMap::new());
        Self { handle, workload, events, sender, streamed, streams, num_turns: 0 }
    }

    fn measure(&mut self, progress: &mut dyn FnMut(&str)) -> Result<Vec<ChatsPhase>> {
        let ChatsWorkload { num_chats, num_warm_chats, turns_per_phase, .. } = self.workload;
        progress("every chat for the first time");
        for chat in 0..num_chats {
            self.submit_turn(chat, None)?;
            self.wait_for_turns(1)?;
        }
        for stream in 0..self.workload.num_streams {
            self.submit_stream(stream)?;
        }
        let everywhere = |is_salted| Visits { num_chats, is_salted };
        let warm = Visits { num_chats: num_warm_chats, is_salted: false };
        let mut phases = Vec::new();
        // Loads what runs for the first time, and brings the warm chats to the device.
        self.phase("", &warm, num_warm_chats)?;
        for (name, visits, num_turns) in [
            ("alone", &warm, 0),
            ("device", &warm, turns_per_phase),
            ("host", &everywhere(false), turns_per_phase),
            ("recomputed", &everywhere(true), turns_per_phase),
        ] {
            progress(name);
            phases.push(self.phase(name, visits, num_turns)?);
        }
        Ok(phases)
    }

    /// Begins a turn every interval and waits for the last one's end.
    fn phase(
        &mut self,
        name: &'static str,
        visits: &Visits,
        num_turns: usize,
    ) -> Result<ChatsPhase> {
        let (before, streamed) = (self.counts(), self.streamed.load(Ordering::Relaxed));
        let began = Instant::now();
        let mut turns = Vec::new();
        let mut num_running = 0;
        let num_intervals = if num_turns == 0 { self.workload.turns_per_phase } else { num_turns };
        for turn in 0..num_intervals {
            if num_turns > 0 {
                let salt = visits.is_salted.then(|| format!("visit {}", self.num_turns));
                self.submit_turn(turn % visits.num_chats, salt)?;
                num_running += 1;
            }
            let next = began + self.workload.interval * (turn as u32 + 1);
            while let Some(ended) = self.next_turn(Some(next))? {
                turns.push(ended);
                num_running -= 1;
            }
        }
        let took = began.elapsed();
        let num_streamed = self.streamed.load(Ordering::Relaxed) - streamed;
        turns.extend(self.wait_for_turns(num_running)?);
        let after = self.counts();
        let prompt_len = self.workload.prefix_len + self.workload.turn_len;
        let num_cached: usize = turns.iter().map(|turn| turn.num_cached).sum();
        Ok(ChatsPhase {
            name,
            num_turns: turns.len(),
            ttft_ms: [percentile(&turns, 0.5), percentile(&turns, 0.9)],
            stream_tokens_per_s: num_streamed as f64 / took.as_secs_f64(),
            cached_share: num_cached as f64 / (turns.len() * prompt_len).max(1) as f64,
            num_fetched_blocks: after[0] - before[0],
            num_lost_blocks: after[1] - before[1],
        })
    }

    /// Blocks fetched from the host, and lost.
    fn counts(&self) -> [u64; 2] {
        let memory = &self.handle.stats().memory;
        [&memory.num_fetched, &memory.num_lost].map(|count| count.load(Ordering::Relaxed))
    }

    fn wait_for_turns(&mut self, num_turns: usize) -> Result<Vec<Turn>> {
        (0..num_turns).map(|_| self.next_turn(None)?.context("a turn did not end")).collect()
    }

    /// The next turn that ends, before `until`; streams that end begin anew.
    fn next_turn(&mut self, until: Option<Instant>) -> Result<Option<Turn>> {
        loop {
            let now = Instant::now();
            let left = until.map_or(Duration::from_secs(600), |until| until - now.min(until));
            match self.events.recv_timeout(left) {
                Ok(Event::TurnEnded(turn)) => return turn.map(Some),
                Ok(Event::StreamEnded(stream)) => self.submit_stream(stream)?,
                Err(RecvTimeoutError::Timeout) if until.is_some() => return Ok(None),
                Err(_) => bail!("the engine does not answer"),
            }
        }
    }

    fn submit_stream(&mut self, stream: usize) -> Result<()> {
        let (prompt_len, num_tokens) = self.workload.stream_len;
        // Never found again: each beginning has another prompt.
        self.num_turns += 1;
        let prompt = self.tokens(1 << 40 | self.num_turns, prompt_len);
        let spec = RequestSpec { prompt, max_tokens: Some(num_tokens), ..RequestSpec::default() };
        let request = self.handle.limits().validate(spec)?;
        let (streamed, ended) = (Arc::clone(&self.streamed), self.sender.clone());
        let sink = StreamSink { stream, streamed, ended };
        self.streams.insert(stream, self.handle.submit(request, Box::new(sink))?);
        Ok(())
    }

    fn submit_turn(&mut self, chat: usize, cache_salt: Option<String>) -> Result<()> {
        self.num_turns += 1;
        let mut prompt = self.tokens(chat as u64, self.workload.prefix_len);
        prompt.extend(self.tokens(1 << 41 | self.num_turns, self.workload.turn_len));
        let max_tokens = Some(self.workload.output_len);
        let spec = RequestSpec { prompt, max_tokens, cache_salt, ..RequestSpec::default() };
        let request = self.handle.limits().validate(spec)?;
        let sink = TurnSink { began: Instant::now(), first: None, ended: self.sender.clone() };
        self.handle.submit(request, Box::new(sink))?;
        Ok(())
    }

    fn tokens(&self, seed: u64, len: usize) -> Vec<u32> {
        let vocab_size = self.handle.limits().vocab_size as f64;
        (0..len as u32).map(|i| (philox::uniform(seed, i) * vocab_size) as u32).collect()
    }

    fn end(&mut self) {
        self.streams.values().for_each(|&id| self.handle.abort(id));
    }
}

fn percentile(turns: &[Turn], share: f64) -> f64 {
    let mut all: Vec<Duration> = turns.iter().map(|turn| turn.ttft).collect();
    all.sort_unstable();
    let index = ((all.len() as f64 * share) as usize).min(all.len().saturating_sub(1));
    all.get(index).map_or(0.0, |ttft| ttft.as_secs_f64() * 1e3)
}

struct StreamSink {
    stream: usize,
    streamed: Arc<AtomicU64>,
    ended: Sender<Event>,
}

impl TokenSink for StreamSink {
    fn send(&mut self, update: Update) -> Result<(), SinkClosed> {
        match update {
            Update::Prompt(_) => 0,
            Update::Token(_) => self.streamed.fetch_add(1, Ordering::Relaxed),
            Update::Finished(FinishReason::Aborted) => return Ok(()),
            Update::Finished(_) => {
                return self.ended.send(Event::StreamEnded(self.stream)).map_err(|_| SinkClosed);
            }
        };
        Ok(())
    }
}

struct TurnSink {
    began: Instant,
    first: Option<Turn>,
    ended: Sender<Event>,
}

impl TokenSink for TurnSink {
    fn send(&mut self, update: Update) -> Result<(), SinkClosed> {
        let turn = match update {
            Update::Prompt(_) => return Ok(()),
            Update::Token(update) => {
                let (ttft, num_cached) = (self.began.elapsed(), update.num_cached_tokens);
                self.first.get_or_insert(Turn { ttft, num_cached });
                return Ok(());
            }
            Update::Finished(FinishReason::Failed(reason)) => Err(anyhow!("{reason}")),
            Update::Finished(_) => self.first.context("a turn ended without a token"),
        };
        self.ended.send(Event::TurnEnded(turn)).map_err(|_| SinkClosed)
    }
}
