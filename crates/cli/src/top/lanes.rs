//! The last steps: what host and device did when, and what each step waited for.

use std::time::Duration;

use inflight_engine::{Span, StepRecord};
use inflight_observe::{Bubble, Bubbles};
use ratatui::style::{Color, Style};
use ratatui::text::{Line, Span as Text};

/// The host's phases by letter and colour.
const PHASES: [(char, &str, Color); 6] = [
    ('p', "plan", Color::Indexed(178)),
    ('s', "stage", Color::Indexed(71)),
    ('l', "launch", Color::Indexed(39)),
    ('m', "masks", Color::Indexed(170)),
    ('c', "collect", Color::Indexed(44)),
    ('.', "waits", Color::Indexed(244)),
];
const DEVICE: Color = Color::Indexed(39);
const IDLE: Color = Color::Indexed(203);
/// Columns before the lanes begin.
const NAME_WIDTH: usize = 8;

/// Steps, and the bubbles found among them: each with the index of the step that ended it.
pub(super) struct Lanes<'a> {
    steps: &'a [StepRecord],
    bubbles: Vec<(usize, Bubble)>,
}

impl<'a> Lanes<'a> {
    pub(super) fn of(steps: &'a [StepRecord]) -> Self {
        let mut finder = Bubbles::default();
        let found = |(i, step)| finder.of(step).map(move |bubble| (i, bubble)).collect::<Vec<_>>();
        Self { steps, bubbles: steps.iter().enumerate().flat_map(found).collect() }
    }

    /// From where the device began the first step to the last one's end.
    pub(super) fn length(&self) -> Duration {
        let Span { start, end } = self.span();
        end.saturating_sub(start)
    }

    /// What the device did before it computed the first of them is not known.
    fn span(&self) -> Span {
        let end = self.steps.iter().map(|s| s.collect.end.max(s.compute.end)).max();
        let end = end.unwrap_or_default();
        Span { start: self.steps.first().map_or(end, |step| step.compute.start), end }
    }

    /// Four lanes and what their cells mean, `width` columns wide.
    pub(super) fn lines(&self, width: usize) -> Vec<Line<'static>> {
        let mut canvas = Canvas::new(self.span(), width.saturating_sub(NAME_WIDTH));
        for step in self.steps {
            // Batches that follow each other at once are told apart.
            let device = if step.batch % 2 == 0 { '█' } else { '▓' };
            let admit_and_plan = Span { start: step.admit.start, end: step.plan.end };
            let plan = if step.admit.end > step.admit.start { admit_and_plan } else { step.plan };
            let phases = [plan, step.stage, step.launch, step.late, step.collect, step.blocked];
            for (span, (letter, _, colour)) in phases.into_iter().zip(PHASES) {
                canvas.paint(0, span, letter, colour);
            }
            canvas.paint(1, step.h2d, device, DEVICE);
            canvas.paint(2, step.compute, device, DEVICE);
            canvas.paint(3, step.d2h, device, DEVICE);
        }
        for (_, bubble) in &self.bubbles {
            canvas.paint_whole_cells(2, bubble.span, '░', IDLE);
        }
        let mut lines = canvas.lines(["host", "h2d", "compute", "d2h"]);
        let legend = PHASES.map(|(letter, name, colour)| {
            [Text::styled(letter.to_string(), colour), Text::raw(format!(" {name}  "))]
        });
        let idle = [Text::styled("░", IDLE), Text::raw(" idle")];
        let margin = Text::raw(" ".repeat(NAME_WIDTH));
        lines.push([margin].into_iter().chain(legend.into_iter().flatten()).chain(idle).collect());
        lines
    }

    /// A step in a line, the latest first: batch, rows, tokens, how long the device took, how long
    /// it was idle before and inside, and why.
    pub(super) fn table(&self) -> impl Iterator<Item = [String; 6]> {
        self.steps.iter().enumerate().rev().map(|(i, step)| {
            let own = || self.bubbles.iter().filter(move |(at, _)| *at == i).map(|(_, b)| b);
            let idle: Duration = own().map(|bubble| length(bubble.span)).sum();
            let longest = own().max_by_key(|bubble| length(bubble.span));
            [
                step.batch.to_string(),
                step.num_rows.to_string(),
                step.num_tokens.to_string(),
                format!("{:.2}", millis(length(step.compute))),
                format!("{:.3}", millis(idle)),
                longest.map_or(String::new(), |bubble| bubble.cause.name().to_owned()),
            ]
        })
    }
}

fn length(span: Span) -> Duration {
    span.end.saturating_sub(span.start)
}

fn millis(time: Duration) -> f64 {
    1e3 * time.as_secs_f64()
}

/// Four lanes of cells, which lie over a stretch of time.
struct Canvas {
    over: Span,
    cells: [Vec<Option<(char, Color)>>; 4],
}

impl Canvas {
    fn new(over: Span, width: usize) -> Self {
        Self { over, cells: std::array::from_fn(|_| vec![None; width]) }
    }

    /// Where a time lies, in columns.
    fn column(&self, time: Duration) -> f64 {
        let seconds = length(self.over).as_secs_f64().max(1e-9);
        let part = time.saturating_sub(self.over.start).as_secs_f64() / seconds;
        part.min(1.0) * self.cells[0].len() as f64
    }

    /// Fills every cell that a span touches.
    fn paint(&mut self, lane: usize, span: Span, symbol: char, colour: Color) {
        if span.end <= span.start || span.end <= self.over.start {
            return;
        }
        let (from, to) = (self.column(span.start), self.column(span.end));
        // Of what takes much less than a cell, a full one would tell too much.
        let symbol = if to - from < 0.3 && lane > 0 { '▏' } else { symbol };
        self.fill(lane, from.floor(), to.ceil(), symbol, colour);
    }

    /// Fills the cells that lie wholly in a span.
    fn paint_whole_cells(&mut self, lane: usize, span: Span, symbol: char, colour: Color) {
        let (from, to) = (self.column(span.start).ceil(), self.column(span.end).floor());
        self.fill(lane, from, to, symbol, colour);
    }

    fn fill(&mut self, lane: usize, from: f64, to: f64, symbol: char, colour: Color) {
        if let Some(cells) = self.cells[lane].get_mut(from as usize..to as usize) {
            cells.fill(Some((symbol, colour)));
        }
    }

    fn lines(&self, names: [&'static str; 4]) -> Vec<Line<'static>> {
        let cell = |cell: &Option<(char, Color)>| match cell {
            Some((symbol, colour)) => Text::styled(symbol.to_string(), Style::new().fg(*colour)),
            None => Text::raw(" "),
        };
        let line = |(name, cells): (&str, &Vec<_>)| {
            let name = Text::raw(format!("{name:NAME_WIDTH$}"));
            [name].into_iter().chain(cells.iter().map(cell)).collect()
        };
        names.into_iter().zip(&self.cells).map(line).collect()
    }
}
