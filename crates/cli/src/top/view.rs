//! How a server is shown.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::symbols;
use ratatui::text::Line;
use ratatui::widgets::{Block, Borders, LineGauge, Paragraph, Row, Sparkline, Table};

use super::history::{History, shown};
use super::lanes::Lanes;
use super::sample::{LATENCIES, Rates};

const BUSY: Color = Color::Indexed(71);
const CACHE: Color = Color::Indexed(44);
const SPEED: Color = Color::Indexed(39);
/// From how many lines on there is room for more of everything.
const TALL: u16 = 36;

/// Draws the latest sample; `foot` tells what can be done.
pub(super) fn draw(frame: &mut Frame<'_>, history: &History, foot: &str) {
    let is_tall = frame.area().height >= TALL;
    let curves_height = if is_tall { 6 } else { 3 };
    let strip_height = if is_tall { 5 } else { 2 };
    let [head, gauges, curves, strip, tables, lanes, steps, told] = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(1),
        Constraint::Length(curves_height),
        Constraint::Length(strip_height),
        Constraint::Length(6),
        Constraint::Length(6),
        Constraint::Min(0),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    let rates = history.rates();
    draw_head(frame, history, &rates, head);
    let [left, right] = halves(gauges);
    frame.render_widget(gauge("device busy", rates.busy, BUSY), left);
    frame.render_widget(gauge("KV cache", history.latest.cache_usage(), CACHE), right);
    let [left, right] = halves(curves);
    frame.render_widget(curve("busy", history, |r| 1e3 * r.busy, left).max(1000).fg(BUSY), left);
    let generated = curve("generated tokens/s", history, |r| r.generated, right);
    frame.render_widget(generated.fg(SPEED), right);
    draw_strip(frame, history, strip);
    let [left, right] = halves(tables);
    frame.render_widget(causes(&rates), left);
    frame.render_widget(latencies(history), right);
    draw_steps(frame, history, lanes, steps);
    let line = match &history.error {
        Some(error) => Line::from(format!("{error} (what is shown is from before)")).red(),
        None => Line::from(foot).dim(),
    };
    frame.render_widget(line, told);
}

fn halves(area: Rect) -> [Rect; 2] {
    Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)]).spacing(2).areas(area)
}

/// A heading with a rule.
fn headed(title: &str) -> Block<'static> {
    let title = Line::from(format!("{title} "));
    Block::new().borders(Borders::TOP).border_style(Style::new().dim()).title(title)
}

/// Numbers under each other.
fn right(text: impl Into<Line<'static>>) -> Line<'static> {
    text.into().right_aligned()
}

fn draw_head(frame: &mut Frame<'_>, history: &History, rates: &Rates, area: Rect) {
    let sample = &history.latest;
    let title = Line::from(format!("{} at {}", sample.model, history.address)).bold();
    let counts = format!(
        "{:.0} tokens/s generated, {:.0} computed, {:.1} steps/s; {} running, {} waiting",
        rates.generated, rates.computed, rates.steps, sample.num_running, sample.num_waiting
    );
    frame.render_widget(Paragraph::new(vec![title, Line::from(counts)]), area);
}

fn gauge(title: &str, part: f64, color: Color) -> LineGauge<'static> {
    LineGauge::default()
        .label(format!("{title} {:5.1} %", 100.0 * part))
        .ratio(part.clamp(0.0, 1.0))
        .filled_symbol(symbols::block::FULL)
        .unfilled_symbol(symbols::shade::LIGHT)
        .filled_style(color)
        .unfilled_style(Style::new().dim())
}

fn curve(
    title: &'static str,
    history: &History,
    of: fn(&Rates) -> f64,
    area: Rect,
) -> Sparkline<'static> {
    let skipped = history.curve.len().saturating_sub(usize::from(area.width));
    let values: Vec<u64> = history.curve.iter().skip(skipped).map(|r| of(r) as u64).collect();
    Sparkline::default().block(headed(title)).data(values)
}

fn draw_strip(frame: &mut Frame<'_>, history: &History, area: Rect) {
    let title = format!("batch: {} rows, a colour each", history.latest.batch.len());
    let height = usize::from(area.height.saturating_sub(1));
    let lines = history.strip.lines(usize::from(area.width), height);
    frame.render_widget(Paragraph::new(lines).block(headed(&title)), area);
}

fn causes(rates: &Rates) -> Table<'static> {
    let row =
        |(cause, part): &(String, f64)| Row::new([shown(cause), format!("{:7.2} %", 100.0 * part)]);
    let title = format!("device idle because of ({:.0} s)", rates.over.as_secs_f64());
    let widths = [Constraint::Fill(1), Constraint::Length(9)];
    Table::new(rates.idle.iter().map(row), widths).block(headed(&title))
}

fn latencies(history: &History) -> Table<'static> {
    let (latencies, over) = history.latencies();
    let shown = |ms: Option<f64>| ms.map_or("-".to_owned(), |ms| format!("{ms:.1}"));
    let rows = LATENCIES.iter().zip(latencies).map(|((name, _), [p50, p90, p99])| {
        Row::new([Line::from(*name), right(shown(p50)), right(shown(p90)), right(shown(p99))])
    });
    let number = Constraint::Length(7);
    Table::new(rows, [Constraint::Fill(1), number, number, number])
        .header(Row::new(["", "p50", "p90", "p99"].map(right)).dim())
        .block(headed(&format!("latencies, ms ({:.0} s)", over.as_secs_f64())))
}

fn draw_steps(frame: &mut Frame<'_>, history: &History, lanes: Rect, table: Rect) {
    let steps = Lanes::of(&history.latest.steps);
    let title = format!("the last steps, {:.0} ms", 1e3 * steps.length().as_secs_f64());
    let lines = steps.lines(usize::from(lanes.width));
    frame.render_widget(Paragraph::new(lines).block(headed(&title)), lanes);
    let rows = steps.table().map(|[batch, rows, tokens, compute, idle, cause]| {
        let numbers = [batch, rows, tokens, compute, idle].map(right);
        Row::new(numbers.into_iter().chain([Line::from(cause)]))
    });
    let widths = [8, 6, 8, 12, 9].map(Constraint::Length).into_iter().chain([Constraint::Fill(1)]);
    let header = ["batch", "rows", "tokens", "compute ms", "idle ms"].map(right);
    let header = header.into_iter().chain([Line::from("idle before it because of")]);
    frame.render_widget(Table::new(rows, widths).header(Row::new(header).dim()), table);
}
