//! `inflight bench batching`'s figures as plots.

use inflight_bench::plot::{Bar, Bars, Line, Lines, Plot, Sheet};
use serde_json::Value;

/// A plot or two of every experiment that was run.
pub(super) fn sheet(figures: &Value) -> Sheet {
    let rows = |key: &str| figures[key].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut plots = Vec::new();
    plots.extend(burst(rows("burst")));
    plots.extend(rates(rows("rates")));
    plots.extend(long_prompt(rows("long_prompt")));
    plots.extend(tenants(rows("tenants")));
    let text = |key: &str| figures[key].as_str().unwrap_or_default();
    Sheet {
        heading: format!("Inflight: batching, {}", text("model")),
        note: format!("inflight bench batching, on {}", text("device")),
        plots,
    }
}

fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or(f64::NAN)
}

/// The mode, and what else tells rows apart.
fn mode(row: &Value) -> String {
    let mode = row["mode"].as_str().unwrap_or_default();
    match row["overlap"].as_bool() {
        Some(false) => format!("{mode}, overlap off"),
        _ => mode.to_owned(),
    }
}

/// Modes in the order in which they came.
fn modes(rows: &[Value]) -> Vec<String> {
    let mut modes = Vec::new();
    for row in rows {
        if !modes.contains(&mode(row)) {
            modes.push(mode(row));
        }
    }
    modes
}

/// Throughput by the variance of output lengths, which grows with their limit.
fn burst(rows: &[Value]) -> Option<Plot> {
    lines(rows, "All at once: tokens a second", "output limit", "tok/s", &|row| {
        (number(row, "limit"), number(row, "tokens_per_s"))
    })
}

fn rates(rows: &[Value]) -> Vec<Plot> {
    let plot = |title: &str, y_label: &str, key: &'static str| {
        lines(rows, title, "requests a second", y_label, &|row| {
            (number(row, "requests_per_s"), number(row, key))
        })
    };
    let plots = [
        plot("Latency, median", "s", "latency_p50_s"),
        plot("Time to the first token, median", "s", "ttft_p50_s"),
    ];
    plots.into_iter().flatten().collect()
}

/// One curve for each mode.
fn lines(
    rows: &[Value],
    title: &str,
    x_label: &str,
    y_label: &str,
    point: &dyn Fn(&Value) -> (f64, f64),
) -> Option<Plot> {
    let line = |name: String| {
        let points = rows.iter().filter(|row| mode(row) == name).map(point).collect();
        Line { name, points }
    };
    (!rows.is_empty()).then(|| {
        Plot::Lines(Lines {
            title: title.to_owned(),
            x_label: x_label.to_owned(),
            y_label: y_label.to_owned(),
            is_x_log: true,
            lines: modes(rows).into_iter().map(line).collect(),
        })
    })
}

fn long_prompt(rows: &[Value]) -> Vec<Plot> {
    let label = |row: &Value| match (row["chunk"].as_u64(), row["target_ms"].as_f64()) {
        (Some(chunk), _) => format!("chunks of {chunk}"),
        (None, Some(target)) => format!("target {target} ms"),
        (None, None) => mode(row),
    };
    let plots = [
        bars(rows, "A long prompt: time between tokens, p99", "ms", "itl_p99_ms", &label),
        bars(rows, "A long prompt: time to its first token", "s", "ttft_s", &label),
    ];
    plots.into_iter().flatten().collect()
}

fn tenants(rows: &[Value]) -> Option<Plot> {
    bars(rows, "One user beside a flood: latency, p95", "s", "latency_p95_s", &mode)
}

fn bars(
    rows: &[Value],
    title: &str,
    unit: &str,
    key: &str,
    label: &dyn Fn(&Value) -> String,
) -> Option<Plot> {
    let bar = |row| Bar { label: label(row), values: vec![number(row, key)] };
    (!rows.is_empty()).then(|| {
        Plot::Bars(Bars {
            title: title.to_owned(),
            unit: unit.to_owned(),
            names: vec![String::new()],
            bars: rows.iter().map(bar).collect(),
        })
    })
}
