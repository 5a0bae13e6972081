//! Threads that follow grammars while the device computes.
//!
//! ```text
//! engine    commit token ─ job ──────┐      ┌── take result ─ upload mask, enqueue sampling
//! worker                             └ advance, allowed ┘
//! compute   ─────────────────── forward ───────────────────────── sample
//! ```
//!
//! A matcher travels with its job and comes back with the result, so nothing is shared.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{self, Receiver, Sender},
    },
    thread,
};

use inflight_backend::late::mask_words;
use inflight_scheduler::SequenceId;

use crate::{Allowed, Matcher, SharedGrammar};

/// Most threads: a step's masks take them less time than its forward pass takes the device.
const MAX_THREADS: usize = 8;

/// How far a sequence's grammar was followed.
pub(crate) enum Progress {
    /// A worker has the matcher.
    Working,
    /// It is known what may come next.
    Known(Next),
}

/// What may come next in an output.
pub(crate) struct Next {
    /// `None` once something failed.
    matcher: Option<Box<dyn Matcher>>,
    pub(crate) allowed: Result<Allowed, String>,
    /// `[vocab_size / 32]`; see [`inflight_backend::late`].
    pub(crate) mask: Vec<u32>,
}

impl Next {
    /// Whether `token` may come next.
    pub(crate) fn allows(&self, token: u32) -> bool {
        match self.allowed {
            Ok(Allowed::All) => true,
            Ok(Allowed::Masked) => has_token(&self.mask, token),
            Ok(Allowed::Nothing) | Err(_) => false,
        }
    }
}

/// Whether a mask has `token`'s bit.
fn has_token(mask: &[u32], token: u32) -> bool {
    mask.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}

/// Work on one sequence's grammar.
struct Job {
    id: SequenceId,
    work: Work,
    mask: Vec<u32>,
}

enum Work {
    Start(SharedGrammar),
    Advance(Box<dyn Matcher>, u32),
}

/// The engine's end.
pub(crate) struct GrammarWorkers {
    jobs: Sender<Job>,
    results: Receiver<(SequenceId, Next)>,
    num_mask_words: usize,
}

impl GrammarWorkers {
    /// Starts the threads; they end when this is dropped.
    pub(crate) fn start(vocab_size: usize) -> io::Result<Self> {
        let (jobs, queue) = mpsc::channel();
        let (sender, results) = mpsc::channel();
        let queue = Arc::new(Mutex::new(queue));
        let num_threads = thread::available_parallelism().map_or(1, usize::from) / 2;
        for _ in 0..num_threads.clamp(1, MAX_THREADS) {
            let (queue, sender) = (Arc::clone(&queue), sender.clone());
            let thread = thread::Builder::new().name("grammar".to_owned());
            thread.spawn(move || serve(&queue, &sender))?;
        }
        Ok(Self { jobs, results, num_mask_words: mask_words(vocab_size) })
    }

    /// Begins to follow a sequence's grammar.
    pub(crate) fn begin(&self, id: SequenceId, grammar: SharedGrammar) -> Progress {
        let mask = vec![0; self.num_mask_words];
        self.send(Job { id, work: Work::Start(grammar), mask })
    }

    /// Follows it over one more token, which `next` allows.
    pub(crate) fn advance(&self, id: SequenceId, next: Next, token: u32) -> Progress {
        let matcher = next.matcher.expect("a failed grammar ends its request");
        self.send(Job { id, work: Work::Advance(matcher, token), mask: next.mask })
    }

    /// Waits for the next result, of whatever sequence.
    pub(crate) fn wait(&self) -> (SequenceId, Next) {
        self.results.recv().expect("workers live as long as the engine")
    }

    fn send(&self, job: Job) -> Progress {
        self.jobs.send(job).expect("workers live as long as the engine");
        Progress::Working
    }
}

/// A worker's thread.
fn serve(queue: &Mutex<Receiver<Job>>, results: &Sender<(SequenceId, Next)>) {
    loop {
        let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Job { id, work, mask }) = job else { return };
        if results.send((id, work.run(mask))).is_err() {
            return;
        }
    }
}

impl Work {
    fn run(self, mut mask: Vec<u32>) -> Next {
        mask.fill(0);
        let follow = AssertUnwindSafe(|| {
            let matcher = match self {
                Self::Start(grammar) => grammar.0.start(),
                Self::Advance(mut matcher, token) => {
                    matcher.advance(token)?;
                    matcher
                }
            };
            let (allowed, matcher) = allowed(matcher, &mut mask)?;
            Ok((allowed, matcher))
        });
        let result = catch_unwind(follow);
        match result.unwrap_or_else(|_| Err("following the grammar failed".to_owned())) {
            Ok((allowed, matcher)) => Next { matcher: Some(matcher), allowed: Ok(allowed), mask },
            Err(reason) => Next { matcher: None, allowed: Err(reason), mask },
        }
    }
}

/// A mask without any token would let sampling draw anything: it fails.
fn allowed(
    mut matcher: Box<dyn Matcher>,
    mask: &mut [u32],
) -> Result<(Allowed, Box<dyn Matcher>), String> {
    let allowed = matcher.allowed(mask)?;
    if allowed == Allowed::Masked && mask.iter().all(|word| *word == 0) {
        return Err("the grammar allows no token that the vocabulary has".to_owned());
    }
    Ok((allowed, matcher))
}
