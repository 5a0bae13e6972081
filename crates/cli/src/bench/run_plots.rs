//! Runs of one engine with overlap on and off, as plots.

use std::collections::BTreeSet;

use inflight_bench::plot::{Bar, Bars, Line, Lines, Plot, Sheet};
use inflight_engine::StepRecord;

use super::offline::Measured;

/// Points of a curve of step times.
const NUM_POINTS: usize = 48;

/// Busy or not, why not, how long steps took, how long all took.
pub(super) fn sheet(name: &str, runs: &[Measured]) -> Sheet {
    let names = || runs.iter().map(title).collect::<Vec<_>>();
    let bars = |title: &str, unit: &str, bars| {
        let (title, unit) = (title.to_owned(), unit.to_owned());
        Plot::Bars(Bars { title, unit, names: names(), bars })
    };
    let bar = |label: &str, of: &dyn Fn(&Measured) -> f64| Bar {
        label: label.to_owned(),
        values: runs.iter().map(of).collect(),
    };
    let shares = vec![
        bar("device busy", &|run| 100.0 * run.report.device_busy_fraction),
        bar("device idle", &|run| 100.0 * (1.0 - run.report.device_busy_fraction)),
    ];
    let causes: BTreeSet<_> = runs.iter().flat_map(|run| run.report.bubbles_s.keys()).collect();
    let idle = causes.into_iter().map(|cause| {
        bar(cause.name(), &|run| 1e3 * run.report.bubbles_s.get(cause).copied().unwrap_or(0.0))
    });
    let curve = |run: &Measured| Line { name: title(run), points: step_times(&run.run.steps) };
    let device = runs.first().map_or("", |run| run.device.as_str());
    Sheet {
        heading: format!("Inflight: {name}"),
        note: format!("inflight bench, on {device}"),
        plots: vec![
            bars("The device's time", "%", shares),
            bars("Why it was idle", "ms", idle.collect()),
            Plot::Lines(Lines {
                title: "Time of a step".to_owned(),
                x_label: "step".to_owned(),
                y_label: "ms".to_owned(),
                is_x_log: false,
                lines: runs.iter().map(curve).collect(),
            }),
            bars("Output", "tok/s", vec![bar("generated", &|run| run.report.output_tokens_per_s)]),
        ],
    }
}

fn title(run: &Measured) -> String {
    if run.config.overlap { "overlap on" } else { "overlap off" }.to_owned()
}

/// From one step's compute end to the next one's, the median of a stretch of steps.
fn step_times(steps: &[StepRecord]) -> Vec<(f64, f64)> {
    let ends = steps.windows(2);
    let times = ends.map(|pair| pair[1].compute.end.saturating_sub(pair[0].compute.end));
    let times: Vec<f64> = times.map(|time| 1e3 * time.as_secs_f64()).collect();
    let stretch = times.len().div_ceil(NUM_POINTS).max(1);
    let median = |(i, part): (usize, &[f64])| {
        let mut part = part.to_vec();
        part.sort_unstable_by(f64::total_cmp);
        ((i * stretch + part.len() / 2) as f64, part[part.len() / 2])
    };
    times.chunks(stretch).enumerate().map(median).collect()
}
