//! What a simulated load gives.

use std::fmt;
use std::sync::atomic::Ordering;
use std::time::Duration;

use inflight_engine::EngineStats;
use serde::Serialize;

use super::simulate::Served;
use super::workload::Arrival;

/// Figures of one GPU under a load.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct PlanReport {
    pub num_requests: usize,
    /// From the first arrival to the last token.
    pub wall_s: f64,
    pub requests_per_s: f64,
    pub input_tokens_per_s: f64,
    pub output_tokens_per_s: f64,
    /// From arrival to first token.
    pub ttft_ms: Percentiles,
    /// Between two tokens of a request.
    pub itl_ms: Percentiles,
    /// From arrival to last token.
    pub e2e_ms: Percentiles,
    /// Share of the time in which the device had something to run.
    pub device_busy: f64,
    pub num_steps: u64,
    pub num_preemptions: u64,
    /// Those of them that were moved to the host.
    pub num_swaps: u64,
}

/// Of all values, how much at most the lower part of them is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Percentiles {
    pub mean: f64,
    pub p50: f64,
    pub p95: f64,
    pub p99: f64,
    pub max: f64,
}

impl Percentiles {
    /// Of these values; zeros if there are none.
    #[must_use]
    pub fn of(mut values: Vec<f64>) -> Self {
        values.sort_unstable_by(f64::total_cmp);
        let Some(&max) = values.last() else { return Self::default() };
        let at = |part: f64| {
            let rank = (values.len() as f64 * part).ceil() as usize;
            values[rank.clamp(1, values.len()) - 1]
        };
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        Self { mean, p50: at(0.5), p95: at(0.95), p99: at(0.99), max }
    }
}

impl PlanReport {
    pub(super) fn new(
        arrivals: &[Arrival],
        served: &[Served],
        busy: Duration,
        stats: &EngineStats,
    ) -> Self {
        let ends = served.iter().filter_map(|request| request.tokens_s.last());
        let end_s = ends.copied().fold(0.0, f64::max);
        let start_s = arrivals.first().map_or(0.0, |first| first.at_s);
        let wall_s = (end_s - start_s).max(1e-9);
        let (mut ttft, mut itl, mut e2e) = (Vec::new(), Vec::new(), Vec::new());
        for Served { at_s, tokens_s } in served {
            ttft.extend(tokens_s.first().map(|first| 1e3 * (first - at_s)));
            e2e.extend(tokens_s.last().map(|last| 1e3 * (last - at_s)));
            itl.extend(tokens_s.windows(2).map(|pair| 1e3 * (pair[1] - pair[0])));
        }
        let sum = |of: fn(&Arrival) -> usize| arrivals.iter().map(of).sum::<usize>() as f64;
        Self {
            num_requests: served.len(),
            wall_s,
            requests_per_s: served.len() as f64 / wall_s,
            input_tokens_per_s: sum(|a| a.prompt_len) / wall_s,
            output_tokens_per_s: sum(|a| a.output_len) / wall_s,
            ttft_ms: Percentiles::of(ttft),
            itl_ms: Percentiles::of(itl),
            e2e_ms: Percentiles::of(e2e),
            device_busy: busy.as_secs_f64() / wall_s,
            num_steps: stats.num_steps.load(Ordering::Relaxed),
            num_preemptions: stats.num_preemptions.load(Ordering::Relaxed),
            num_swaps: stats.num_swaps.load(Ordering::Relaxed),
        }
    }
}

impl fmt::Display for PlanReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |f: &mut fmt::Formatter<'_>, name: &str, p: &Percentiles| {
            let Percentiles { mean, p50, p95, p99, max } = *p;
            writeln!(f, "{name:<22}{mean:>10.1}{p50:>10.1}{p95:>10.1}{p99:>10.1}{max:>10.1}")
        };
        let (requests, wall) = (self.num_requests, self.wall_s);
        writeln!(f, "{requests} requests in {wall:.2} s, {:.2} a second", self.requests_per_s)?;
        writeln!(
            f,
            "tokens a second        {:.0} in, {:.0} out",
            self.input_tokens_per_s, self.output_tokens_per_s
        )?;
        writeln!(
            f,
            "{:<22}{:>10}{:>10}{:>10}{:>10}{:>10}",
            "ms", "mean", "p50", "p95", "p99", "max"
        )?;
        row(f, "time to first token", &self.ttft_ms)?;
        row(f, "time between tokens", &self.itl_ms)?;
        row(f, "whole request", &self.e2e_ms)?;
        writeln!(f, "device busy            {:.1} %", 100.0 * self.device_busy)?;
        let (preemptions, swaps) = (self.num_preemptions, self.num_swaps);
        writeln!(f, "gave way               {preemptions} times, {swaps} of them to the host")
    }
}

#[cfg(test)]
mod tests {
    use super::Percentiles;

    #[test]
    fn percentiles_are_ranks() {
        let of = Percentiles::of((1..=200).rev().map(f64::from).collect());
        assert_eq!((of.p50, of.p95, of.p99, of.max), (100.0, 190.0, 198.0, 200.0));
        assert_eq!(of.mean, 100.5);
        assert_eq!(Percentiles::of(Vec::new()), Percentiles::default());
        assert_eq!(Percentiles::of(vec![3.0]).p99, 3.0);
    }
}
