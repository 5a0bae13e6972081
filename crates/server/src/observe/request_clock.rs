//! One sequence's times, from its being accepted to its end.

use std::sync::{Arc, OnceLock, atomic::Ordering};
use std::time::Instant;

use super::metrics::{Ending, Metrics};

/// Counts a sequence's tokens and times into the metrics; dropped before its end was told, the
/// sequence counts as aborted.
///
/// ```text
/// accepted      started          first token                     end
///    |-- queue ----|--- prefill ------|-------- decode -----------|
///    |------ time to first token -----|-|-|-|  inter-token        |
/// ```
pub(crate) struct RequestClock {
    metrics: Arc<Metrics>,
    accepted: Instant,
    started: Arc<OnceLock<Instant>>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    has_ended: bool,
}

impl RequestClock {
    /// A sequence is accepted now.
    pub(crate) fn accept(metrics: &Arc<Metrics>, prompt_len: usize) -> Self {
        metrics.prompt_tokens.fetch_add(prompt_len as u64, Ordering::Relaxed);
        Self {
            metrics: Arc::clone(metrics),
            accepted: Instant::now(),
            started: Arc::default(),
            first_token: None,
            last_token: None,
            has_ended: false,
        }
    }

    /// Where the engine's thread notes when the sequence gets its first row.
    pub(crate) fn start_mark(&self) -> Arc<OnceLock<Instant>> {
        Arc::clone(&self.started)
    }

    /// Time since the sequence was accepted.
    pub(crate) fn elapsed(&self) -> std::time::Duration {
        self.accepted.elapsed()
    }

    /// A token came.
    pub(crate) fn token(&mut self) {
        let (now, metrics) = (Instant::now(), &self.metrics);
        metrics.generated_tokens.fetch_add(1, Ordering::Relaxed);
        match self.last_token.replace(now) {
            Some(last) => metrics.inter_token.add(now - last),
            None => {
                metrics.first_token.add(now - self.accepted);
                self.first_token = Some(now);
            }
        }
    }

    /// The sequence has ended.
    pub(crate) fn end(&mut self, ending: Ending) {
        if std::mem::replace(&mut self.has_ended, true) {
            return;
        }
        let (now, metrics) = (Instant::now(), &self.metrics);
        metrics.count_end(ending);
        metrics.end_to_end.add(now - self.accepted);
        let Some(started) = self.started.get() else { return };
        metrics.queue.add(started.saturating_duration_since(self.accepted));
        if let (Some(first), Some(last)) = (self.first_token, self.last_token) {
            metrics.prefill.add(first.saturating_duration_since(*started));
            metrics.decode.add(last - first);
        }
    }
}

impl Drop for RequestClock {
    fn drop(&mut self) {
        self.end(Ending::Abort);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_sequence_is_counted_once_with_its_tokens() {
        let metrics = Arc::new(Metrics::default());
        let mut clock = RequestClock::accept(&metrics, 7);
        clock.start_mark().set(Instant::now()).unwrap();
        (0..3).for_each(|_| clock.token());
        clock.end(Ending::Length);
        drop(clock);
        drop(RequestClock::accept(&metrics, 2));
        assert_eq!(metrics.prompt_tokens.load(Ordering::Relaxed), 9);
        assert_eq!(metrics.generated_tokens.load(Ordering::Relaxed), 3);
        let ended = Ending::ALL.map(|(ending, _)| metrics.num_ended(ending));
        assert_eq!(ended, [0, 1, 1, 0]);
        let counts = [&metrics.first_token, &metrics.inter_token, &metrics.end_to_end]
            .map(|histogram| histogram.snapshot().count());
        assert_eq!(counts, [1, 2, 2]);
        let counts = [&metrics.queue, &metrics.prefill, &metrics.decode]
            .map(|histogram| histogram.snapshot().count());
        assert_eq!(counts, [1, 1, 1], "the aborted one never started");
    }
}
