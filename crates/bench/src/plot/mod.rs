//! Figures as plots: one SVG that needs nothing else, light or dark as its reader is.
//!
//! Reading order: here (a sheet of panels), [`axis`] (values to places, ticks), [`lines`] (curves),
//! [`bars`] (values side by side).

mod axis;
mod bars;
mod lines;

use std::io::{self, Write};

pub use bars::{Bar, Bars};
pub use lines::{Line, Lines};

/// Size of a panel with its title and labels, in the sheet's own units.
const PANEL: (f64, f64) = (560.0, 320.0);
/// Space around what is plotted: left, top, right, bottom.
const MARGINS: [f64; 4] = [74.0, 58.0, 20.0, 48.0];
/// Panels side by side.
const COLUMNS: usize = 2;
/// Above the panels.
const HEADING_HEIGHT: f64 = 64.0;
/// Colours that the style sheet knows; further series begin again.
const NUM_COLOURS: usize = 6;
/// A letter of 12 units takes about this much room.
const LETTER_WIDTH: f64 = 6.6;

/// A letter of a heading, of 18 units and bold.
const HEADING_LETTER: f64 = 11.0;

/// One plot of a sheet.
pub enum Plot {
    /// Curves.
    Lines(Lines),
    /// Values side by side.
    Bars(Bars),
}

/// Several plots under one heading.
pub struct Sheet {
    /// What was measured.
    pub heading: String,
    /// On what, and how.
    pub note: String,
    /// The plots, two in a row.
    pub plots: Vec<Plot>,
}

const STYLE: &str = "\
svg{--ink:#1b1f24;--soft:#59636e;--paper:#fff;--line:#d9dee4;\
--c0:#0969da;--c1:#bc4c00;--c2:#1a7f37;--c3:#8250df;--c4:#bf3989;--c5:#57606a;\
font:12px system-ui,sans-serif;background:var(--paper)}\
@media(prefers-color-scheme:dark){svg{--ink:#e6edf3;--soft:#9198a1;--paper:#0d1117;\
--line:#30363d;--c0:#58a6ff;--c1:#f0883e;--c2:#3fb950;--c3:#bc8cff;--c4:#f778ba;--c5:#9198a1}}\
text{fill:var(--ink)}.soft{fill:var(--soft)}.h1{font-size:18px;font-weight:600}\
.h2{font-size:14px;font-weight:600}.paper{fill:var(--paper)}\
.grid{stroke:var(--line);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}\
.line{fill:none;stroke-width:2.2;stroke-linejoin:round}.end{text-anchor:end}\
.mid{text-anchor:middle}\
.s0{stroke:var(--c0)}.s1{stroke:var(--c1)}.s2{stroke:var(--c2)}\
.s3{stroke:var(--c3)}.s4{stroke:var(--c4)}.s5{stroke:var(--c5)}\
.f0{fill:var(--c0)}.f1{fill:var(--c1)}.f2{fill:var(--c2)}\
.f3{fill:var(--c3)}.f4{fill:var(--c4)}.f5{fill:var(--c5)}";

impl Sheet {
    /// Writes the sheet as SVG.
    ///
    /// # Errors
    /// As writing does.
    pub fn write_svg(&self, mut out: impl Write) -> io::Result<()> {
        let num_columns = self.plots.len().clamp(1, COLUMNS);
        let num_rows = self.plots.len().div_ceil(num_columns);
        let longest = self.heading.chars().count().max(self.note.chars().count() * 2 / 3);
        let (width, height) = (
            (PANEL.0 * num_columns as f64 + 20.0).max(40.0 + HEADING_LETTER * longest as f64),
            HEADING_HEIGHT + PANEL.1 * num_rows as f64 + 10.0,
        );
        let (heading, note) = (escape(&self.heading), escape(&self.note));
        write!(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
             role=\"img\" aria-label=\"{heading}\"><style>{STYLE}</style>\
             <rect class=\"paper\" width=\"{width}\" height=\"{height}\"/>\
             <text class=\"h1\" x=\"20\" y=\"30\">{heading}</text>\
             <text class=\"soft\" x=\"20\" y=\"50\">{note}</text>"
        )?;
        for (i, plot) in self.plots.iter().enumerate() {
            let x = 10.0 + PANEL.0 * (i % num_columns) as f64;
            let y = HEADING_HEIGHT + PANEL.1 * (i / num_columns) as f64;
            write!(out, "<g transform=\"translate({x} {y})\">")?;
            match plot {
                Plot::Lines(lines) => lines.write(&mut out)?,
                Plot::Bars(bars) => bars.write(&mut out)?,
            }
            write!(out, "</g>")?;
        }
        writeln!(out, "</svg>")?;
        out.flush()
    }
}

/// A panel's title and, if there is more than one, what its series are called.
fn write_title(out: &mut dyn Write, title: &str, names: &[&str]) -> io::Result<()> {
    let [left, ..] = MARGINS;
    write!(out, "<text class=\"h2\" x=\"{left}\" y=\"20\">{}</text>", escape(title))?;
    let mut x = left;
    for (i, name) in names.iter().enumerate().filter(|_| names.len() > 1) {
        let colour = i % NUM_COLOURS;
        write!(
            out,
            "<rect class=\"f{colour}\" x=\"{x:.1}\" y=\"32\" width=\"12\" height=\"12\" \
             rx=\"2\"/><text class=\"soft\" x=\"{:.1}\" y=\"42\">{}</text>",
            x + 17.0,
            escape(name)
        )?;
        x += 36.0 + LETTER_WIDTH * name.chars().count() as f64;
    }
    Ok(())
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn svg(plots: Vec<Plot>) -> String {
        let sheet = Sheet { heading: "a < b".into(), note: "1 & 2".into(), plots };
        let mut out = Vec::new();
        sheet.write_svg(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    fn line(points: &[(f64, f64)]) -> Lines {
        Lines {
            title: "rate".into(),
            x_label: "at once".into(),
            y_label: "tok/s".into(),
            is_x_log: false,
            lines: vec![Line { name: "a".into(), points: points.to_vec() }],
        }
    }

    /// What is plotted is 466 units wide and 214 high, from (74, 58).
    #[test]
    fn points_are_where_their_values_are() {
        let text = svg(vec![Plot::Lines(line(&[(0.0, 0.0), (5.0, 50.0), (10.0, 100.0)]))]);
        assert!(text.contains("points=\"74.0,272.0 307.0,165.0 540.0,58.0\""), "{text}");
        assert!(text.contains("a &lt; b") && text.contains("1 &amp; 2"));
        assert!(!text.contains("href"), "asks nobody for anything");
    }

    #[test]
    fn a_long_heading_has_room() {
        let heading = "w".repeat(90);
        let sheet = Sheet { heading, note: String::new(), plots: vec![Plot::Lines(line(&[]))] };
        let mut out = Vec::new();
        sheet.write_svg(&mut out).unwrap();
        // 90 letters of 11 units and the margins, where a panel has 580.
        assert!(String::from_utf8(out).unwrap().contains("viewBox=\"0 0 1030 "));
    }

    #[test]
    fn bars_are_as_long_as_their_values() {
        let bar = |label: &str, values: Vec<f64>| Bar { label: label.into(), values };
        let bars = Bars {
            title: "share".into(),
            unit: "%".into(),
            names: vec!["on".into(), "off".into()],
            bars: vec![bar("busy", vec![100.0, 50.0])],
        };
        let text = svg(vec![Plot::Bars(bars)]);
        let widths: Vec<f64> = text
            .split("class=\"bar ")
            .skip(1)
            .map(|rest| rest.split("width=\"").nth(1).unwrap().split('"').next().unwrap())
            .map(|width| width.parse().unwrap())
            .collect();
        assert_eq!(widths.len(), 2);
        assert!((widths[0] / widths[1] - 2.0).abs() < 1e-3, "{widths:?}");
    }

    #[test]
    fn nothing_and_odd_values_do_no_harm() {
        svg(Vec::new());
        svg(vec![Plot::Lines(line(&[]))]);
        let text = svg(vec![Plot::Lines(line(&[(1.0, f64::NAN), (1.0, 2.0)]))]);
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        let none = Bars { title: "x".into(), unit: "s".into(), names: vec![], bars: vec![] };
        svg(vec![Plot::Bars(none)]);
    }
}
