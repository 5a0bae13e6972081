//! Work on several threads whose results come in order.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
};

use anyhow::{Result, anyhow};

/// Runs each piece of `work` once, on up to `num_threads` threads, which take the next one in order
/// whenever they are free. `show` gets each result in order, as soon as those before it are there.
///
/// A piece that panics has that for an error; the others go on.
pub(crate) fn side_by_side<W: Sync, T: Send>(
    work: &[W],
    num_threads: usize,
    run: impl Fn(&W) -> Result<T> + Sync,
    mut show: impl FnMut(&W, Result<T>),
) {
    let next = AtomicUsize::new(0);
    let (sender, receiver) = mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..num_threads.clamp(1, work.len().max(1)) {
            let (sender, next, run) = (sender.clone(), &next, &run);
            scope.spawn(move || {
                while let Some((i, piece)) = take(work, next) {
                    let result = catch_unwind(AssertUnwindSafe(|| run(piece)));
                    let result = result.unwrap_or_else(|panic| Err(anyhow!(words_of(&*panic))));
                    // The receiver lives until all threads are done.
                    let _ = sender.send((i, result));
                }
            });
        }
        drop(sender);
        let mut results: Vec<Option<Result<T>>> = work.iter().map(|_| None).collect();
        let mut num_shown = 0;
        for (i, result) in receiver {
            results[i] = Some(result);
            while let Some(result) = results.get_mut(num_shown).and_then(Option::take) {
                show(&work[num_shown], result);
                num_shown += 1;
            }
        }
    });
}

/// The next piece of work and its index.
fn take<'a, W>(work: &'a [W], next: &AtomicUsize) -> Option<(usize, &'a W)> {
    let i = next.fetch_add(1, Ordering::Relaxed);
    Some((i, work.get(i)?))
}

fn words_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("panicked: {}", text.unwrap_or("without a word"))
}

#[cfg(test)]
mod tests {
    use std::sync::{Barrier, Mutex};

    use anyhow::ensure;

    use super::*;

    /// What was shown: a piece, and its result or error.
    fn shown(
        work: &[usize],
        num_threads: usize,
        run: impl Fn(&usize) -> Result<usize> + Sync,
    ) -> Vec<(usize, Result<usize, String>)> {
        let mut shown = Vec::new();
        side_by_side(work, num_threads, run, |piece, result| {
            shown.push((*piece, result.map_err(|error| format!("{error:#}"))));
        });
        shown
    }

    #[test]
    fn each_runs_once_and_results_come_in_order() {
        let work: Vec<usize> = (0..100).rev().collect();
        for num_threads in [0, 1, 3, 200] {
            let ran = Mutex::new(vec![0; work.len()]);
            let run = |piece: &usize| {
                ran.lock().unwrap()[*piece] += 1;
                // Some take longer than those behind them.
                (0..piece % 7 * 10).for_each(|_| thread::yield_now());
                Ok(piece * piece)
            };
            let expected: Vec<_> = work.iter().map(|piece| (*piece, Ok(piece * piece))).collect();
            assert_eq!(shown(&work, num_threads, run), expected);
            assert_eq!(*ran.lock().unwrap(), vec![1; work.len()]);
        }
        assert_eq!(shown(&[], 4, |_| Ok(1)), []);
    }

    #[test]
    fn as_many_run_at_once_as_there_are_threads() {
        // Nobody gets past it before three have come.
        let barrier = Barrier::new(3);
        let run = |piece: &usize| {
            barrier.wait();
            Ok(*piece)
        };
        assert_eq!(shown(&[0, 1, 2, 3, 4, 5], 3, run).len(), 6);
    }

    #[test]
    fn failures_and_panics_are_those_of_their_piece() {
        let run = |piece: &usize| {
            assert!(*piece != 2, "piece {piece}");
            ensure!(*piece != 4, "four");
            Ok(*piece)
        };
        let (panicked, failed) = (Err("panicked: piece 2".into()), Err("four".into()));
        let expected = [Ok(0), Ok(1), panicked, Ok(3), failed, Ok(5)];
        let expected: Vec<_> = (0..).zip(expected).collect();
        for num_threads in [1, 2, 6] {
            assert_eq!(shown(&[0, 1, 2, 3, 4, 5], num_threads, run), expected);
        }
    }

    #[test]
    fn what_is_done_is_shown_before_all_is_done() {
        let first_was_shown = Barrier::new(2);
        let mut order = Vec::new();
        let run = |piece: &usize| {
            if *piece == 1 {
                first_was_shown.wait();
            }
            Ok(())
        };
        side_by_side(&[0, 1], 1, run, |piece, _| {
            order.push(*piece);
            if *piece == 0 {
                first_was_shown.wait();
            }
        });
        assert_eq!(order, [0, 1]);
    }
}
