//! Requests in a closed loop, or at a rate.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use http_body_util::BodyExt;
use inflight_backend::philox;
use tokio::task::JoinSet;

use super::answer::{AnswerReader, Served};
use super::{Endpoint, PlannedRequest};
use crate::client::{Client, ClientError, Reply, excerpt};

/// How often progress is shown.
const SHOW_EVERY: Duration = Duration::from_millis(100);

/// When requests are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pace {
    /// So many at a time: each one's end sends the next.
    Closed(usize),
    /// So many a second, whether or not others have ended.
    Open(f64, Arrivals),
}

/// The times between requests at a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrivals {
    /// Random, independent of each other.
    Poisson,
    /// All the same.
    Constant,
}

/// What a run sends, and how.
pub struct Load<'a> {
    /// To whom.
    pub client: &'a Arc<Client>,
    /// Where.
    pub endpoint: Endpoint,
    /// What.
    pub requests: Vec<PlannedRequest>,
    /// When.
    pub pace: Pace,
    /// Most requests at once at a rate; further ones wait here, and their wait counts.
    pub max_in_flight: usize,
    /// Longest time of a request.
    pub timeout: Duration,
    /// Whether answers must have exactly as many tokens as were asked for.
    pub is_exact: bool,
    /// Keys the times between requests.
    pub seed: u64,
}

/// How far a run is.
#[derive(Debug, Default)]
pub struct LoadProgress {
    /// Requests that have ended, well or not.
    pub num_ended: AtomicUsize,
    /// Of those, those that have failed.
    pub num_failed: AtomicUsize,
    /// Pieces of text that came: tokens, if the server sends each as it comes.
    pub num_pieces: AtomicU64,
    num_in_flight: AtomicUsize,
    peak_in_flight: AtomicUsize,
}

/// What a run gave.
#[derive(Debug)]
pub struct LoadRun {
    /// Each request's answer, in the order in which they ended.
    pub(super) served: Vec<Served>,
    /// Most requests at once.
    pub(super) peak_in_flight: usize,
    /// Processor time of the thread that drove them, if the system tells.
    pub(super) client_busy: Option<Duration>,
    pub(super) pace: Pace,
}

/// What tasks share.
struct Shared {
    client: Arc<Client>,
    endpoint: Endpoint,
    requests: Vec<PlannedRequest>,
    timeout: Duration,
    is_exact: bool,
    started: Instant,
    next: AtomicUsize,
    progress: LoadProgress,
}

/// Sends everything and waits for all answers; `show` is told now and then how far it is.
///
/// # Errors
/// There is no runtime to be had. What goes wrong with a request is among its figures.
pub fn run_load(load: Load<'_>, show: &mut dyn FnMut(&LoadProgress)) -> Result<LoadRun> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("no runtime for the client")?;
    let Load { pace, max_in_flight, seed, .. } = load;
    let shared = Arc::new(Shared {
        client: Arc::clone(load.client),
        endpoint: load.endpoint,
        requests: load.requests,
        timeout: load.timeout,
        is_exact: load.is_exact,
        started: Instant::now(),
        next: AtomicUsize::new(0),
        progress: LoadProgress::default(),
    });
    let busy_before = thread_time();
    let all = async {
        let mut ticks = tokio::time::interval(SHOW_EVERY);
        let sending = send_all(&shared, pace, max_in_flight, seed);
        tokio::pin!(sending);
        loop {
            tokio::select! {
                served = &mut sending => return served,
                _ = ticks.tick() => show(&shared.progress),
            }
        }
    };
    let served = runtime.block_on(all);
    show(&shared.progress);
    let client_busy = thread_time().zip(busy_before).map(|(after, before)| after - before);
    let peak_in_flight = shared.progress.peak_in_flight.load(Relaxed);
    Ok(LoadRun { served, peak_in_flight, client_busy, pace })
}

/// Processor time of this thread.
///
/// # Source
/// The kernel's `Documentation/scheduler/sched-stats.rst`: first number, in nanoseconds.
fn thread_time() -> Option<Duration> {
    let text = fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    let ns = text.split_whitespace().next()?.parse().ok()?;
    Some(Duration::from_nanos(ns))
}

async fn send_all(
    shared: &Arc<Shared>,
    pace: Pace,
    max_in_flight: usize,
    seed: u64,
) -> Vec<Served> {
    let mut tasks = JoinSet::new();
    match pace {
        Pace::Closed(concurrency) => {
            for _ in 0..concurrency.min(shared.requests.len()) {
                tasks.spawn(work(Arc::clone(shared)));
            }
        }
        Pace::Open(rate, arrivals) => {
            let room = Arc::new(tokio::sync::Semaphore::new(max_in_flight));
            let mut due = Duration::ZERO;
            for i in 0..shared.requests.len() {
                due += gap(rate, arrivals, seed, i as u32);
                let at = shared.started + due;
                tokio::time::sleep_until(at.into()).await;
                let (shared, room) = (Arc::clone(shared), Arc::clone(&room));
                tasks.spawn(async move {
                    let _place = room.acquire_owned().await;
                    vec![shared.ask(i, Some(due)).await]
                });
            }
        }
    }
    tasks.join_all().await.into_iter().flatten().collect()
}

/// The time in front of request `i`.
fn gap(rate: f64, arrivals: Arrivals, seed: u64, i: u32) -> Duration {
    let mean = 1.0 / rate;
    Duration::from_secs_f64(match arrivals {
        Arrivals::Poisson => -(1.0 - philox::uniform(seed ^ 0xa551, i)).ln() * mean,
        Arrivals::Constant => mean,
    })
}

/// Sends one request after the other until there are no more.
async fn work(shared: Arc<Shared>) -> Vec<Served> {
    let mut served = Vec::new();
    loop {
        let i = shared.next.fetch_add(1, Relaxed);
        if i >= shared.requests.len() {
            return served;
        }
        served.push(shared.ask(i, None).await);
    }
}

impl Shared {
    async fn ask(&self, i: usize, due: Option<Duration>) -> Served {
        let request = &self.requests[i];
        let progress = &self.progress;
        let in_flight = progress.num_in_flight.fetch_add(1, Relaxed) + 1;
        progress.peak_in_flight.fetch_max(in_flight, Relaxed);
        let sent = self.started.elapsed();
        let mut reader = AnswerReader::default();
        let read = tokio::time::timeout(self.timeout, self.read(request, &mut reader)).await;
        let mut served = reader.finish(request.output_len, self.is_exact);
        if let Err(error) = read.unwrap_or(Err(ClientError::Timeout)) {
            served.failure = Some(kind(error));
        }
        let ended = self.started.elapsed();
        progress.num_in_flight.fetch_sub(1, Relaxed);
        progress.num_ended.fetch_add(1, Relaxed);
        progress.num_failed.fetch_add(usize::from(served.failure.is_some()), Relaxed);
        Served { due: due.unwrap_or(sent), sent, ended, ..served }
    }

    async fn read(
        &self,
        request: &PlannedRequest,
        reader: &mut AnswerReader,
    ) -> Result<(), ClientError> {
        let sent = self.client.post(self.endpoint.path(), request.body.clone()).await;
        let mut reply: Reply = sent?;
        let status = reply.response.status();
        if status != 200 {
            let body = self.client.read(reply).await?;
            return Err(ClientError::Status(status.as_u16(), excerpt(&body)));
        }
        while let Some(frame) = reply.response.body_mut().frame().await {
            if let Ok(data) = frame?.into_data() {
                let before = reader.num_pieces();
                reader.push(&data, self.started.elapsed());
                let more = reader.num_pieces() - before;
                self.progress.num_pieces.fetch_add(more as u64, Relaxed);
            }
        }
        self.client.give_back(reply);
        Ok(())
    }
}

/// A failure in one word, and what it says.
fn kind(error: ClientError) -> (std::borrow::Cow<'static, str>, String) {
    let kind = match &error {
        ClientError::Connect(..) => "cannot_connect".into(),
        ClientError::Timeout => "timeout".into(),
        ClientError::Status(status, _) => format!("http_{status}").into(),
        ClientError::Broken(_) | ClientError::ApiKey | ClientError::TooLong => "cut_off".into(),
    };
    (kind, error.to_string())
}
