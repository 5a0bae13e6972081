//! One sequence's times, from its being accepted to its end.

use std::sync::{Arc, OnceLock, atomic::Ordering};
use std::time::Instant;

use inflight_engine::RequestId;

use super::metrics::{Ending, Metrics};
use super::request_log::{SequenceEntry, SequenceNote};

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
    prompt_len: usize,
    accepted: Instant,
    started: Arc<OnceLock<Instant>>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    num_cached_tokens: usize,
    num_tokens: usize,
    has_ended: bool,
    /// Where the log of requests has it; `None`: no handler asked for it.
    note: Option<SequenceNote>,
}

impl RequestClock {
    /// A sequence is accepted now.
    pub(crate) fn accept(metrics: &Arc<Metrics>, prompt_len: usize) -> Self {
        metrics.prompt_tokens.fetch_add(prompt_len as u64, Ordering::Relaxed);
        let mut clock = Self {
            metrics: Arc::clone(metrics),
            prompt_len,
            accepted: Instant::now(),
            started: Arc::default(),
            first_token: None,
            last_token: None,
            num_cached_tokens: 0,
            num_tokens: 0,
            has_ended: false,
            note: None,
        };
        clock.note = metrics.requests.begin(clock.entry(None));
        clock
    }

    /// The engine calls the sequence `id`.
    pub(crate) fn submitted_as(&self, id: RequestId) {
        self.note.iter().for_each(|note| note.submitted_as(id));
    }

    fn entry(&self, ended: Option<(Instant, Ending)>) -> SequenceEntry {
        SequenceEntry {
            engine_id: None,
            prompt_len: self.prompt_len,
            num_cached_tokens: self.num_cached_tokens,
            num_tokens: self.num_tokens,
            accepted: self.accepted,
            started: self.started.get().copied(),
            first_token: self.first_token,
            last_token: self.last_token,
            ended,
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

    /// A token came; so many of the prompt's were found in the prefix cache.
    pub(crate) fn token(&mut self, num_cached_tokens: usize) {
        let (now, metrics) = (Instant::now(), &self.metrics);
        self.num_tokens += 1;
        metrics.generated_tokens.fetch_add(1, Ordering::Relaxed);
        match self.last_token.replace(now) {
            Some(last) => metrics.inter_token.add(now - last),
            None => {
                metrics.first_token.add(now - self.accepted);
                let (queries, hits) = (self.prompt_len as u64, num_cached_tokens as u64);
                metrics.prefix_queries.fetch_add(queries, Ordering::Relaxed);
                metrics.prefix_hits.fetch_add(hits, Ordering::Relaxed);
                self.num_cached_tokens = num_cached_tokens;
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
        metrics.prompt_len.add_number(self.prompt_len);
        metrics.output_len.add_number(self.num_tokens);
        if let Some(note) = &self.note {
            metrics.requests.end(note, self.entry(Some((now, ending))));
        }
        let Some(started) = self.started.get() else { return };
        metrics.queue.add(started.saturating_duration_since(self.accepted));
        if let (Some(first), Some(last)) = (self.first_token, self.last_token) {
            metrics.prefill.add(first.saturating_duration_since(*started));
            metrics.decode.add(last - first);
            metrics.inference.add(last.saturating_duration_since(*started));
            let num_gaps = u32::try_from(self.num_tokens - 1).unwrap_or(u32::MAX);
            (last - first)
                .checked_div(num_gaps)
                .iter()
                .for_each(|t| metrics.time_per_token.add(*t));
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
        (0..3).for_each(|_| clock.token(4));
        clock.end(Ending::Length);
        drop(clock);
        drop(RequestClock::accept(&metrics, 2));
        assert_eq!(metrics.prompt_tokens.load(Ordering::Relaxed), 9);
        assert_eq!(metrics.generated_tokens.load(Ordering::Relaxed), 3);
        let ended = Ending::ALL.map(|(ending, _)| metrics.num_ended(ending));
        assert_eq!(ended, [0, 1, 1, 0]);
        let cache = [&metrics.prefix_queries, &metrics.prefix_hits];
        assert_eq!(cache.map(|count| count.load(Ordering::Relaxed)), [7, 4]);
        let lens = [&metrics.prompt_len, &metrics.output_len].map(|len| len.snapshot().sum_s);
        assert_eq!(lens, [9.0, 3.0]);
        let counts = [&metrics.first_token, &metrics.inter_token, &metrics.end_to_end]
            .map(|histogram| histogram.snapshot().count());
        assert_eq!(counts, [1, 2, 2]);
        let counts = [&metrics.queue, &metrics.prefill, &metrics.decode]
            .map(|histogram| histogram.snapshot().count());
        assert_eq!(counts, [1, 1, 1], "the aborted one never started");
    }
}
