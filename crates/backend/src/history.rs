//! Tokens that a step does not compute and that must be counted all the same, for penalties: keys
//! and values of a prefix were found, or came back from the host. Word by word:
//!
//! ```text
//! token_ids   [num_tokens]      the rows' tokens, one row after the other
//! positions   [num_tokens]      absolute position in the sequence
//! row_starts  [num_rows + 1]    first token of each row
//! row_states  [num_rows * 3]    see `RowState`
//! ```
//!
//! They travel apart from a step's inputs, as few steps have any.

use std::ops::Range;

use crate::RowState;

/// How many tokens of how many rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct HistoryShape {
    pub num_tokens: usize,
    pub num_rows: usize,
}

/// Where each section lies in the words.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct HistoryLayout {
    pub token_ids: Range<usize>,
    pub positions: Range<usize>,
    pub row_starts: Range<usize>,
    pub row_states: Range<usize>,
}

impl HistoryShape {
    /// The sections' places.
    pub fn layout(self) -> HistoryLayout {
        let Self { num_tokens, num_rows } = self;
        let row_starts = 2 * num_tokens..2 * num_tokens + num_rows + 1;
        HistoryLayout {
            token_ids: 0..num_tokens,
            positions: num_tokens..2 * num_tokens,
            row_states: row_starts.end..row_starts.end + num_rows * RowState::WORDS,
            row_starts,
        }
    }

    /// Words of a history of this shape.
    pub fn num_words(self) -> usize {
        self.layout().row_states.end
    }
}

/// A step's history while the host puts it together. Kept between steps: its vectors are reused.
#[derive(Clone, Debug, Default)]
pub struct HistoryInputs {
    token_ids: Vec<u32>,
    positions: Vec<u32>,
    row_starts: Vec<u32>,
    row_states: Vec<RowState>,
}

impl HistoryInputs {
    /// Empties everything and keeps the memory.
    pub fn clear(&mut self) {
        self.token_ids.clear();
        self.positions.clear();
        self.row_starts.clear();
        self.row_states.clear();
    }

    /// Adds the first tokens of a sequence.
    pub fn push(&mut self, state: RowState, tokens: &[u32]) {
        self.row_starts.push(word(self.token_ids.len()));
        self.token_ids.extend_from_slice(tokens);
        self.positions.extend(0..word(tokens.len()));
        self.row_states.push(state);
    }

    /// How much there is.
    pub fn shape(&self) -> HistoryShape {
        HistoryShape { num_tokens: self.token_ids.len(), num_rows: self.row_states.len() }
    }

    /// Writes everything into `words` and returns the shape.
    ///
    /// # Panics
    /// If `words` is shorter than [`HistoryShape::num_words`].
    pub fn pack(&self, words: &mut [u32]) -> HistoryShape {
        let shape = self.shape();
        let at = shape.layout();
        words[at.token_ids].copy_from_slice(&self.token_ids);
        words[at.positions].copy_from_slice(&self.positions);
        let end = at.row_starts.end - 1;
        words[at.row_starts.start..end].copy_from_slice(&self.row_starts);
        words[end] = word(shape.num_tokens);
        let states = words[at.row_states].chunks_exact_mut(RowState::WORDS);
        for (chunk, state) in states.zip(&self.row_states) {
            chunk.copy_from_slice(&state.to_words());
        }
        shape
    }
}

fn word(value: usize) -> u32 {
    u32::try_from(value).expect("a history has fewer than 2^32 tokens")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_follow_each_other() {
        let mut inputs = HistoryInputs::default();
        let state = |slot| RowState { state_slot: Some(slot), prompt_len: 2, fresh: true };
        inputs.push(state(5), &[7, 8, 9]);
        inputs.push(state(6), &[4]);
        let shape = inputs.shape();
        assert_eq!(shape, HistoryShape { num_tokens: 4, num_rows: 2 });
        let mut words = vec![99; shape.num_words() + 1];
        assert_eq!(inputs.pack(&mut words), shape);
        let rows = [state(5).to_words(), state(6).to_words()].concat();
        assert_eq!(words, [&[7, 8, 9, 4, 0, 1, 2, 0, 0, 3, 4][..], &rows, &[99]].concat());
        inputs.clear();
        assert_eq!(inputs.pack(&mut words), HistoryShape::default());
        assert_eq!(words[0], 0, "a history of nothing is the end of its rows");
    }
}
