//! Rehearsals: a step's operators are called once without launching anything, so that each prepares
//! what it needs before it is captured in a graph.

use std::cell::Cell;

thread_local! {
    static ON: Cell<bool> = const { Cell::new(false) };
}

/// Whether operators called on this thread are to prepare themselves only.
pub(super) fn is_on() -> bool {
    ON.get()
}

/// Calls `operators` as a rehearsal.
pub(super) fn run<R>(operators: impl FnOnce() -> R) -> R {
    with(true, operators)
}

/// Calls `work`, which is part of preparing, so that it really launches what it enqueues.
pub(super) fn pause<R>(work: impl FnOnce() -> R) -> R {
    with(false, work)
}

fn with<R>(on: bool, call: impl FnOnce() -> R) -> R {
    let before = ON.replace(on);
    let result = call();
    ON.set(before);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rehearsals_and_pauses_nest() {
        assert!(!is_on());
        let (inside, paused, after) = run(|| (is_on(), pause(is_on), is_on()));
        assert_eq!((inside, paused, after), (true, false, true));
        assert!(!is_on());
    }
}
