//! Requests that join the batch and leave it, as a strip in which each has a colour.

use std::collections::VecDeque;

use ratatui::style::{Color, Style};
use ratatui::text::{Line, Span};

/// Columns that are remembered, as many as the widest screens have.
const MAX_COLUMNS: usize = 400;
/// Lanes that are followed; those of larger batches are not shown.
const MAX_LANES: usize = 256;
/// Hues that are told apart on every terminal with 256 colours.
const HUES: [u8; 12] = [39, 208, 78, 170, 220, 75, 203, 114, 141, 180, 44, 211];

/// Who was in the batch, sample by sample: a request keeps its lane as long as it stays.
#[derive(Default)]
pub(super) struct Strip(VecDeque<Vec<Option<u64>>>);

impl Strip {
    pub(super) fn push(&mut self, batch: &[u64]) {
        let mut lanes = self.0.back().cloned().unwrap_or_default();
        lanes.iter_mut().for_each(|lane| *lane = lane.filter(|id| batch.contains(id)));
        let new: Vec<_> = batch.iter().filter(|id| !lanes.contains(&Some(**id))).collect();
        for id in new {
            match lanes.iter().position(Option::is_none) {
                Some(free) => lanes[free] = Some(*id),
                None if lanes.len() < MAX_LANES => lanes.push(Some(*id)),
                None => break,
            }
        }
        while lanes.last() == Some(&None) {
            lanes.pop();
        }
        if self.0.len() == MAX_COLUMNS {
            self.0.pop_front();
        }
        self.0.push_back(lanes);
    }

    /// The latest `width` samples, the last one rightmost; a line holds two lanes.
    pub(super) fn lines(&self, width: usize, height: usize) -> Vec<Line<'static>> {
        let skipped = self.0.len().saturating_sub(width);
        let line = |row: usize| {
            let cells = self.0.iter().skip(skipped).map(move |lanes| {
                let colour = |lane: usize| lanes.get(lane).copied().flatten().map(hue);
                cell(colour(2 * row), colour(2 * row + 1))
            });
            cells.collect::<Line<'_>>()
        };
        (0..height).map(line).collect()
    }
}

fn cell(upper: Option<Color>, lower: Option<Color>) -> Span<'static> {
    match (upper, lower) {
        (Some(upper), Some(lower)) => Span::styled("▀", Style::new().fg(upper).bg(lower)),
        (Some(upper), None) => Span::styled("▀", upper),
        (None, Some(lower)) => Span::styled("▄", lower),
        (None, None) => Span::raw(" "),
    }
}

fn hue(id: u64) -> Color {
    Color::Indexed(HUES[(id % HUES.len() as u64) as usize])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_keep_their_lanes_and_new_ones_take_free_ones() {
        let mut strip = Strip::default();
        strip.push(&[7, 8, 9]);
        strip.push(&[9, 7, 10]);
        strip.push(&[9]);
        let lanes: Vec<_> = strip.0.iter().cloned().collect();
        assert_eq!(lanes[0], [Some(7), Some(8), Some(9)]);
        assert_eq!(lanes[1], [Some(7), Some(10), Some(9)]);
        assert_eq!(lanes[2], [None, None, Some(9)]);
        let text =
            |line: &Line<'_>| line.spans.iter().map(|s| s.content.as_ref()).collect::<String>();
        let shown: Vec<_> = strip.lines(80, 2).iter().map(text).collect();
        assert_eq!(shown, ["▀▀ ", "▀▀▀"]);
        let latest: Vec<_> = strip.lines(1, 2).iter().map(text).collect();
        assert_eq!(latest, [" ", "▀"]);
    }

    #[test]
    fn what_is_remembered_has_an_end() {
        let mut strip = Strip::default();
        let all: Vec<u64> = (0..2 * MAX_LANES as u64).collect();
        (0..MAX_COLUMNS + 5).for_each(|_| strip.push(&all));
        assert_eq!((strip.0.len(), strip.0[0].len()), (MAX_COLUMNS, MAX_LANES));
    }
}
