//! Timelines that were written before, as steps again.

use std::collections::BTreeMap;
use std::time::Duration;

use inflight_engine::{LaunchKind, Span, StepRecord};
use serde::Deserialize;

use crate::Cause;
use crate::timeline::launch_label;

/// Most of a file's steps; a page cannot show more, nor can memory hold any number.
const MAX_STEPS: usize = 1 << 20;

const LAUNCHES: [LaunchKind; 4] =
    [LaunchKind::NoGraphs, LaunchKind::Graph, LaunchKind::CapturedGraph, LaunchKind::WithoutGraph];

/// One event of the file; others have other fields, which do not matter.
#[derive(Deserialize)]
struct Event {
    cat: Option<String>,
    ts: Option<f64>,
    dur: Option<f64>,
    args: Option<Arguments>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Arguments {
    batch: Option<u64>,
    rows: usize,
    tokens: usize,
    sampled: usize,
    launched_as: Option<String>,
    allocated: bool,
    /// Of bubbles.
    before_batch: Option<u64>,
    cause: Option<String>,
}

/// The steps of a timeline that a [`TimelineWriter`](crate::TimelineWriter) has written, in order.
///
/// # Errors
/// What is wrong with the file.
pub fn read_timeline(text: &[u8]) -> Result<Vec<StepRecord>, String> {
    let events: Vec<Event> =
        serde_json::from_slice(text).map_err(|error| format!("is no timeline: {error}"))?;
    let mut steps: BTreeMap<u64, StepRecord> = BTreeMap::new();
    for event in events {
        let (Some(phase), Some(args)) = (event.cat, event.args) else { continue };
        let batch = args.batch.or(args.before_batch);
        let (Some(batch), Some(ts), Some(dur)) = (batch, event.ts, event.dur) else { continue };
        if steps.len() >= MAX_STEPS {
            return Err(format!("has more than {MAX_STEPS} steps"));
        }
        let step = steps.entry(batch).or_default();
        let span = Span { start: micros(ts)?, end: micros(ts + dur)? };
        if phase == "bubble" {
            if args.cause.as_deref() == Some(Cause::GrammarLate.name()) {
                step.stalled = span;
            }
            continue; // others are found again
        }
        step.batch = batch;
        (step.num_rows, step.num_tokens) = (args.rows, args.tokens);
        step.num_sampled = args.sampled;
        step.allocated = args.allocated;
        let launched = LAUNCHES
            .into_iter()
            .find(|kind| args.launched_as.as_deref() == Some(launch_label(*kind)));
        step.launched_as = launched.unwrap_or_default();
        match phase.as_str() {
            "admit" => step.admit = span,
            "plan" => step.plan = span,
            "stage" => step.stage = span,
            "launch" => step.launch = span,
            "late" => step.late = span,
            "blocked" => step.blocked = span,
            "collect" => step.collect = span,
            "h2d" => step.h2d = span,
            "compute" => step.compute = span,
            "d2h" => step.d2h = span,
            _ => {}
        }
    }
    for step in steps.values_mut() {
        // A grammar that was late before a batch is not late inside it.
        let Span { start, end } = step.compute;
        if step.stalled.start < start || step.stalled.end > end {
            step.stalled = Span::default();
        }
    }
    steps.retain(|_, step| step.batch != 0);
    if steps.is_empty() {
        return Err("holds no step".to_owned());
    }
    Ok(steps.into_values().collect())
}

fn micros(us: f64) -> Result<Duration, String> {
    Duration::try_from_secs_f64(us / 1e6).map_err(|_| format!("{us} is no time"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TimelineWriter;

    #[test]
    fn what_was_written_is_read_again() {
        let span = |start, end| Span {
            start: Duration::from_micros(start),
            end: Duration::from_micros(end),
        };
        let step = |batch: u64| {
            let at = 1000 * batch;
            StepRecord {
                batch,
                num_rows: 3,
                num_tokens: 9,
                num_sampled: 2,
                plan: span(at, at + 20),
                launch: span(at + 20, at + 50),
                compute: span(at + 60, at + 700),
                stalled: span(at + 300, at + 400),
                launched_as: LaunchKind::CapturedGraph,
                allocated: true,
                collect: span(at + 710, at + 720),
                ..StepRecord::default()
            }
        };
        let steps = [step(4), step(5)];
        let mut writer = TimelineWriter::new(Vec::new()).unwrap();
        steps.iter().try_for_each(|step| writer.add(step)).unwrap();
        let read = read_timeline(&writer.finish().unwrap()).unwrap();
        // Phases that never happened are empty wherever they are.
        assert_eq!(read, steps);
    }

    #[test]
    fn what_is_no_timeline_is_refused() {
        let check = |text: &str, said: &str| {
            let error = read_timeline(text.as_bytes()).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        };
        check("{}", "no timeline");
        check("[]", "no step");
        check(r#"[{"cat":"plan","ts":-5,"dur":1,"args":{"batch":1}}]"#, "no time");
    }
}
