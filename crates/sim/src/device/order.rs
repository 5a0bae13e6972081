//! What is ordered after what: finds every use of memory that no event orders.
//!
//! Each stream, and the host, is a thread with a clock of its own; events carry clocks from one to
//! the other. Two uses of the same memory, one of them a write, must be ordered by them. Unlike
//! time this does not depend on luck: a wait that is missing is found though nothing went wrong.
//!
//! ```text
//!   host      write inputs ──enqueue──┐                        ┌─ synchronize ── read outputs
//!   h2d                               copy ● h2d_done          │
//!   compute                                 ╲ wait ─ forward ● │
//!   d2h                                                       ╲ wait ─ copy ●
//! ```
//!
//! # Source
//! Flanagan, Freund: "FastTrack: efficient and precise dynamic race detection", PLDI 2009.

/// The host and three streams.
pub(crate) const NUM_THREADS: usize = 4;
/// The host's place among threads.
pub(crate) const HOST: usize = 0;
const NAMES: [&str; NUM_THREADS] = ["the host", "h2d", "compute", "d2h"];

/// For each thread how many of its operations are known to have happened.
pub(crate) type Past = [u32; NUM_THREADS];

/// All threads' pasts.
#[derive(Debug, Default)]
pub(crate) struct Order {
    pasts: [Past; NUM_THREADS],
}

/// Who used some memory last.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Uses {
    /// Thread and its operation.
    write: (usize, u32),
    reads: Past,
}

/// Two uses that nothing orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Race {
    pub(crate) thread: &'static str,
    pub(crate) does: &'static str,
    pub(crate) other: &'static str,
    pub(crate) other_does: &'static str,
}

impl Order {
    /// A thread begins its next operation; one that the host enqueues comes after all that the host
    /// knows of.
    pub(crate) fn begin(&mut self, thread: usize) {
        let host = self.pasts[HOST];
        self.join(thread, &host);
        self.pasts[thread][thread] += 1;
    }

    /// What has happened for whoever waits for a thread's latest operation.
    pub(crate) fn past(&self, thread: usize) -> Past {
        self.pasts[thread]
    }

    /// A thread goes on after `past`.
    pub(crate) fn join(&mut self, thread: usize, past: &Past) {
        for (known, other) in self.pasts[thread].iter_mut().zip(past) {
            *known = (*known).max(*other);
        }
    }

    /// A thread's present operation reads.
    pub(crate) fn read(&self, thread: usize, uses: &mut Uses) -> Result<(), Race> {
        self.check_write(thread, "reads", uses)?;
        uses.reads[thread] = self.pasts[thread][thread];
        Ok(())
    }

    /// A thread's present operation writes.
    pub(crate) fn write(&self, thread: usize, uses: &mut Uses) -> Result<(), Race> {
        self.check_write(thread, "writes", uses)?;
        let past = &self.pasts[thread];
        if let Some(reader) = (0..NUM_THREADS).find(|&other| uses.reads[other] > past[other]) {
            return Err(Race {
                thread: NAMES[thread],
                does: "writes",
                other: NAMES[reader],
                other_does: "reads",
            });
        }
        *uses = Uses { write: (thread, past[thread]), reads: Past::default() };
        Ok(())
    }

    fn check_write(&self, thread: usize, does: &'static str, uses: &Uses) -> Result<(), Race> {
        let (writer, operation) = uses.write;
        if self.pasts[thread][writer] >= operation {
            return Ok(());
        }
        let (thread, other) = (NAMES[thread], NAMES[writer]);
        Err(Race { thread, does, other, other_does: "writes" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H2D: usize = 1;
    const COMPUTE: usize = 2;
    const D2H: usize = 3;

    #[test]
    fn uses_are_ordered_by_events_and_by_nothing_else() {
        let mut order = Order::default();
        let mut memory = Uses::default();
        order.begin(H2D);
        assert_eq!(order.write(H2D, &mut memory), Ok(()));
        let done = order.past(H2D);
        order.begin(COMPUTE);
        let race = order.read(COMPUTE, &mut memory).unwrap_err();
        assert_eq!((race.thread, race.does, race.other), ("compute", "reads", "h2d"));
        order.join(COMPUTE, &done);
        assert_eq!(order.read(COMPUTE, &mut memory), Ok(()));
        // The next copy must wait for the reader.
        order.begin(H2D);
        let race = order.write(H2D, &mut memory).unwrap_err();
        assert_eq!((race.other, race.other_does), ("compute", "reads"));
        let past = order.past(COMPUTE);
        order.join(H2D, &past);
        assert_eq!(order.write(H2D, &mut memory), Ok(()));
    }

    #[test]
    fn waits_carry_over() {
        let mut order = Order::default();
        let mut memory = Uses::default();
        order.begin(COMPUTE);
        assert_eq!(order.write(COMPUTE, &mut memory), Ok(()));
        let computed = order.past(COMPUTE);
        order.join(D2H, &computed);
        order.begin(D2H);
        let copied = order.past(D2H);
        assert!(order.read(HOST, &mut memory).is_err());
        order.join(HOST, &copied);
        assert_eq!(order.read(HOST, &mut memory), Ok(()));
        // What the host enqueues comes after what it has seen.
        order.begin(H2D);
        assert_eq!(order.write(H2D, &mut memory), Ok(()));
    }
}
