//! Threads, locks and atomics of streams and events: std's, or shuttle's under model checking.

#[cfg(not(feature = "shuttle"))]
pub(crate) use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicI32, AtomicU64, Ordering},
    },
    thread,
};

#[cfg(feature = "shuttle")]
pub(crate) use shuttle::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicI32, AtomicU64, Ordering},
    },
    thread,
};

/// Locks even after a panic elsewhere: what these locks guard is valid at every release.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Waits on `condvar` until `blocked` no longer holds.
pub(crate) fn wait_while<'a, T>(
    condvar: &Condvar,
    mut guard: MutexGuard<'a, T>,
    blocked: impl Fn(&T) -> bool,
) -> MutexGuard<'a, T> {
    while blocked(&guard) {
        guard = condvar.wait(guard).unwrap_or_else(std::sync::PoisonError::into_inner);
    }
    guard
}
