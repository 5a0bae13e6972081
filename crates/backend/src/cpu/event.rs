//! Events: points in a stream that other streams and the host can wait for.

use std::time::{Duration, Instant};

use crate::sync::{Arc, AtomicU64, Condvar, Mutex, Ordering, lock, wait_while};

/// A point in a stream. As with CUDA's events, waiting refers to the latest `record` enqueued
/// before the wait, and an event never recorded holds nobody up.
#[derive(Clone, Default)]
pub struct CpuEvent {
    core: Arc<EventCore>,
}

#[derive(Default)]
struct EventCore {
    /// Number of the latest record enqueued.
    recorded: AtomicU64,
    happened: Mutex<Happened>,
    changed: Condvar,
}

#[derive(Clone, Copy, Default)]
struct Happened {
    /// Number of the latest record that a stream has come to.
    ticket: u64,
    at: Option<Instant>,
}

impl CpuEvent {
    /// Called when a record is enqueued: its number.
    pub(super) fn issue(&self) -> u64 {
        self.core.recorded.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Number of the latest record enqueued.
    pub(super) fn latest(&self) -> u64 {
        self.core.recorded.load(Ordering::Acquire)
    }

    /// Called by the stream when it comes to record number `ticket`.
    pub(super) fn signal(&self, ticket: u64) {
        let mut happened = lock(&self.core.happened);
        happened.ticket = happened.ticket.max(ticket);
        happened.at = Some(Instant::now());
        drop(happened);
        self.core.changed.notify_all();
    }

    /// Blocks until record number `ticket` has happened.
    pub(super) fn block_until(&self, ticket: u64) {
        let happened = lock(&self.core.happened);
        drop(wait_while(&self.core.changed, happened, |happened| happened.ticket < ticket));
    }

    /// Time from `self` to `later`; zero where one has not happened or they are out of order.
    pub(super) fn elapsed_to(&self, later: &Self) -> Duration {
        let (from, to) = (lock(&self.core.happened).at, lock(&later.core.happened).at);
        match (from, to) {
            (Some(from), Some(to)) => to.saturating_duration_since(from),
            _ => Duration::ZERO,
        }
    }
}
