//! The cores: threads that share the tasks of one operator at a time.
//!
//! A run publishes a task and one contiguous share of the task indices per thread. A thread works
//! through its own share first, so that it streams through neighbouring memory, then through what
//! is left of the others': when the system takes a core away, the rest go on without it.
//!
//! ```text
//! caller   open run | own share | steal | close, wait for active = 0 | return
//! worker   spin ... | join | own share | steal | leave | spin ~40 us ... | park
//! late     parked ........ | wakes, finds the run closed | spin ...
//! ```
//!
//! Workers join a run by counting themselves into `state` while it is open; the caller closes it
//! when no task is left. So a run never waits for a worker that has not started on it.

use std::{
    any::Any,
    cell::{Cell, UnsafeCell},
    marker::PhantomData,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::BackendError;

/// How long a thread looks for work, or for the end of a run, before it sleeps.
const SPIN: Duration = Duration::from_micros(40);

// `Shared::state`: the number of the run, three flags, and how many workers are inside the run.
const ACTIVE_MASK: u64 = 0xffff;
const OPEN: u64 = 1 << 16;
const CALLER_SLEEPS: u64 = 1 << 17;
const SHUT_DOWN: u64 = 1 << 18;
const RUN_UNIT: u64 = 1 << 20;

/// Most threads of a pool.
const MAX_THREADS: usize = 1024;

thread_local! {
    /// Whether this thread is inside a task, where a nested run is done inline.
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

/// Threads that run the tasks of one operator at a time; the calling thread is one of them.
pub(crate) struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<thread::JoinHandle<()>>,
    /// Held during a run, so that concurrent callers take turns.
    turn: Mutex<()>,
}

struct Shared {
    state: AtomicU64,
    /// One share per thread; the caller's is the first.
    shares: Box<[Share]>,
    /// Set by worker `i + 1` before it parks.
    asleep: Box<[AtomicBool]>,
    job: UnsafeCell<Option<Job>>,
    panicked: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// With `CALLER_SLEEPS`: wakes the caller when the last worker leaves.
    last_left: (Mutex<()>, Condvar),
}

/// Task indices `next..end`, on cache lines of their own.
#[repr(align(128))]
struct Share {
    next: AtomicUsize,
    end: AtomicUsize,
}

type Job = *const (dyn Fn(usize) + Sync);

// SAFETY: `job` is written only by the caller that holds `turn`, while `state` says that no run is
// open and no worker active; workers read it only while they are counted as active.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is used only during a run, which its target outlives.
unsafe impl Send for Shared {}

impl ThreadPool {
    /// A pool of `num_threads` threads, of which the caller of [`ThreadPool::run`] is one.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub(crate) fn new(num_threads: usize) -> Result<Self, BackendError> {
        let num_threads = num_threads.clamp(1, MAX_THREADS);
        let share = |_| Share { next: AtomicUsize::new(0), end: AtomicUsize::new(0) };
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            shares: (0..num_threads).map(share).collect(),
            asleep: (1..num_threads).map(|_| AtomicBool::new(false)).collect(),
            job: UnsafeCell::new(None),
            panicked: AtomicBool::new(false),
            panic: Mutex::new(None),
            last_left: (Mutex::new(()), Condvar::new()),
        });
        let mut pool = Self { shared, workers: Vec::new(), turn: Mutex::new(()) };
        for index in 1..num_threads {
            let shared = Arc::clone(&pool.shared);
            let worker = thread::Builder::new()
                .name(format!("cpu {index}"))
                .spawn(move || shared.serve(index))
                .map_err(|error| BackendError::DeviceLost(format!("thread {index}: {error}")))?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Threads that share a run, the caller included.
    pub(crate) fn num_threads(&self) -> usize {
        self.shared.shares.len()
    }

    /// Calls `task(i)` once for every `i < num_tasks`, on all threads; returns when all are done.
    ///
    /// Concurrent callers take turns; a run inside a task is done by that task's thread alone.
    ///
    /// # Panics
    /// With the panic of a task, once no thread is inside the task any more. Tasks not yet started
    /// are then left out.
    pub(crate) fn run(&self, num_tasks: usize, task: impl Fn(usize) + Sync) {
        if num_tasks <= 1 || self.workers.is_empty() || IN_TASK.get() {
            (0..num_tasks).for_each(task);
            return;
        }
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.shared.open(num_tasks, &task);
        self.wake_sleepers();
        self.shared.take_part(0, &task);
        self.shared.close();
        let panic = self
            .shared
            .panicked
            .swap(false, Ordering::Relaxed)
            .then(|| self.shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take());
        drop(turn);
        if let Some(panic) = panic.flatten() {
            resume_unwind(panic);
        }
    }

    /// Splits `0..len` into at most a few chunks per thread, none shorter than `min_len` unless
    /// `len` is, and calls `task` for each. The cut points never depend on timing.
    pub(crate) fn run_chunks(
        &self,
        len: usize,
        min_len: usize,
        task: impl Fn(Range<usize>) + Sync,
    ) {
        const CHUNKS_PER_THREAD: usize = 4;
        let most = self.num_threads() * CHUNKS_PER_THREAD;
        let num_chunks = (len / min_len.max(1)).clamp(1, most).min(len);
        self.run(num_chunks, |i| task(i * len / num_chunks..(i + 1) * len / num_chunks));
    }

    fn wake_sleepers(&self) {
        for (asleep, worker) in self.shared.asleep.iter().zip(&self.workers) {
            // Ordered after the change of `state`: see `Shared::wait_for_run`.
            if asleep.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.state.fetch_or(SHUT_DOWN, Ordering::SeqCst);
        for worker in &self.workers {
            worker.thread().unpark();
        }
        for worker in self.workers.drain(..) {
            // Workers catch every panic of a task; a destructor must not add another.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Publishes a run. Only for the holder of `turn`, after the last run was closed.
    fn open(&self, num_tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        let num_shares = self.shares.len();
        for (i, share) in self.shares.iter().enumerate() {
            share.next.store(i * num_tasks / num_shares, Ordering::Relaxed);
            share.end.store((i + 1) * num_tasks / num_shares, Ordering::Relaxed);
        }
        // SAFETY: only the lifetime changes. `close` returns after the last use of the pointer, and
        // the caller's borrow of the task lasts longer than that.
        let job = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), Job>(task) };
        // SAFETY: no run is open and no worker active, so nobody else touches the cell.
        unsafe { *self.job.get() = Some(job) };
        let state = self.state.load(Ordering::Relaxed);
        debug_assert_eq!(state & (ACTIVE_MASK | OPEN | CALLER_SLEEPS), 0);
        self.state.fetch_add(RUN_UNIT | OPEN, Ordering::SeqCst);
    }

    /// Lets no further worker join and waits for those inside to leave.
    fn close(&self) {
        let mut state = self.state.fetch_and(!OPEN, Ordering::Acquire) & !OPEN;
        let start = Instant::now();
        while state & ACTIVE_MASK != 0 {
            if start.elapsed() > SPIN {
                self.sleep_until_all_left();
                break;
            }
            spin();
            state = self.state.load(Ordering::Acquire);
        }
    }

    fn sleep_until_all_left(&self) {
        let (mutex, condvar) = &self.last_left;
        let mut guard = mutex.lock().unwrap_or_else(PoisonError::into_inner);
        self.state.fetch_or(CALLER_SLEEPS, Ordering::Relaxed);
        while self.state.load(Ordering::Acquire) & ACTIVE_MASK != 0 {
            guard = condvar.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.state.fetch_and(!CALLER_SLEEPS, Ordering::Relaxed);
    }

    /// A worker's life.
    fn serve(&self, index: usize) {
        IN_TASK.set(true);
        let mut last_run = 0;
        while let Some(state) = self.wait_for_run(index, last_run) {
            last_run = state / RUN_UNIT;
            if self.join(state) {
                // SAFETY: counted as active, so the caller keeps the job as it is, and its target
                // alive, until `leave`.
                let task = unsafe { (*self.job.get()).map(|job| &*job) };
                self.work(index, task.expect("an open run has a job"));
                self.leave();
            }
        }
    }

    /// The state of the first open run after `last_run`; `None` when the pool is dropped.
    fn wait_for_run(&self, index: usize, last_run: u64) -> Option<u64> {
        let asleep = &self.asleep[index - 1];
        let mut start = Instant::now();
        loop {
            // Sequentially consistent with `open` and `wake_sleepers`: either this load sees the
            // new run, or the caller sees `asleep` and unparks.
            let state = self.state.load(Ordering::SeqCst);
            if state & SHUT_DOWN != 0 {
                asleep.store(false, Ordering::Relaxed);
                return None;
            }
            if state & OPEN != 0 && state / RUN_UNIT != last_run {
                asleep.store(false, Ordering::Relaxed);
                return Some(state);
            }
            if asleep.load(Ordering::Relaxed) {
                thread::park();
                asleep.store(false, Ordering::Relaxed);
                start = Instant::now();
            } else if start.elapsed() > SPIN {
                asleep.store(true, Ordering::SeqCst);
            } else {
                spin();
            }
        }
    }

    /// Counts this worker into the run of `state`; false if that run is over.
    fn join(&self, mut state: u64) -> bool {
        let run = state / RUN_UNIT;
        while state & OPEN != 0 && state / RUN_UNIT == run {
            let joined = self.state.compare_exchange_weak(
                state,
                state + 1,
                Ordering::Acquire,
                Ordering::Relaxed,
            );
            match joined {
                Ok(_) => return true,
                Err(now) => state = now,
            }
        }
        false
    }

    fn leave(&self) {
        let before = self.state.fetch_sub(1, Ordering::Release);
        if before & ACTIVE_MASK == 1 && before & CALLER_SLEEPS != 0 {
            let (mutex, condvar) = &self.last_left;
            // The lock makes sure that the caller is inside `wait` or has yet to look.
            drop(mutex.lock().unwrap_or_else(PoisonError::into_inner));
            condvar.notify_one();
        }
    }

    /// The caller's part of a run.
    fn take_part(&self, index: usize, task: &(dyn Fn(usize) + Sync)) {
        IN_TASK.set(true);
        self.work(index, task);
        IN_TASK.set(false);
    }

    /// Does this thread's share, then what is left of the others'; keeps the first panic.
    fn work(&self, index: usize, task: &(dyn Fn(usize) + Sync)) {
        let work = || {
            let (before, from) = self.shares.split_at(index);
            for share in from.iter().chain(before) {
                while let Some(i) = share.claim() {
                    if self.panicked.load(Ordering::Relaxed) {
                        return;
                    }
                    task(i);
                }
            }
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(work)) {
            let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert(panic);
            self.panicked.store(true, Ordering::Relaxed);
        }
    }
}

impl Share {
    fn claim(&self) -> Option<usize> {
        let end = self.end.load(Ordering::Relaxed);
        // Looking first keeps an empty share's line shared among those who come to steal.
        if self.next.load(Ordering::Relaxed) >= end {
            return None;
        }
        let i = self.next.fetch_add(1, Ordering::Relaxed);
        (i < end).then_some(i)
    }
}

/// Some politeness between two looks: tens to hundreds of nanoseconds, by processor.
fn spin() {
    for _ in 0..8 {
        std::hint::spin_loop();
    }
}

/// A slice whose disjoint parts are written by the tasks of one run.
pub(crate) struct SharedMut<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: it hands out `&mut T` to several threads, each to other elements (see `slice`).
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    /// Takes the slice for `'a`; nobody else can use it meanwhile.
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// The elements of `range`.
    ///
    /// # Panics
    /// If `range` is not inside the slice.
    ///
    /// # Safety
    /// No two ranges that are in use at the same time may overlap.
    #[allow(clippy::mut_from_ref)] // The contract above is what makes it sound.
    pub(crate) unsafe fn slice(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: in bounds; the caller keeps ranges apart, and `'a` keeps everybody else out.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    fn counters(num: usize) -> Vec<AtomicU32> {
        (0..num).map(|_| AtomicU32::new(0)).collect()
    }

    fn count(counter: &AtomicU32) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    fn assert_all(counters: &[AtomicU32], expected: u32) {
        assert!(counters.iter().all(|count| count.load(Ordering::Relaxed) == expected));
    }

    #[test]
    fn every_task_runs_once() {
        for num_threads in [1, 2, 3, 8] {
            let pool = ThreadPool::new(num_threads).unwrap();
            assert_eq!(pool.num_threads(), num_threads);
            for num_tasks in [0, 1, 2, 3, 7, 64, 1000] {
                let ran = counters(num_tasks);
                pool.run(num_tasks, |i| count(&ran[i]));
                assert_all(&ran, 1);
            }
        }
    }

    #[test]
    fn many_small_runs_see_each_others_writes() {
        let pool = ThreadPool::new(4).unwrap();
        let mut values = vec![0_u64; 5];
        for run in 0..20_000 {
            let shared = SharedMut::new(&mut values);
            // SAFETY: every task has an element of its own.
            pool.run(5, |i| unsafe { shared.slice(i..i + 1)[0] += run });
            if run % 4000 == 0 {
                thread::sleep(Duration::from_millis(1)); // Let the workers park.
            }
        }
        assert_eq!(values, [19_999 * 20_000 / 2; 5]);
    }

    #[test]
    fn concurrent_callers_take_turns() {
        let pool = ThreadPool::new(3).unwrap();
        let ran = counters(50);
        let inside = AtomicU32::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        pool.run(ran.len(), |i| {
                            assert!(inside.fetch_add(1, Ordering::Relaxed) < 3);
                            count(&ran[i]);
                            inside.fetch_sub(1, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_all(&ran, 800);
    }

    #[test]
    fn nested_runs_are_done_inline() {
        let pool = ThreadPool::new(3).unwrap();
        let ran = counters(8);
        pool.run(20, |_| {
            let outer = thread::current().id();
            pool.run(ran.len(), |i| {
                assert_eq!(thread::current().id(), outer);
                count(&ran[i]);
            });
        });
        assert_all(&ran, 20);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        for num_threads in [1, 4] {
            let pool = ThreadPool::new(num_threads).unwrap();
            for bad in [0, 5, 19] {
                let inside = AtomicU32::new(0);
                let run = || {
                    pool.run(20, |i| {
                        assert_ne!(i, bad, "task {bad} fails");
                        inside.fetch_add(1, Ordering::Relaxed);
                        thread::sleep(Duration::from_micros(100));
                        inside.fetch_sub(1, Ordering::Relaxed);
                    });
                };
                let panic = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
                assert_eq!(inside.load(Ordering::Relaxed), 0, "a task still runs");
                let message = panic.downcast_ref::<String>().unwrap();
                assert!(message.contains(&format!("task {bad} fails")), "{message}");
                let ran = counters(20);
                pool.run(20, |i| count(&ran[i]));
                assert_all(&ran, 1);
            }
        }
    }

    #[test]
    fn a_long_task_of_a_worker_is_waited_for() {
        let pool = ThreadPool::new(2).unwrap();
        let caller = thread::current().id();
        let done = counters(2);
        pool.run(2, |i| {
            let worker = thread::current().id() != caller;
            thread::sleep(Duration::from_millis(if worker { 20 } else { 5 }));
            count(&done[i]);
        });
        assert_all(&done, 1);
    }

    #[test]
    fn chunks_cover_the_range_and_respect_the_least_length() {
        let pool = ThreadPool::new(3).unwrap();
        for (len, min_len) in [(0, 4), (3, 4), (9, 4), (100, 1), (1000, 64)] {
            let ran = counters(len);
            pool.run_chunks(len, min_len, |range| {
                assert!(range.len() >= min_len.min(len));
                ran[range].iter().for_each(count);
            });
            assert_all(&ran, 1);
        }
    }

    #[test]
    #[should_panic(expected = "2..4 of 3")]
    fn shared_slices_are_bounds_checked() {
        let mut values = [0; 3];
        let shared = SharedMut::new(&mut values);
        // SAFETY: the only range in use.
        let _ = unsafe { shared.slice(2..4) };
    }
}
