//! Values side by side.

use std::io::{self, Write};

use super::axis::{Axis, short};
use super::{LETTER_WIDTH, MARGINS, NUM_COLOURS, PANEL, escape, write_title};

/// Horizontal bars, in groups of one value for each name.
pub struct Bars {
    /// What is shown.
    pub title: String,
    /// Behind every value.
    pub unit: String,
    /// What the values of a group are.
    pub names: Vec<String>,
    /// The groups, from the top.
    pub bars: Vec<Bar>,
}

/// A group of values.
pub struct Bar {
    /// What they belong to.
    pub label: String,
    /// In the order of [`Bars::names`].
    pub values: Vec<f64>,
}

/// A bar is at most so high.
const MAX_HEIGHT: f64 = 26.0;
/// Labels are cut beyond so many letters.
const MAX_LETTERS: usize = 34;

impl Bars {
    pub(super) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let [_, top, right, _] = MARGINS;
        let names: Vec<_> = self.names.iter().map(String::as_str).collect();
        write_title(out, &self.title, &names)?;
        let longest = self.bars.iter().map(|bar| cut(&bar.label).chars().count()).max();
        let left = 16.0 + LETTER_WIDTH * longest.unwrap_or(0) as f64;
        // Room for what is written behind the longest bar.
        let room = LETTER_WIDTH * (8 + self.unit.chars().count()) as f64;
        let values = || self.bars.iter().flat_map(|bar| bar.values.iter().copied());
        let most = values().filter(|value| value.is_finite()).fold(0.0, f64::max);
        let axis = Axis::around([0.0, most].into_iter(), false, 0.0, PANEL.0 - right - left - room);
        let num_slots: usize = self.bars.iter().map(|bar| bar.values.len() + 1).sum();
        let height = ((PANEL.1 - top - 10.0) / num_slots.max(1) as f64).min(MAX_HEIGHT);
        let mut y = top + 4.0;
        for Bar { label, values } in &self.bars {
            let middle = y + height * values.len() as f64 / 2.0 + 4.0;
            write!(
                out,
                "<text class=\"soft end\" x=\"{:.1}\" y=\"{middle:.1}\">{}</text>",
                left - 6.0,
                escape(&cut(label))
            )?;
            for (i, value) in values.iter().enumerate() {
                let width = axis.place(*value).unwrap_or(0.0);
                write!(
                    out,
                    "<rect class=\"bar f{}\" x=\"{left:.1}\" y=\"{:.1}\" width=\"{width:.2}\" \
                     height=\"{:.1}\"/><text x=\"{:.1}\" y=\"{:.1}\">{} {}</text>",
                    i % NUM_COLOURS,
                    y + 1.0,
                    (height - 2.0).max(1.0),
                    left + width + 6.0,
                    y + height / 2.0 + 4.0,
                    short(if value.is_finite() { *value } else { 0.0 }),
                    escape(&self.unit)
                )?;
                y += height;
            }
            y += height * 0.7;
        }
        Ok(())
    }
}

fn cut(label: &str) -> String {
    if label.chars().count() <= MAX_LETTERS {
        return label.to_owned();
    }
    label.chars().take(MAX_LETTERS - 1).chain(['…']).collect()
}
