//! Curves.

use std::io::{self, Write};

use super::axis::{Axis, short};
use super::{MARGINS, NUM_COLOURS, PANEL, escape, write_title};

/// Curves with the points they go through.
pub struct Lines {
    /// What is shown.
    pub title: String,
    /// Below.
    pub x_label: String,
    /// The unit of what is shown; its axis begins at 0.
    pub y_label: String,
    /// Whether equal steps to the right are equal factors.
    pub is_x_log: bool,
    /// The curves.
    pub lines: Vec<Line>,
}

/// One curve.
pub struct Line {
    /// What it is.
    pub name: String,
    /// Points, from left to right.
    pub points: Vec<(f64, f64)>,
}

/// More points than this are a curve without marks.
const MAX_MARKS: usize = 40;

impl Lines {
    pub(super) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let [left, top, right, bottom] = MARGINS;
        let (x_end, y_end) = (PANEL.0 - right, PANEL.1 - bottom);
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let x_axis = Axis::around(points().map(|p| p.0), self.is_x_log, left, x_end);
        let y_axis = Axis::from_zero(points().map(|p| p.1), y_end, top);
        let names: Vec<_> = self.lines.iter().map(|line| line.name.as_str()).collect();
        write_title(out, &self.title, &names)?;
        self.write_axes(out, &x_axis, &y_axis)?;
        for (i, line) in self.lines.iter().enumerate() {
            let is_drawn = |(x, y): &&(f64, f64)| x.is_finite() && y.is_finite();
            let points = line.points.iter().filter(is_drawn);
            let place = |(x, y)| Some((x_axis.place(x)?, y_axis.place(y)?, x, y));
            let places: Vec<_> = points.copied().filter_map(place).collect();
            let colour = i % NUM_COLOURS;
            write!(out, "<polyline class=\"line s{colour}\" points=\"")?;
            for (n, (x, y, ..)) in places.iter().enumerate() {
                write!(out, "{}{x:.1},{y:.1}", if n == 0 { "" } else { " " })?;
            }
            write!(out, "\"/>")?;
            if places.len() <= MAX_MARKS {
                for (x, y, x_value, y_value) in &places {
                    write!(
                        out,
                        "<circle class=\"f{colour}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\">\
                         <title>{}: {} at {}</title></circle>",
                        escape(&line.name),
                        short(*y_value),
                        short(*x_value)
                    )?;
                }
            }
        }
        Ok(())
    }

    fn write_axes(&self, out: &mut dyn Write, x_axis: &Axis, y_axis: &Axis) -> io::Result<()> {
        let [left, top, right, bottom] = MARGINS;
        let (x_end, y_end) = (PANEL.0 - right, PANEL.1 - bottom);
        for tick in y_axis.ticks() {
            let Some(y) = y_axis.place(tick) else { continue };
            write!(
                out,
                "<line class=\"grid\" x1=\"{left}\" y1=\"{y:.1}\" x2=\"{x_end}\" y2=\"{y:.1}\"/>\
                 <text class=\"soft end\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                left - 8.0,
                y + 4.0,
                short(tick)
            )?;
        }
        for tick in x_axis.ticks() {
            let Some(x) = x_axis.place(tick) else { continue };
            write!(
                out,
                "<line class=\"axis\" x1=\"{x:.1}\" y1=\"{y_end}\" x2=\"{x:.1}\" y2=\"{:.1}\"/>\
                 <text class=\"soft mid\" x=\"{x:.1}\" y=\"{:.1}\">{}</text>",
                y_end + 4.0,
                y_end + 18.0,
                short(tick)
            )?;
        }
        let middle = (left + x_end) / 2.0;
        write!(
            out,
            "<line class=\"axis\" x1=\"{left}\" y1=\"{y_end}\" x2=\"{x_end}\" y2=\"{y_end}\"/>\
             <text class=\"soft mid\" x=\"{middle:.1}\" y=\"{:.1}\">{}</text>\
             <text class=\"soft end\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            y_end + 38.0,
            escape(&self.x_label),
            left - 8.0,
            top - 12.0,
            escape(&self.y_label)
        )
    }
}
