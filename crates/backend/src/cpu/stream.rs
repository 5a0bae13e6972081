//! Streams: ordered queues, each served by a thread of its own.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
};

use super::event::CpuEvent;
use crate::{
    BackendError,
    sync::{Arc, Condvar, Mutex, lock, thread, wait_while},
};

/// Most commands that may be queued; whoever enqueues more waits, as with a GPU's launch queue.
const MAX_QUEUED: usize = 1 << 14;

/// An ordered queue of operations, served by its own thread.
pub struct CpuStream {
    queue: Arc<Queue>,
    thread: Option<thread::JoinHandle<()>>,
}

/// The first thing that went wrong on any stream of a backend.
#[derive(Clone, Default)]
pub(super) struct Fault {
    message: Arc<Mutex<Option<String>>>,
}

struct Queue {
    state: Mutex<QueueState>,
    not_empty: Condvar,
    not_full: Condvar,
}

#[derive(Default)]
struct QueueState {
    commands: VecDeque<Command>,
    closed: bool,
}

enum Command {
    Run(Box<dyn FnOnce() + Send>),
    Record(CpuEvent, u64),
    Wait(CpuEvent, u64),
}

impl CpuStream {
    pub(super) fn spawn(name: &'static str, fault: Fault) -> Result<Self, BackendError> {
        let queue = Arc::new(Queue {
            state: Mutex::new(QueueState::default()),
            not_empty: Condvar::new(),
            not_full: Condvar::new(),
        });
        let served = Arc::clone(&queue);
        let thread = thread::Builder::new()
            .name(name.to_string())
            .spawn(move || serve(&served, &fault))
            .map_err(|error| BackendError::DeviceLost(format!("stream {name}: {error}")))?;
        Ok(Self { queue, thread: Some(thread) })
    }

    /// Enqueues an operation. It may panic: that is a fault of the device.
    pub(super) fn run(&self, operation: impl FnOnce() + Send + 'static) {
        self.queue.push(Command::Run(Box::new(operation)));
    }

    pub(super) fn record(&self, event: &CpuEvent) {
        let ticket = event.issue();
        self.queue.push(Command::Record(event.clone(), ticket));
    }

    pub(super) fn wait(&self, event: &CpuEvent) {
        self.queue.push(Command::Wait(event.clone(), event.latest()));
    }
}

impl Drop for CpuStream {
    /// Runs what is queued, then ends the thread.
    fn drop(&mut self) {
        lock(&self.queue.state).closed = true;
        self.queue.not_empty.notify_one();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread is in `Fault` already; a destructor must not add another.
            let _ = thread.join();
        }
    }
}

impl Fault {
    pub(super) fn check(&self) -> Result<(), BackendError> {
        match &*lock(&self.message) {
            Some(message) => Err(BackendError::DeviceLost(message.clone())),
            None => Ok(()),
        }
    }

    fn set(&self, message: String) {
        lock(&self.message).get_or_insert(message);
    }
}

impl Queue {
    fn push(&self, command: Command) {
        let full = |state: &QueueState| state.commands.len() >= MAX_QUEUED;
        let mut state = wait_while(&self.not_full, lock(&self.state), full);
        state.commands.push_back(command);
        drop(state);
        self.not_empty.notify_one();
    }

    /// The next command; `None` once the queue is closed and empty.
    fn pop(&self) -> Option<Command> {
        let idle = |state: &QueueState| state.commands.is_empty() && !state.closed;
        let mut state = wait_while(&self.not_empty, lock(&self.state), idle);
        let command = state.commands.pop_front();
        drop(state);
        self.not_full.notify_one();
        command
    }
}

/// A stream's thread. After a fault operations are skipped, but events still happen, so that nobody
/// waits for ever; `synchronize` then reports the fault.
fn serve(queue: &Queue, fault: &Fault) {
    while let Some(command) = queue.pop() {
        match command {
            Command::Run(operation) if fault.check().is_ok() => {
                if let Err(panic) = catch_unwind(AssertUnwindSafe(operation)) {
                    fault.set(panic_message(&*panic));
                }
            }
            Command::Run(_) => {}
            Command::Record(event, ticket) => event.signal(ticket),
            Command::Wait(event, ticket) => event.block_until(ticket),
        }
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "an operator panicked".to_string())
}
