//! Latencies counted in buckets, as Prometheus has them.

use std::{
    borrow::Cow,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// Durations counted by upper bounds. Many threads may add at once.
#[derive(Debug)]
pub struct Histogram {
    /// In seconds, ascending.
    bounds: &'static [f64],
    /// One for each bound, and one for what is beyond the last.
    counts: Box<[AtomicU64]>,
    /// In nanoseconds, or of numbers.
    sum: AtomicU64,
    /// The sum's units in one of the bounds'.
    per_unit: f64,
}

/// A histogram at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct HistogramSnapshot {
    /// In seconds, ascending.
    pub bounds: Cow<'static, [f64]>,
    /// Durations in each bucket, the last of which has no bound.
    pub counts: Vec<u64>,
    /// Of all durations, in seconds, or of all numbers.
    pub sum_s: f64,
}

impl Histogram {
    /// Empty.
    ///
    /// # Panics
    /// If `bounds` do not ascend.
    pub fn new(bounds: &'static [f64]) -> Self {
        assert!(bounds.is_sorted_by(|a, b| a < b), "bounds ascend");
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds, counts, sum: AtomicU64::new(0), per_unit: 1e9 }
    }

    /// Empty, of numbers instead of durations.
    ///
    /// # Panics
    /// If `bounds` do not ascend.
    pub fn of_numbers(bounds: &'static [f64]) -> Self {
        Self { per_unit: 1.0, ..Self::new(bounds) }
    }

    /// Counts one duration.
    pub fn add(&self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        let bucket = self.bounds.partition_point(|bound| *bound < seconds);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        let ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.sum.fetch_add(ns, Ordering::Relaxed);
    }

    /// Counts one number of a histogram of numbers.
    pub fn add_number(&self, number: usize) {
        let bucket = self.bounds.partition_point(|bound| *bound < number as f64);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(number as u64, Ordering::Relaxed);
    }

    /// What was counted so far.
    pub fn snapshot(&self) -> HistogramSnapshot {
        HistogramSnapshot {
            bounds: Cow::Borrowed(self.bounds),
            counts: self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect(),
            sum_s: self.sum.load(Ordering::Relaxed) as f64 / self.per_unit,
        }
    }
}

impl HistogramSnapshot {
    /// All durations.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Durations at or below each bound.
    pub fn cumulative(&self) -> impl Iterator<Item = (f64, u64)> {
        let totals = self.counts.iter().scan(0, |total, count| {
            *total += count;
            Some(*total)
        });
        self.bounds.iter().copied().zip(totals)
    }

    /// The duration in seconds below which a fraction `q` of all lies, straight between bounds as
    /// Prometheus' `histogram_quantile` has it; `None` if nothing was counted.
    pub fn quantile(&self, q: f64) -> Option<f64> {
        let rank = q * self.count() as f64;
        let last = *self.bounds.last()?;
        let (mut below, mut low) = (0.0, 0.0);
        for (bound, count) in self.bounds.iter().zip(&self.counts) {
            let count = *count as f64;
            if count > 0.0 && below + count >= rank {
                return Some(low + (bound - low) * ((rank - below) / count).max(0.0));
            }
            (below, low) = (below + count, *bound);
        }
        (self.count() > 0).then_some(last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_straight_between_bounds() {
        let histogram = Histogram::new(&[0.1, 0.2, 0.4]);
        assert_eq!(histogram.snapshot().quantile(0.5), None);
        for ms in [50, 100, 150, 150, 300, 900] {
            histogram.add(Duration::from_millis(ms));
        }
        let snapshot = histogram.snapshot();
        assert_eq!(snapshot.counts, [2, 2, 1, 1]);
        assert_eq!(snapshot.cumulative().collect::<Vec<_>>(), [(0.1, 2), (0.2, 4), (0.4, 5)]);
        assert!((snapshot.sum_s - 1.65).abs() < 1e-9);
        // Rank 3 of 6 is half-way through the second bucket.
        assert!((snapshot.quantile(0.5).unwrap() - 0.15).abs() < 1e-9);
        assert_eq!(snapshot.quantile(1.0), Some(0.4), "what is beyond has no bound of its own");
    }
}
