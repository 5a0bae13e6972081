//! Steps as a picture: one page of HTML that needs nothing else.
//!
//! Each panel shows a few steps of a run in four lanes, all panels at the same scale, so that a run
//! without overlap can be held against one with it.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    time::Duration,
};

use inflight_engine::{Span, StepRecord};

use crate::{Bubble, Bubbles, Cause};

/// Width of the lanes, in the picture's own units.
const WIDTH: f64 = 1200.0;
/// Left of the lanes, for their names.
const MARGIN: f64 = 70.0;
const LANE_HEIGHT: f64 = 34.0;
const LANES: [&str; 4] = ["host", "h2d", "compute", "d2h"];
/// The lane on which the device computes, or does not.
const COMPUTE: usize = 2;
/// Most steps of a panel.
const MAX_STEPS: usize = 12;
/// A label needs about this much room for each of its letters.
const LETTER_WIDTH: f64 = 6.5;

/// One run, or a part of it.
pub struct Panel<'a> {
    /// What run it is.
    pub title: &'a str,
    /// Its steps, in order; if there are many, those in the middle are shown.
    pub steps: &'a [StepRecord],
}

/// Writes a page that shows `panels` one below the other.
///
/// # Errors
/// As writing does.
pub fn write_picture(mut out: impl Write, heading: &str, panels: &[Panel<'_>]) -> io::Result<()> {
    let heading = escape(heading);
    write!(out, "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\">")?;
    write!(out, "<meta name=\"viewport\" content=\"width=device-width\">")?;
    write!(out, "<link rel=\"icon\" href=\"data:,\">")?;
    write!(out, "<title>{heading}</title>\n<style>{STYLE}</style>\n<h1>{heading}</h1>\n")?;
    write!(out, "<p class=\"legend\">")?;
    for (class, name) in LEGEND {
        write!(out, "<span><i class=\"{class}\"></i>{name}</span> ")?;
    }
    writeln!(out, "</p>")?;
    let shown: Vec<_> = panels.iter().map(|panel| middle(panel.steps)).collect();
    let longest = shown.iter().map(|steps| extent(steps)).map(length).max().unwrap_or_default();
    for (panel, steps) in panels.iter().zip(shown) {
        let view = View { start: extent(steps).start, longest };
        write_panel(&mut out, panel, steps, view)?;
    }
    writeln!(out, "</html>")
}

const LEGEND: [(&str, &str); 9] = [
    ("admit", "admit"),
    ("plan", "plan"),
    ("stage", "stage"),
    ("launch", "launch"),
    ("late", "grammar masks"),
    ("collect", "collect"),
    ("blocked", "waits for the device"),
    ("even", "device works"),
    ("bubble", "device idle"),
];

const STYLE: &str = "\
:root{--ink:#1b1f24;--paper:#fff;--line:#d0d7de;--hatch:#cf222e}\
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--paper:#0d1117;--line:#30363d;\
--hatch:#ff7b72}}\
body{font:14px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper);\
margin:24px auto;max-width:1320px;padding:0 16px}\
h1{font-size:20px}h2{font-size:16px;margin:20px 0 2px}p{margin:2px 0 6px}\
.lanes{overflow-x:auto}svg{width:100%;min-width:900px;height:auto;display:block}\
ul{margin:6px 0;padding-left:20px}.why{font-weight:600}\
.legend span{margin-right:14px;white-space:nowrap}\
.legend i{display:inline-block;width:12px;height:12px;border-radius:2px;margin-right:5px}\
.admit{fill:#8250df;background:#8250df}.plan{fill:#bf8700;background:#bf8700}\
.stage{fill:#1a7f37;background:#1a7f37}.launch{fill:#0969da;background:#0969da}\
.late{fill:#d4388c;background:#d4388c}.collect{fill:#0a7b83;background:#0a7b83}\
.blocked{fill:var(--line);background:var(--line)}.even{fill:#218bff;background:#218bff}\
.odd{fill:#0550ae;background:#0550ae}\
.bubble{fill:url(#hatch);stroke:var(--hatch);\
background:repeating-linear-gradient(45deg,var(--hatch) 0 2px,transparent 2px 5px)}\
text{font:11px system-ui,sans-serif;fill:var(--ink)}.on{fill:#fff}\
.lane{stroke:var(--line)}";

/// How times become places.
#[derive(Clone, Copy)]
struct View {
    start: Duration,
    longest: Duration,
}

impl View {
    fn x(self, time: Duration) -> f64 {
        MARGIN + self.width(time.saturating_sub(self.start))
    }

    fn width(self, time: Duration) -> f64 {
        time.as_secs_f64() / self.longest.as_secs_f64().max(1e-9) * WIDTH
    }
}

fn write_panel(
    out: &mut impl Write,
    panel: &Panel<'_>,
    steps: &[StepRecord],
    view: View,
) -> io::Result<()> {
    let bubbles = bubbles(steps);
    writeln!(out, "<h2>{}</h2>\n<p>{}</p>", escape(panel.title), summary(steps, &bubbles))?;
    write_causes(out, steps, &bubbles)?;
    let (width, height) = (MARGIN + WIDTH + 10.0, LANE_HEIGHT * LANES.len() as f64 + 24.0);
    writeln!(
        out,
        "<div class=\"lanes\"><svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{}\">\
         <defs><pattern id=\"hatch\" width=\"5\" height=\"5\" patternUnits=\"userSpaceOnUse\" \
         patternTransform=\"rotate(45)\"><rect width=\"2\" height=\"5\" \
         style=\"fill:var(--hatch)\"/></pattern></defs>",
        escape(panel.title)
    )?;
    for (lane, name) in LANES.iter().enumerate() {
        let y = lane_y(lane) + LANE_HEIGHT - 4.0;
        writeln!(
            out,
            "<text x=\"0\" y=\"{:.1}\">{name}</text><line class=\"lane\" x1=\"{MARGIN}\" \
             x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>",
            y - 10.0,
            MARGIN + WIDTH,
        )?;
    }
    for step in steps {
        write_step(out, step, view)?;
    }
    for bubble in &bubbles {
        let label = format!("idle {}: {}", micros(length(bubble.span)), bubble.cause.name());
        write_bar(out, view, COMPUTE, bubble.span, Bar { class: "bubble", label: &label, on: "" })?;
    }
    write_scale(out, view)?;
    writeln!(out, "</svg></div>")
}

/// Why the device was idle, the longest first: of each cause the name, the time, what it means, and
/// at which batch it took longest.
fn write_causes(out: &mut impl Write, steps: &[StepRecord], bubbles: &[Bubble]) -> io::Result<()> {
    let causes = by_cause(bubbles);
    if causes.is_empty() {
        return Ok(());
    }
    write!(out, "<ul>")?;
    for (cause, time) in causes {
        let own = bubbles.iter().filter(|bubble| bubble.cause == cause);
        let longest = own.max_by_key(|bubble| length(bubble.span)).expect("it has a time");
        let next = steps.iter().find(|step| step.compute.end > longest.span.end);
        let before = next.map_or(String::new(), |step| format!(", at batch {}", step.batch));
        write!(
            out,
            "<li><span class=\"why\">{}</span>, {} in all: {}. At most {}{before}.</li>",
            cause.name(),
            micros(time),
            cause.meaning(),
            micros(length(longest.span)),
        )?;
    }
    writeln!(out, "</ul>")
}

/// How long the device was idle by cause, the longest first.
fn by_cause(bubbles: &[Bubble]) -> Vec<(Cause, Duration)> {
    let mut idle: BTreeMap<Cause, Duration> = BTreeMap::new();
    for bubble in bubbles {
        *idle.entry(bubble.cause).or_default() += length(bubble.span);
    }
    let mut causes: Vec<_> = idle.into_iter().collect();
    causes.sort_by_key(|(_, time)| std::cmp::Reverse(*time));
    causes
}

fn write_step(out: &mut impl Write, step: &StepRecord, view: View) -> io::Result<()> {
    let batch = step.batch;
    let device = if batch.is_multiple_of(2) { "even" } else { "odd" };
    let bars = [
        (0, "admit", step.admit),
        (0, "plan", step.plan),
        (0, "stage", step.stage),
        (0, "launch", step.launch),
        (0, "late", step.late),
        (0, "blocked", step.blocked),
        (0, "collect", step.collect),
        (1, device, step.h2d),
        (COMPUTE, device, step.compute),
        (3, device, step.d2h),
    ];
    for (lane, class, span) in bars.into_iter().filter(|(_, _, span)| span.end > span.start) {
        let label = match lane {
            0 if class == "blocked" => format!("waits for {batch}"),
            0 => format!("{class} {batch}"),
            _ => format!("batch {batch}, {} rows, {} tokens", step.num_rows, step.num_tokens),
        };
        let on = if class == "blocked" { "" } else { " class=\"on\"" };
        write_bar(out, view, lane, span, Bar { class, label: &label, on })?;
    }
    Ok(())
}

/// How a stretch of time looks.
struct Bar<'a> {
    class: &'a str,
    label: &'a str,
    /// Of the label's text.
    on: &'a str,
}

fn write_bar(
    out: &mut impl Write,
    view: View,
    lane: usize,
    span: Span,
    bar: Bar<'_>,
) -> io::Result<()> {
    let (x, y, width) = (view.x(span.start), lane_y(lane), view.width(length(span)));
    let Bar { class, label, on } = bar;
    let taken = micros(length(span));
    writeln!(
        out,
        "<rect class=\"{class}\" x=\"{x:.2}\" y=\"{y:.1}\" width=\"{:.2}\" height=\"{:.1}\">\
         <title>{label}, {taken}</title></rect>",
        width.max(0.4),
        LANE_HEIGHT - 6.0,
    )?;
    // As much of the label as there is room for, if that says anything.
    let room = ((width - 8.0) / LETTER_WIDTH) as usize;
    let short = label.split([',', ':']).next().unwrap_or_default();
    let text = [label, short].into_iter().find(|text| text.len() <= room);
    if let Some(text) = text {
        let (x, y) = (x + 4.0, y + LANE_HEIGHT / 2.0 + 1.0);
        writeln!(out, "<text{on} x=\"{x:.1}\" y=\"{y:.1}\" pointer-events=\"none\">{text}</text>")?;
    }
    Ok(())
}

/// A bar of a round length under the lanes.
fn write_scale(out: &mut impl Write, view: View) -> io::Result<()> {
    let mut us = 1.0;
    let steps = [2.0, 2.5, 2.0].into_iter().cycle();
    for factor in steps {
        if view.width(Duration::from_secs_f64(us / 1e6)) >= 60.0 {
            break;
        }
        us *= factor;
    }
    let unit = Duration::from_secs_f64(us / 1e6);
    let (width, y) = (view.width(unit), LANE_HEIGHT * LANES.len() as f64 + 14.0);
    writeln!(
        out,
        "<line x1=\"{MARGIN}\" x2=\"{:.1}\" y1=\"{y}\" y2=\"{y}\" stroke=\"currentColor\"/>\
         <text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
        MARGIN + width,
        MARGIN + width + 6.0,
        y + 4.0,
        micros(unit),
    )
}

/// How busy the device was, and what it waited for.
fn summary(steps: &[StepRecord], bubbles: &[Bubble]) -> String {
    let first = steps.first().map_or(Duration::ZERO, |step| step.compute.start);
    let last = steps.iter().map(|step| step.compute.end).max().unwrap_or_default();
    let whole = last.saturating_sub(first).as_secs_f64().max(1e-9);
    let causes = by_cause(bubbles);
    let idle_s: f64 = causes.iter().map(|(_, time)| time.as_secs_f64()).sum();
    let mut text = format!(
        "{} steps in {}. The device was busy {:.1} % of the time",
        steps.len(),
        micros(last.saturating_sub(first)),
        100.0 * (1.0 - idle_s / whole)
    );
    for (i, (cause, time)) in causes.into_iter().enumerate() {
        let share = 100.0 * time.as_secs_f64() / whole;
        let lead = if i == 0 { "; idle because of " } else { ", " };
        text += &format!("{lead}{} {share:.1} %", cause.name());
    }
    text + "."
}

fn bubbles(steps: &[StepRecord]) -> Vec<Bubble> {
    let mut bubbles = Bubbles::default();
    steps.iter().flat_map(|step| bubbles.of(step)).collect()
}

/// As many steps as a panel shows, from the middle.
fn middle(steps: &[StepRecord]) -> &[StepRecord] {
    let num_shown = steps.len().min(MAX_STEPS);
    let first = (steps.len() - num_shown) / 2;
    &steps[first..first + num_shown]
}

/// From the first thing that happened to the last.
fn extent(steps: &[StepRecord]) -> Span {
    let start = steps.iter().map(|step| step.admit.start.min(step.compute.start)).min();
    let end = steps.iter().map(|step| step.collect.end.max(step.d2h.end)).max();
    Span { start: start.unwrap_or_default(), end: end.unwrap_or_default() }
}

fn lane_y(lane: usize) -> f64 {
    LANE_HEIGHT * lane as f64
}

fn length(span: Span) -> Duration {
    span.end.saturating_sub(span.start)
}

fn micros(time: Duration) -> String {
    let us = time.as_secs_f64() * 1e6;
    match us {
        us if us < 10.0 => format!("{us:.1} µs"),
        us if us < 1000.0 => format!("{us:.0} µs"),
        us => format!("{:.2} ms", us / 1000.0),
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(start: u64, end: u64) -> Span {
        Span { start: Duration::from_micros(start), end: Duration::from_micros(end) }
    }

    fn step(batch: u64, start: u64) -> StepRecord {
        StepRecord {
            batch,
            num_rows: 3,
            num_tokens: 3,
            admit: span(start, start + 1),
            plan: span(start + 1, start + 21),
            launch: span(start + 21, start + 40),
            h2d: span(start + 40, start + 44),
            compute: span(start + 45, start + 145),
            blocked: span(start + 40, start + 150),
            collect: span(start + 150, start + 160),
            ..StepRecord::default()
        }
    }

    #[test]
    fn a_gap_is_drawn_to_scale_and_named() {
        let steps = [step(1, 0), step(2, 160)];
        let mut page = Vec::new();
        write_picture(&mut page, "a < b", &[Panel { title: "overlap off", steps: &steps }])
            .unwrap();
        let page = String::from_utf8(page).unwrap();
        assert!(page.contains("<h1>a &lt; b</h1>"));
        // 60 of 260 µs between the first compute interval's start and the last one's end.
        assert!(page.contains("busy 76.9 % of the time"), "{page}");
        // 1200 units for 320 µs: the gap from 145 to 205 is 225 wide and starts at 70 + 543.75.
        assert!(
            page.contains("class=\"bubble\" x=\"613.75\" y=\"68.0\" width=\"225.00\""),
            "{page}"
        );
        assert!(page.contains("idle 60 µs"));
        // A stranger is told what that means.
        assert!(page.contains("in all: the host was"), "{page}");
        assert!(page.contains("At most 60 µs, at batch 2."), "{page}");
        assert!(!page.contains("http"), "asks nobody for anything");
    }

    #[test]
    fn a_panel_of_many_steps_shows_those_in_the_middle() {
        let steps: Vec<_> = (0..100).map(|i| step(i + 1, i * 160)).collect();
        let shown: Vec<u64> = middle(&steps).iter().map(|step| step.batch).collect();
        assert_eq!(shown, (45..57).collect::<Vec<_>>());
        assert!(middle(&[]).is_empty());
        let mut page = Vec::new();
        write_picture(&mut page, "empty", &[Panel { title: "none", steps: &[] }]).unwrap();
    }
}
