//! How much a key has used of what it may.

use std::time::{Duration, Instant};

use super::keys::KeyLimits;

const MINUTE: Duration = Duration::from_secs(60);

/// A budget that fills up steadily, to a minute's worth at most.
///
/// # Source
/// Token buckets: Tanenbaum, "Computer Networks", section 5.4.
#[derive(Debug)]
struct Bucket {
    per_minute: f64,
    /// Below zero: overdrawn.
    level: f64,
    filled: Instant,
}

impl Bucket {
    fn new(per_minute: u32, now: Instant) -> Self {
        let per_minute = f64::from(per_minute);
        Self { per_minute, level: per_minute, filled: now }
    }

    fn fill(&mut self, now: Instant) {
        let minutes = now.saturating_duration_since(self.filled).div_duration_f64(MINUTE);
        self.level = (self.level + minutes * self.per_minute).min(self.per_minute);
        self.filled = self.filled.max(now);
    }

    /// Time until it holds one again; zero if it does.
    fn wait(&self) -> Duration {
        let missing = (1.0 - self.level).max(0.0);
        MINUTE.mul_f64((missing / self.per_minute).min(1e6))
    }

    fn left(&self) -> Left {
        Left { limit: self.per_minute as u64, remaining: self.level.max(0.0) as u64 }
    }
}

/// What of a limit is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Left {
    pub(crate) limit: u64,
    pub(crate) remaining: u64,
}

/// A limit that does not let a request in now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exceeded {
    /// So many requests a minute; in how long the next may come.
    Requests(u64, Duration),
    /// So many tokens a minute; in how long the next may come.
    Tokens(u64, Duration),
    /// So many requests at once.
    Concurrent(u64),
}

/// The budgets of one key.
#[derive(Debug)]
pub(super) struct Meter {
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
    max_concurrent: Option<u32>,
    num_running: u32,
}

impl Meter {
    pub(super) fn new(limits: KeyLimits, now: Instant) -> Self {
        let bucket = |limit: Option<std::num::NonZeroU32>| Some(Bucket::new(limit?.get(), now));
        Self {
            requests: bucket(limits.requests_per_minute),
            tokens: bucket(limits.tokens_per_minute),
            max_concurrent: limits.max_concurrent.map(std::num::NonZeroU32::get),
            num_running: 0,
        }
    }

    /// Counts a request that begins.
    ///
    /// # Errors
    /// The limit that it would go over; then nothing is counted.
    pub(super) fn begin(&mut self, now: Instant) -> Result<(), Exceeded> {
        self.fill(now);
        if let Some(max) = self.max_concurrent.filter(|max| self.num_running >= *max) {
            return Err(Exceeded::Concurrent(u64::from(max)));
        }
        if let Some(tokens) = self.tokens.as_ref().filter(|bucket| bucket.level < 1.0) {
            return Err(Exceeded::Tokens(tokens.left().limit, tokens.wait()));
        }
        if let Some(requests) = &mut self.requests {
            if requests.level < 1.0 {
                return Err(Exceeded::Requests(requests.left().limit, requests.wait()));
            }
            requests.level -= 1.0;
        }
        self.num_running += 1;
        Ok(())
    }

    /// Counts a request that has ended.
    pub(super) fn end(&mut self) {
        self.num_running -= 1;
    }

    /// Takes tokens, also more than there are.
    pub(super) fn spend(&mut self, num_tokens: usize) {
        if let Some(tokens) = &mut self.tokens {
            tokens.level -= num_tokens as f64;
        }
    }

    pub(super) fn num_running(&self) -> u32 {
        self.num_running
    }

    /// What is left of requests and of tokens, where they are limited.
    pub(super) fn left(&mut self, now: Instant) -> [Option<Left>; 2] {
        self.fill(now);
        [self.requests.as_ref().map(Bucket::left), self.tokens.as_ref().map(Bucket::left)]
    }

    fn fill(&mut self, now: Instant) {
        self.requests.iter_mut().chain(&mut self.tokens).for_each(|bucket| bucket.fill(now));
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    fn meter(limits: KeyLimits) -> (Meter, impl Fn(u64) -> Instant) {
        let start = Instant::now();
        (Meter::new(limits, start), move |seconds| start + Duration::from_secs(seconds))
    }

    #[test]
    fn requests_come_back_with_time() {
        let limits = KeyLimits { requests_per_minute: NonZeroU32::new(2), ..KeyLimits::default() };
        let (mut meter, at) = meter(limits);
        assert_eq!((meter.begin(at(0)), meter.begin(at(0))), (Ok(()), Ok(())));
        let half_a_minute = Duration::from_secs(30);
        assert_eq!(meter.begin(at(0)), Err(Exceeded::Requests(2, half_a_minute)));
        assert_eq!(
            meter.begin(at(20)),
            Err(Exceeded::Requests(2, half_a_minute - at(20).duration_since(at(0))))
        );
        assert_eq!(meter.begin(at(30)), Ok(()));
        assert!(meter.begin(at(30)).is_err());
        let left = meter.left(at(3600));
        assert_eq!(left, [Some(Left { limit: 2, remaining: 2 }), None], "no more is saved up");
    }

    #[test]
    fn tokens_that_were_overdrawn_are_waited_for() {
        let limits = KeyLimits { tokens_per_minute: NonZeroU32::new(60), ..KeyLimits::default() };
        let (mut meter, at) = meter(limits);
        meter.begin(at(0)).unwrap();
        meter.spend(80);
        assert_eq!(meter.left(at(0)), [None, Some(Left { limit: 60, remaining: 0 })]);
        // One token a second: 20 that are owed, and one to go on.
        assert_eq!(meter.begin(at(0)), Err(Exceeded::Tokens(60, Duration::from_secs(21))));
        assert_eq!(meter.begin(at(21)), Ok(()));
    }

    #[test]
    fn requests_at_once() {
        let limits = KeyLimits {
            max_concurrent: NonZeroU32::new(1),
            requests_per_minute: NonZeroU32::new(2),
            ..KeyLimits::default()
        };
        let (mut meter, at) = meter(limits);
        meter.begin(at(0)).unwrap();
        assert_eq!(meter.begin(at(0)), Err(Exceeded::Concurrent(1)));
        meter.end();
        assert_eq!(meter.begin(at(0)), Ok(()), "the refused one was not counted");
    }
}
