//! What time it is for a device's host.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// Time since some moment. All copies tell the same time.
#[derive(Clone, Debug)]
pub struct Clock(Source);

#[derive(Clone, Debug)]
enum Source {
    /// Since this moment.
    Real(Instant),
    /// Nanoseconds, moved by whoever simulates.
    Virtual(Arc<AtomicU64>),
}

impl Clock {
    /// The machine's clock, from now on.
    pub fn real() -> Self {
        Self(Source::Real(Instant::now()))
    }

    /// A clock that stands still until it is set.
    pub fn of_virtual_time() -> Self {
        Self(Source::Virtual(Arc::default()))
    }

    /// The time. Two moments' difference means something, one alone does not.
    pub fn now(&self) -> Duration {
        match &self.0 {
            Source::Real(origin) => origin.elapsed(),
            Source::Virtual(nanos) => Duration::from_nanos(nanos.load(Ordering::Relaxed)),
        }
    }

    /// Sets a clock of virtual time; the machine's goes on as it does.
    pub fn set(&self, now: Duration) {
        if let Source::Virtual(nanos) = &self.0 {
            nanos.store(u64::try_from(now.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtual_time_stands_still_until_it_is_set() {
        let clock = Clock::of_virtual_time();
        let copy = clock.clone();
        assert_eq!(clock.now(), Duration::ZERO);
        copy.set(Duration::from_micros(7));
        assert_eq!(clock.now(), Duration::from_micros(7));
        let real = Clock::real();
        real.set(Duration::from_secs(1 << 40));
        assert!(real.now() < Duration::from_secs(1 << 30));
    }
}
