//! A run's figures, for people and as JSON.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use inflight_engine::{Span, StepRecord};
use inflight_observe::{Bubbles, Cause};
use serde::Serialize;

use crate::OfflineRun;

/// How the device-busy fraction is computed.
pub const DEVICE_BUSY_DEFINITION: &str = "\
union of the batches' compute intervals, each from an event on the compute stream before the \
batch's first operation to one after its last, divided by the time from the first interval's \
start to the last one's end; what a batch waited inside for a grammar is left out";

/// What counts as waiting for the device.
pub const WAITS_DEFINITION: &str = "\
steps before whose launch the host had begun to wait for the step before: 0 with overlap, all but \
the first without";

/// Figures of one run. Times are in the unit that their names end with.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Whether the host planned ahead.
    pub overlap: bool,
    /// From the engine's seeing all requests to the last one's end.
    pub wall_s: f64,
    /// Tokens of all prompts.
    pub num_input_tokens: usize,
    /// Tokens generated.
    pub num_output_tokens: usize,
    /// Generated tokens a second.
    pub output_tokens_per_s: f64,
    /// Tokens of prompts and generated ones a second.
    pub total_tokens_per_s: f64,
    /// Steps, and those of them that computed prompts.
    pub num_steps: usize,
    /// Steps in which some row had more than one token.
    pub num_prefill_steps: usize,
    /// Steps whose records were lost: other figures leave them out.
    pub num_lost_steps: u64,
    /// See [`DEVICE_BUSY_DEFINITION`].
    pub device_busy_fraction: f64,
    /// From the first compute interval's start to the last one's end.
    pub device_span_s: f64,
    /// See [`WAITS_DEFINITION`].
    pub num_waits_before_launch: usize,
    /// Mean time a step of those that computed no prompt, from the end of the step before.
    pub decode_ms_per_step: f64,
    /// Tokens of prompts over the time of the steps that computed prompts, a second.
    pub prefill_tokens_per_s: f64,
    /// The steps in four parts.
    pub quarters: Vec<Quarter>,
    /// What the host did, in the order in which it does that.
    pub host: Vec<HostTime>,
    /// Time in which the device had nothing to run, by cause.
    pub bubbles_s: BTreeMap<Cause, f64>,
    /// FNV-1a of all tokens, request by request.
    pub tokens_checksum: String,
}

/// A quarter of the steps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Quarter {
    /// Steps.
    pub num_steps: usize,
    /// Time from the end of the step before the quarter to the end of its last, for each step.
    pub ms_per_step: f64,
    /// Median of the time from a step's compute end to the next one's.
    pub median_ms_per_step: f64,
}

/// One phase of the host's work in a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HostTime {
    /// Which.
    pub phase: &'static str,
    /// Half of the steps take no longer.
    pub median_us: f64,
    /// One step in a hundred takes longer.
    pub p99_us: f64,
}

impl Report {
    /// The figures of `run`, whose prompts had `num_input_tokens` together.
    pub fn new(run: &OfflineRun, overlap: bool, num_input_tokens: usize) -> Self {
        let steps = &run.steps;
        let num_output_tokens = run.tokens.iter().map(Vec::len).sum();
        let wall_s = run.wall.as_secs_f64();
        let per_s = |tokens: usize| tokens as f64 / wall_s.max(f64::MIN_POSITIVE);
        let (busy, span) = busy(steps);
        Self {
            overlap,
            wall_s,
            num_input_tokens,
            num_output_tokens,
            output_tokens_per_s: per_s(num_output_tokens),
            total_tokens_per_s: per_s(num_input_tokens + num_output_tokens),
            num_steps: steps.len(),
            num_prefill_steps: steps.iter().filter(|step| has_prompts(step)).count(),
            num_lost_steps: run.num_lost_steps,
            device_busy_fraction: busy.as_secs_f64() / span.as_secs_f64().max(f64::MIN_POSITIVE),
            device_span_s: span.as_secs_f64(),
            num_waits_before_launch: num_waits(steps),
            decode_ms_per_step: decode_ms_per_step(steps),
            prefill_tokens_per_s: num_input_tokens as f64 / prefill_s(steps).max(f64::MIN_POSITIVE),
            quarters: quarters(steps),
            host: host_times(steps),
            bubbles_s: bubbles(steps),
            tokens_checksum: format!("{:016x}", checksum(&run.tokens)),
        }
    }
}

/// Union of the compute intervals but for what the device waited inside them, and the time from the
/// first one's start to the last one's end.
fn busy(steps: &[StepRecord]) -> (Duration, Duration) {
    let mut spans: Vec<Span> = steps.iter().map(|step| step.compute).collect();
    spans.sort_by_key(|span| span.start);
    let Some(first) = spans.first().map(|span| span.start) else { return Default::default() };
    let (mut union, mut end) = (Duration::ZERO, first);
    for span in spans {
        union += span.end.saturating_sub(span.start.max(end));
        end = end.max(span.end);
    }
    let stalled: Duration = steps.iter().map(|s| s.stalled.end - s.stalled.start).sum();
    (union.saturating_sub(stalled), end - first)
}

fn num_waits(steps: &[StepRecord]) -> usize {
    steps.windows(2).filter(|pair| pair[0].blocked.start < pair[1].launch.start).count()
}

fn has_prompts(step: &StepRecord) -> bool {
    step.num_tokens > step.num_rows
}

/// Each step, and the time from the end of the one before.
fn paces(steps: &[StepRecord]) -> impl Iterator<Item = (&StepRecord, Duration)> {
    let mut before = steps.first().map_or(Duration::ZERO, |step| step.compute.start);
    steps.iter().map(move |step| {
        let pace = step.compute.end.saturating_sub(before);
        before = step.compute.end;
        (step, pace)
    })
}

/// 0 of none.
fn decode_ms_per_step(steps: &[StepRecord]) -> f64 {
    let paces = paces(steps).filter(|(step, _)| !has_prompts(step)).map(|(_, pace)| pace);
    let (sum, count) = paces.fold((Duration::ZERO, 0), |(sum, n), pace| (sum + pace, n + 1));
    sum.as_secs_f64() * 1e3 / f64::from(count.max(1))
}

fn prefill_s(steps: &[StepRecord]) -> f64 {
    let paces = paces(steps).filter(|(step, _)| has_prompts(step)).map(|(_, pace)| pace);
    paces.sum::<Duration>().as_secs_f64()
}

fn quarters(steps: &[StepRecord]) -> Vec<Quarter> {
    let paces: Vec<f64> = paces(steps).map(|(_, pace)| pace.as_secs_f64() * 1e3).collect();
    let quarter = |part: &[f64]| Quarter {
        num_steps: part.len(),
        ms_per_step: part.iter().sum::<f64>() / part.len() as f64,
        median_ms_per_step: quantile(part.to_vec(), 0.5),
    };
    paces.chunks(paces.len().div_ceil(4).max(1)).map(quarter).collect()
}

fn host_times(steps: &[StepRecord]) -> Vec<HostTime> {
    type Phase = (&'static str, fn(&StepRecord) -> Span);
    let phases: [Phase; 6] = [
        ("admit", |step| step.admit),
        ("plan", |step| step.plan),
        ("stage", |step| step.stage),
        ("launch", |step| step.launch),
        ("blocked", |step| step.blocked),
        ("collect", |step| step.collect),
    ];
    let time = |(phase, span): Phase| {
        let us = |step| {
            let Span { start, end } = span(step);
            end.saturating_sub(start).as_secs_f64() * 1e6
        };
        let all: Vec<f64> = steps.iter().map(us).collect();
        HostTime { phase, median_us: quantile(all.clone(), 0.5), p99_us: quantile(all, 0.99) }
    };
    phases.map(time).into()
}

fn bubbles(steps: &[StepRecord]) -> BTreeMap<Cause, f64> {
    let (mut finder, mut sums) = (Bubbles::default(), BTreeMap::new());
    for bubble in steps.iter().flat_map(|step| finder.of(step)) {
        let time = bubble.span.end - bubble.span.start;
        *sums.entry(bubble.cause).or_default() += time.as_secs_f64();
    }
    sums
}

/// The smallest value that the fraction `q` of `values` does not exceed; 0 of none.
fn quantile(mut values: Vec<f64>, q: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let rank = (q * values.len() as f64).ceil() as usize;
    values.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

fn checksum(tokens: &[Vec<u32>]) -> u64 {
    let bytes = tokens.iter().flatten().flat_map(|token| token.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let overlap = if self.overlap { "on" } else { "off" };
        writeln!(f, "overlap          {overlap}")?;
        writeln!(f, "wall             {:.3} s", self.wall_s)?;
        let (input, output) = (self.num_input_tokens, self.num_output_tokens);
        let (of_output, of_all) = (self.output_tokens_per_s, self.total_tokens_per_s);
        writeln!(f, "output           {output} tokens, {of_output:.1} tokens/s")?;
        writeln!(f, "with prompts     {} tokens, {of_all:.1} tokens/s", input + output)?;
        let (steps, prefill) = (self.num_steps, self.num_prefill_steps);
        writeln!(f, "steps            {steps}, {prefill} of them with prompts")?;
        if self.num_lost_steps > 0 {
            writeln!(f, "                 {} more that were not recorded", self.num_lost_steps)?;
        }
        let medians = self.quarters.iter().map(|q| format!("{:.3}", q.median_ms_per_step));
        let means = self.quarters.iter().map(|q| format!("{:.3}", q.ms_per_step));
        writeln!(f, "decode           {:.3} ms a step, mean", self.decode_ms_per_step)?;
        writeln!(f, "prefill          {:.1} tokens/s", self.prefill_tokens_per_s)?;
        writeln!(f, "ms a step        {} by quarter", means.collect::<Vec<_>>().join("  "))?;
        writeln!(f, "  median         {}", medians.collect::<Vec<_>>().join("  "))?;
        let (busy, span) = (self.device_busy_fraction * 100.0, self.device_span_s);
        writeln!(f, "device busy      {busy:.3} % of {span:.3} s")?;
        for (cause, time_s) in &self.bubbles_s {
            writeln!(f, "  bubbles        {:10.3} ms  {}", time_s * 1e3, cause.name())?;
        }
        for HostTime { phase, median_us, p99_us } in &self.host {
            writeln!(f, "host {phase:11} {median_us:10.1} µs median, {p99_us:10.1} µs p99")?;
        }
        let waits = self.num_waits_before_launch;
        writeln!(f, "host waited      before {waits} launches")?;
        write!(f, "tokens           checksum {}", self.tokens_checksum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(start: u64, end: u64) -> Span {
        Span { start: Duration::from_millis(start), end: Duration::from_millis(end) }
    }

    fn step(batch: u64, launch: Span, compute: Span, blocked: Span) -> StepRecord {
        let (num_rows, num_tokens) = (2, if batch == 1 { 8 } else { 2 });
        StepRecord { batch, num_rows, num_tokens, launch, compute, blocked, ..Default::default() }
    }

    /// Four steps of 10 ms with a gap of 10 ms, launched one ahead.
    fn run() -> OfflineRun {
        let steps = vec![
            step(1, ms(0, 1), ms(10, 20), ms(3, 20)),
            step(2, ms(2, 3), ms(20, 30), ms(22, 30)),
            step(3, ms(21, 22), ms(30, 40), ms(33, 40)),
            step(4, ms(35, 50), ms(50, 60), ms(50, 60)),
        ];
        let tokens = vec![vec![1, 2, 3, 4], vec![5, 6, 7, 8]];
        OfflineRun { wall: Duration::from_millis(80), tokens, steps, num_lost_steps: 0 }
    }

    #[test]
    fn figures() {
        let report = Report::new(&run(), true, 16);
        assert_eq!((report.num_input_tokens, report.num_output_tokens), (16, 8));
        assert_eq!((report.output_tokens_per_s, report.total_tokens_per_s), (100.0, 300.0));
        assert_eq!((report.num_steps, report.num_prefill_steps), (4, 1));
        assert!((report.device_busy_fraction - 0.8).abs() < 1e-12, "40 of 50 ms");
        assert!((report.device_span_s - 0.05).abs() < 1e-12);
        // Step 4 was launched at 35 ms, after the host had begun to wait for step 3.
        assert_eq!(report.num_waits_before_launch, 1);
        let paces: Vec<f64> = report.quarters.iter().map(|q| q.ms_per_step).collect();
        assert_eq!(paces, [10.0, 10.0, 10.0, 20.0]);
        // Steps 2 to 4 end 10, 10 and 20 ms after the one before; step 1 takes 10 for 16 tokens.
        assert!((report.decode_ms_per_step - 40.0 / 3.0).abs() < 1e-9);
        assert!((report.prefill_tokens_per_s - 1600.0).abs() < 1e-9);
        assert_eq!(report.bubbles_s, BTreeMap::from([(Cause::HostLaunches, 0.01)]));
        let launch = report.host.iter().find(|time| time.phase == "launch").unwrap();
        assert_eq!((launch.median_us, launch.p99_us), (1000.0, 15000.0));
    }

    #[test]
    fn intervals_that_overlap_count_once() {
        let none = ms(0, 0);
        let steps = [step(1, none, ms(0, 10), none), step(2, none, ms(5, 12), none)];
        assert_eq!(busy(&steps), (Duration::from_millis(12), Duration::from_millis(12)));
        assert_eq!(busy(&[]), (Duration::ZERO, Duration::ZERO));
    }

    #[test]
    fn quantiles() {
        let values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!((quantile(values.clone(), 0.5), quantile(values, 0.99)), (50.0, 99.0));
        assert_eq!(quantile(Vec::new(), 0.5), 0.0);
    }

    /// FNV-1a of the bytes `foobar` is 85944171f73967e8; of nothing, its offset.
    #[test]
    fn checksums_are_fnv_1a() {
        assert_eq!(checksum(&[]), 0xcbf2_9ce4_8422_2325);
        let of_bytes = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes);
        let tokens = vec![vec![of_bytes(b"foob")], vec![of_bytes(b"arxx")]];
        assert_eq!(checksum(&tokens), checksum(&[tokens.concat()]));
        assert_ne!(checksum(&tokens), checksum(&[vec![tokens[1][0], tokens[0][0]]]));
    }
}
