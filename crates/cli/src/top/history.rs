//! What a server has told so far.

use std::collections::VecDeque;
use std::fmt::Write;
use std::time::Duration;

use inflight_observe::Cause;

use super::sample::{LATENCIES, Rates, Sample, Totals};
use super::strip::Strip;

/// Over how long rates are told. Steps are counted when they end, and some 50 ms later: over much
/// less the busy part would jump about.
const RATES_OVER: Duration = Duration::from_secs(5);
/// Over how long latencies are told.
const LATENCIES_OVER: Duration = Duration::from_secs(60);
/// Most of what is remembered: as many as the widest screens have columns, and a minute of samples
/// that come every 50 ms.
const MAX_KEPT: usize = 1200;

/// The samples so far.
pub(super) struct History {
    pub(super) address: String,
    pub(super) latest: Sample,
    /// Oldest first, the latest too.
    totals: VecDeque<Totals>,
    /// Of each interval by itself, oldest first.
    pub(super) curve: VecDeque<Rates>,
    pub(super) strip: Strip,
    /// Why the server did not answer the last time.
    pub(super) error: Option<String>,
}

impl History {
    pub(super) fn new(address: String, first: Sample) -> Self {
        let mut strip = Strip::default();
        strip.push(&first.batch);
        let totals = VecDeque::from([first.totals.clone()]);
        Self { address, latest: first, totals, curve: VecDeque::new(), strip, error: None }
    }

    pub(super) fn push(&mut self, sample: Sample) {
        if self.curve.len() == MAX_KEPT {
            self.curve.pop_front();
            self.totals.pop_front();
        }
        self.curve.push_back(sample.rates_since(&self.latest.totals));
        self.totals.push_back(sample.totals.clone());
        self.strip.push(&sample.batch);
        (self.latest, self.error) = (sample, None);
    }

    /// Over the last seconds.
    pub(super) fn rates(&self) -> Rates {
        self.latest.rates_since(self.before(RATES_OVER))
    }

    /// Milliseconds by percentile, and over how long they were measured.
    pub(super) fn latencies(&self) -> ([[Option<f64>; 3]; LATENCIES.len()], Duration) {
        let before = self.before(LATENCIES_OVER);
        let over = self.latest.totals.at.saturating_duration_since(before.at);
        (self.latest.latencies_since(before), over)
    }

    /// The youngest totals that are `age` old, or the oldest.
    fn before(&self, age: Duration) -> &Totals {
        let is_old = |totals: &&Totals| self.latest.totals.at - totals.at >= age;
        let oldest =
            self.totals.front().expect("it begins with one, and a new one takes its place");
        self.totals.iter().rev().find(is_old).unwrap_or(oldest)
    }

    /// All in a few lines, for files and scripts.
    pub(super) fn text(&self) -> String {
        let (rates, (latencies, _)) = (self.rates(), self.latencies());
        let Sample { model, num_running, num_waiting, .. } = &self.latest;
        let mut text = format!(
            "{model} at {}, over {:.1} s\n\
             device busy {:.1} %\n\
             {:.0} tokens/s generated, {:.0} computed in {:.1} steps/s\n\
             {num_running} running, {num_waiting} waiting, KV cache {:.1} %\n",
            self.address,
            rates.over.as_secs_f64(),
            100.0 * rates.busy,
            rates.generated,
            rates.computed,
            rates.steps,
            100.0 * self.latest.cache_usage()
        );
        for (cause, part) in &rates.idle {
            // Writing to a string does not fail.
            let _ = writeln!(text, "device idle {:.2} %: {}", 100.0 * part, shown(cause));
        }
        for ((name, _), ms) in LATENCIES.iter().zip(latencies) {
            if let [Some(p50), Some(p90), Some(p99)] = ms {
                let _ = writeln!(text, "{name}: p50 {p50:.1}, p90 {p90:.1}, p99 {p99:.1} ms");
            }
        }
        text
    }
}

/// A cause as people have it; a server of another version may have others.
pub(super) fn shown(label: &str) -> String {
    let known = Cause::ALL.into_iter().find(|cause| cause.label() == label);
    known.map_or_else(|| label.replace('_', " "), |cause| cause.name().to_owned())
}
