//! What sampling needs to know of the token before, word by word.
//!
//! A step's other inputs are staged while the step before still computes. Some rows need more:
//! which tokens a grammar allows next depends on the token that is being computed. The host works
//! that out while the device runs the forward pass, and ships it in a copy of its own:
//!
//! ```text
//! h2d       inputs N+1 ●                                late N+1 ●
//! compute   ... N        ╲─ forward N+1 ─────────────────────────  ╲─ sample N+1
//! host                     collect N ─ what may come next? ─╱
//! ```
//!
//! The words begin with a header for each late row; what it points to follows in any order:
//!
//! ```text
//! headers  [num_late_rows * 4]  first word of the mask or NONE, first word of the bias, its
//!                               length, zero
//! masks    [vocab_size / 32]    bit i % 32 of word i / 32 is set if token i may be drawn
//! bias     [2 * length]         token ids, then as many f32 to add to their logits
//! ```

use std::ops::Range;

/// Most entries of a row's late bias.
pub const MAX_LATE_BIAS: usize = 512;

/// Words of a header.
const HEADER_WORDS: usize = 4;

/// Words of a mask of `vocab_size` tokens.
pub const fn mask_words(vocab_size: usize) -> usize {
    vocab_size.div_ceil(32)
}

/// Most words of a step's late inputs.
pub const fn late_words(max_rows: usize, vocab_size: usize) -> usize {
    max_rows * (HEADER_WORDS + mask_words(vocab_size) + 2 * MAX_LATE_BIAS)
}

/// Puts a step's late inputs together.
///
/// A row that nothing is written for may draw any token.
pub struct LateWriter<'a> {
    words: &'a mut [u32],
    len: usize,
}

impl<'a> LateWriter<'a> {
    /// Starts with `num_rows` rows that may draw any token.
    ///
    /// # Panics
    /// If `words` is too short for them; so do the methods.
    pub fn new(words: &'a mut [u32], num_rows: usize) -> Self {
        let len = num_rows * HEADER_WORDS;
        for header in words[..len].chunks_exact_mut(HEADER_WORDS) {
            header.copy_from_slice(&[u32::MAX, 0, 0, 0]);
        }
        Self { words, len }
    }

    /// Row `row` draws none but the tokens whose bits are set.
    pub fn mask(&mut self, row: usize, mask: &[u32]) {
        self.words[row * HEADER_WORDS] = self.append(mask.iter().copied());
    }

    /// Adds to logits of row `row`. At most [`MAX_LATE_BIAS`] entries.
    pub fn bias(&mut self, row: usize, bias: &[(u32, f32)]) {
        assert!(bias.len() <= MAX_LATE_BIAS, "{} entries of late bias", bias.len());
        let start = self.append(bias.iter().map(|(id, _)| *id));
        self.append(bias.iter().map(|(_, value)| value.to_bits()));
        let header = &mut self.words[row * HEADER_WORDS..][..HEADER_WORDS];
        header[1..3].copy_from_slice(&[start, bias.len() as u32]);
    }

    /// Words written.
    pub fn num_words(&self) -> usize {
        self.len
    }

    fn append(&mut self, words: impl ExactSizeIterator<Item = u32>) -> u32 {
        let start = self.len;
        self.len += words.len();
        for (to, word) in self.words[start..self.len].iter_mut().zip(words) {
            *to = word;
        }
        u32::try_from(start).expect("a step's late inputs fit 32 bits")
    }
}

/// Where a late row's words lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LateRow {
    /// Tokens that may be drawn; `None`: all.
    pub mask: Option<Range<usize>>,
    /// Tokens whose logits are shifted.
    pub bias_ids: Range<usize>,
    /// By how much.
    pub bias_values: Range<usize>,
}

impl LateRow {
    /// Reads the header of row `row`.
    pub fn read(words: &[u32], row: u32, vocab_size: usize) -> Self {
        let header = &words[row as usize * HEADER_WORDS..][..HEADER_WORDS];
        let [mask, bias, len] = [header[0], header[1], header[2]].map(|word| word as usize);
        let has_mask = header[0] != u32::MAX;
        Self {
            mask: has_mask.then(|| mask..mask + mask_words(vocab_size)),
            bias_ids: bias..bias + len,
            bias_values: bias + len..bias + 2 * len,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_read_as_they_were_written() {
        let mut words = vec![0xdead_beef; late_words(3, 40)];
        let mut writer = LateWriter::new(&mut words, 3);
        writer.bias(2, &[(7, 1.5), (9, f32::NEG_INFINITY)]);
        writer.mask(2, &[5, 6]);
        writer.mask(0, &[1, 2]);
        assert_eq!(writer.num_words(), 12 + 4 + 2 + 2);
        let row = |row| LateRow::read(&words, row, 40);
        assert_eq!(words[row(0).mask.unwrap()], [1, 2]);
        assert!(row(0).bias_ids.is_empty());
        assert_eq!(row(1).mask, None);
        assert!(row(1).bias_ids.is_empty());
        assert_eq!(words[row(2).mask.unwrap()], [5, 6]);
        assert_eq!(words[row(2).bias_ids], [7, 9]);
        assert_eq!(words[row(2).bias_values], [1.5_f32, f32::NEG_INFINITY].map(f32::to_bits));
    }
}
