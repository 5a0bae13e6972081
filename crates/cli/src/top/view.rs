//! How a server is shown.

use std::time::Duration;

use inflight_engine::Span;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span as Text};
use ratatui::widgets::{Block, Gauge, Paragraph, Row, Sparkline, Table};

use super::sample::{History, Rates};

/// What a cell of the lanes means.
const HOST: [(&str, Color); 5] = [
    ("plan", Color::Blue),
    ("stage", Color::Cyan),
    ("launch", Color::Magenta),
    ("blocked", Color::DarkGray),
    ("collect", Color::Yellow),
];
const DEVICE: Color = Color::Green;

/// Draws the latest sample.
pub(super) fn draw(frame: &mut Frame<'_>, history: &History) {
    let rates = history.rates.back().cloned().unwrap_or_default();
    let [head, gauges, curves, tables, lanes, foot] = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(3),
        Constraint::Length(5),
        Constraint::Min(7),
        Constraint::Length(6),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    let sample = &history.latest;
    let title = format!("{} at {}", sample.model, history.address);
    let counts = format!(
        "{:.0} tokens/s  {:.0} steps/s  {} running  {} waiting",
        rates.tokens, rates.steps, sample.num_running, sample.num_waiting
    );
    frame.render_widget(Paragraph::new(vec![Line::from(title).bold(), Line::from(counts)]), head);
    let [left, right] = halves(gauges);
    frame.render_widget(gauge("device busy", rates.busy, DEVICE), left);
    frame.render_widget(gauge("KV cache", sample.cache_usage, Color::Cyan), right);
    let [left, right] = halves(curves);
    let curve = |title, of: &dyn Fn(&Rates) -> f64, area: Rect, color| {
        let room = usize::from(area.width.saturating_sub(2));
        let first = history.rates.len().saturating_sub(room);
        let values: Vec<u64> = history.rates.iter().skip(first).map(|r| of(r) as u64).collect();
        Sparkline::default().block(Block::bordered().title(title)).data(values).style(color)
    };
    let busy = curve("busy", &|rates| 1000.0 * rates.busy, left, DEVICE).max(1000);
    frame.render_widget(busy, left);
    frame.render_widget(curve("tokens/s", &|rates| rates.tokens, right, Color::Blue), right);
    let [left, right] = halves(tables);
    frame.render_widget(causes(&rates), left);
    frame.render_widget(latencies(history), right);
    draw_lanes(frame, history, lanes);
    let told = match &history.error {
        Some(error) => Line::from(error.as_str()).red(),
        None => Line::from("q leaves").dark_gray(),
    };
    frame.render_widget(told, foot);
}

fn halves(area: Rect) -> [Rect; 2] {
    Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)]).areas(area)
}

fn gauge(title: &'static str, part: f64, color: Color) -> Gauge<'static> {
    let part = part.clamp(0.0, 1.0);
    Gauge::default()
        .block(Block::bordered().title(title))
        .gauge_style(color)
        .ratio(part)
        .label(format!("{:.1} %", 100.0 * part))
}

fn causes(rates: &Rates) -> Table<'static> {
    let rows = rates.idle.iter().map(|(cause, part)| {
        Row::new([cause.replace('_', " "), format!("{:6.2} %", 100.0 * part)])
    });
    let widths = [Constraint::Fill(1), Constraint::Length(9)];
    Table::new(rows, widths).block(Block::bordered().title("idle because of"))
}

fn latencies(history: &History) -> Table<'static> {
    let shown = |ms: &Option<f64>| ms.map_or("-".to_owned(), |ms| format!("{ms:.1}"));
    let rows = history.latest.latencies.iter().map(|(name, ms)| {
        let [p50, p90, p99] = ms.each_ref().map(shown);
        Row::new([(*name).to_owned(), p50, p90, p99])
    });
    let number = Constraint::Length(8);
    Table::new(rows, [Constraint::Fill(1), number, number, number])
        .header(Row::new(["", "p50 ms", "p90 ms", "p99 ms"]).style(Style::new().bold()))
        .block(Block::bordered().title("latencies since the start"))
}

/// The last steps in four lanes, as many as there is room for; a gap in `compute` is a bubble.
fn draw_lanes(frame: &mut Frame<'_>, history: &History, area: Rect) {
    let steps = &history.latest.steps;
    let width = usize::from(area.width.saturating_sub(10));
    let end = steps.iter().map(|s| s.collect.end.max(s.compute.end)).max().unwrap_or_default();
    let start = steps.first().map_or(end, |s| s.admit.start.max(s.plan.start));
    let length = end.saturating_sub(start);
    let mut lanes = vec![vec![None; width]; 4];
    let mut paint = |lane: usize, span: Span, color: Color| {
        let cell = |time: Duration| {
            let part = time.saturating_sub(start).as_secs_f64() / length.as_secs_f64().max(1e-9);
            (part * width as f64) as usize
        };
        if span.end > span.start && width > 0 {
            let (from, to) = (cell(span.start).min(width - 1), cell(span.end).min(width - 1));
            lanes[lane][from..=to].fill(Some(color));
        }
    };
    for step in steps {
        let phases = [step.plan, step.stage, step.launch, step.blocked, step.collect];
        phases.into_iter().zip(HOST).for_each(|(span, (_, color))| paint(0, span, color));
        paint(1, step.h2d, DEVICE);
        paint(2, step.compute, DEVICE);
        paint(3, step.d2h, DEVICE);
    }
    let line = |(name, cells): (&'static str, &Vec<Option<Color>>)| {
        let blocks = cells.iter().map(|cell| match cell {
            Some(color) => Text::styled("█", *color),
            None => Text::raw(" "),
        });
        Line::from_iter([Text::raw(format!("{name:8}"))].into_iter().chain(blocks))
    };
    let lines: Vec<_> = ["host", "h2d", "compute", "d2h"].into_iter().zip(&lanes).map(line).collect();
    let title = format!("the last {:.0} ms", 1e3 * length.as_secs_f64());
    let legend = HOST.map(|(name, color)| Text::styled(format!(" {name}"), color));
    let block = Block::bordered().title(title).title_bottom(Line::from_iter(legend));
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use crate::top::sample::tests::sample;

    fn screen(width: u16, height: u16, history: &History) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, history)).unwrap();
        let buffer = terminal.backend().buffer();
        let row = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect();
        (0..height).map(row).collect()
    }

    #[test]
    fn what_the_server_tells_is_on_the_screen() {
        let origin = Instant::now();
        let mut history = History::new("http://h:1".into(), sample(origin, 4));
        history.push(sample(origin, 6));
        let rows = screen(100, 30, &history);
        let has = |text: &str| {
            assert!(rows.iter().any(|row| row.contains(text)), "{text}:\n{}", rows.join("\n"));
        };
        has("smol at http://h:1");
        has("800 tokens/s  50 steps/s  2 running  1 waiting");
        has("75.0 %");
        has("40.0 %");
        has("no work");
        has("20.00 %");
        has("first token");
        // Two steps computed for 10 of 35 ms each, 10 ms apart.
        let compute = rows.iter().find(|row| row.contains("compute")).unwrap();
        let cells = compute.chars().filter(|cell| *cell == '█').count();
        assert!((48..=54).contains(&cells), "{cells} of 90 cells: {compute}");
        let runs: Vec<_> = compute.split(|c| c != '█').filter(|run| !run.is_empty()).collect();
        assert_eq!(runs.len(), 2, "a gap is seen: {compute}");
    }

    #[test]
    fn small_screens_and_lost_servers_do_no_harm() {
        let mut history = History::new("a".into(), sample(Instant::now(), 1));
        history.note_error("cannot connect".into());
        for (width, height) in [(1, 1), (10, 5), (20, 40), (200, 10)] {
            screen(width, height, &history);
        }
        assert!(screen(80, 30, &history).iter().any(|row| row.contains("cannot connect")));
    }
}
