//! How long sequences take, for telling refused clients when to come back.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Weight of the newest sequence in the average.
const NEWEST: f64 = 0.1;
/// Nobody is sent away for longer.
const MAX_RETRY_AFTER_S: u64 = 60;

/// The average duration of sequences, newer ones weighing more.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    mean_s: Mutex<Option<f64>>,
}

impl Pace {
    /// Counts a sequence that has ended.
    pub(crate) fn record(&self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        let mut mean = self.mean_s.lock().unwrap_or_else(PoisonError::into_inner);
        *mean = Some(mean.map_or(seconds, |mean| mean + NEWEST * (seconds - mean)));
    }

    /// Seconds until a place in the queue gets free: of `num_running` sequences that last
    /// `mean` seconds, one ends every `mean / num_running` seconds. At least 1.
    pub(crate) fn retry_after_s(&self, num_running: usize) -> u64 {
        let mean = *self.mean_s.lock().unwrap_or_else(PoisonError::into_inner);
        let wait_s = mean.unwrap_or(0.0) / num_running.max(1) as f64;
        (wait_s.ceil() as u64).clamp(1, MAX_RETRY_AFTER_S)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_for_the_next_sequence_to_end() {
        let pace = Pace::default();
        assert_eq!(pace.retry_after_s(8), 1, "nothing is known yet");
        pace.record(Duration::from_secs(40));
        assert_eq!(pace.retry_after_s(8), 5);
        assert_eq!(pace.retry_after_s(0), 40);
        pace.record(Duration::from_secs(140));
        assert_eq!(pace.retry_after_s(1), 50, "40 + (140 - 40) / 10");
        pace.record(Duration::from_secs(10_000));
        assert_eq!(pace.retry_after_s(1), 60);
    }
}
