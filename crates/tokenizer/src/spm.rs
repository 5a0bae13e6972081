//! Merging by score, as SentencePiece does it: GGUF's `llama` family.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use crate::TokenizerError;
use crate::token_table::TokenKind;

/// The character that stands for a space inside pieces.
pub(crate) const SPACE_MARK: char = '\u{2581}';

/// Reads the name of a byte's piece: `<0xE2>`.
pub(crate) fn read_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let is_hex = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    if is_hex { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// What a piece is to the encoder.
#[derive(Clone, Copy, Debug)]
struct Piece {
    id: u32,
    score: f32,
    /// An unused piece may be passed through on the way to a longer one, but never comes out.
    is_unused: bool,
}

/// Encodes by merging neighbours into the piece of highest score until none is left.
///
/// # Source
/// Kudo and Richardson 2018, and `src/bpe_model.cc` of SentencePiece: the queue of pairs, the
/// leftmost first among equal scores, and unused pieces taken apart again at the end.
#[derive(Debug)]
pub(crate) struct Spm {
    pieces: HashMap<String, Piece>,
    /// By byte: the piece that stands for it when nothing else does.
    byte_ids: [Option<u32>; 256],
    unk: Option<u32>,
    /// Whether every text starts with a space that the user did not type.
    pub(crate) adds_space_prefix: bool,
}

impl Spm {
    pub(crate) fn new(unk: Option<u32>, adds_space_prefix: bool) -> Self {
        Self { pieces: HashMap::new(), byte_ids: [None; 256], unk, adds_space_prefix }
    }

    /// Adds a piece that text can become.
    pub(crate) fn add_piece(&mut self, text: &str, id: u32, score: f32, kind: TokenKind) {
        let is_unused = kind == TokenKind::Unused;
        let score = score + 0.0; // -0.0 and 0.0 are one score, but not one in a total order
        self.pieces.entry(text.to_string()).or_insert(Piece { id, score, is_unused });
    }

    /// Adds the piece that stands for one byte.
    pub(crate) fn add_byte(&mut self, byte: u8, id: u32) {
        self.byte_ids[usize::from(byte)].get_or_insert(id);
    }

    /// Appends the ids of `text` to `ids`. `after_token`: the text follows a token that was
    /// matched whole, or stands at the start; there the space prefix goes.
    pub(crate) fn encode(
        &self,
        text: &str,
        after_token: bool,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        if text.is_empty() {
            return Ok(());
        }
        let mut marked = String::with_capacity(text.len() + text.len() / 4 + 3);
        if self.adds_space_prefix && after_token {
            marked.push(SPACE_MARK);
        }
        marked.extend(text.chars().map(|c| if c == ' ' { SPACE_MARK } else { c }));
        let mut merger = Merger::new(self, &marked);
        merger.run();
        let symbols = merger.symbols;
        for symbol in symbols.iter().filter(|symbol| symbol.len > 0) {
            let text = &marked[symbol.start..symbol.start + symbol.len];
            self.emit(text, &merger.unused_halves, ids)?;
        }
        Ok(())
    }

    /// Appends the ids of one symbol, taking unused pieces apart.
    fn emit(
        &self,
        text: &str,
        unused_halves: &HashMap<&str, usize>,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        let mut todo = vec![text];
        while let Some(text) = todo.pop() {
            match (self.pieces.get(text), unused_halves.get(text)) {
                (Some(piece), Some(&middle)) if piece.is_unused => {
                    todo.extend([&text[middle..], &text[..middle]]);
                }
                (Some(piece), _) => ids.push(piece.id),
                (None, _) => self.emit_bytes(text, ids)?,
            }
        }
        Ok(())
    }

    fn emit_bytes(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let by_byte: Option<Vec<u32>> =
            text.bytes().map(|byte| self.byte_ids[usize::from(byte)]).collect();
        match (by_byte, self.unk) {
            (Some(bytes), _) => ids.extend(bytes),
            (None, Some(unk)) => ids.push(unk),
            (None, None) => {
                let reason = format!("no token stands for {text:?}, nor for unknown text");
                return Err(TokenizerError::Encode(reason));
            }
        }
        Ok(())
    }
}

/// A stretch of the text that is one piece so far; `len` 0 once merged into its left neighbour.
#[derive(Clone, Copy, Debug)]
struct Symbol {
    start: usize,
    len: usize,
    previous: Option<usize>,
    next: Option<usize>,
}

/// Two neighbours that would form a piece. `len` tells whether either has changed since.
#[derive(Clone, Copy, Debug)]
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    len: usize,
}

impl Ord for Pair {
    /// The highest score is greatest, then the leftmost.
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Pair {}

/// The state of merging one text. Each pair enters the queue once: O(n log n) for n characters.
struct Merger<'m> {
    spm: &'m Spm,
    text: &'m str,
    symbols: Vec<Symbol>,
    pairs: BinaryHeap<Pair>,
    /// By unused piece that was formed: where its left half ends.
    unused_halves: HashMap<&'m str, usize>,
}

impl<'m> Merger<'m> {
    fn new(spm: &'m Spm, text: &'m str) -> Self {
        let starts: Vec<(usize, char)> = text.char_indices().collect();
        let last = starts.len().saturating_sub(1);
        let symbol = |(index, &(start, c)): (usize, &(usize, char))| Symbol {
            start,
            len: c.len_utf8(),
            previous: index.checked_sub(1),
            next: (index < last).then_some(index + 1),
        };
        let symbols: Vec<Symbol> = starts.iter().enumerate().map(symbol).collect();
        let pairs = BinaryHeap::with_capacity(symbols.len());
        Self { spm, text, symbols, pairs, unused_halves: HashMap::new() }
    }

    fn run(&mut self) {
        for left in 0..self.symbols.len().saturating_sub(1) {
            self.consider(Some(left), Some(left + 1));
        }
        while let Some(pair) = self.pairs.pop() {
            let (left, right) = (self.symbols[pair.left], self.symbols[pair.right]);
            if left.len == 0 || right.len == 0 || left.len + right.len != pair.len {
                continue;
            }
            self.symbols[pair.left].len = pair.len;
            self.symbols[pair.left].next = right.next;
            self.symbols[pair.right].len = 0;
            if let Some(next) = right.next {
                self.symbols[next].previous = Some(pair.left);
            }
            self.consider(left.previous, Some(pair.left));
            self.consider(Some(pair.left), right.next);
        }
    }

    /// Queues two neighbours if they form a piece.
    fn consider(&mut self, left: Option<usize>, right: Option<usize>) {
        let (Some(left), Some(right)) = (left, right) else { return };
        let start = self.symbols[left].start;
        let len = self.symbols[left].len + self.symbols[right].len;
        let text = &self.text[start..start + len];
        let Some(piece) = self.spm.pieces.get(text) else { return };
        if piece.is_unused {
            self.unused_halves.insert(text, self.symbols[left].len);
        }
        self.pairs.push(Pair { score: piece.score, left, right, len });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spm(pieces: &[(&str, f32)]) -> Spm {
        let mut spm = Spm::new(Some(0), true);
        for (id, &(text, score)) in (1..).zip(pieces) {
            spm.add_piece(text, id, score, TokenKind::Normal);
        }
        spm
    }

    fn encode(spm: &Spm, text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        spm.encode(text, true, &mut ids).unwrap();
        ids
    }

    #[test]
    fn the_best_score_merges_first_then_the_leftmost() {
        let pieces = [("a", -9.0), ("b", -9.0), ("▁", -9.0), ("ab", -1.0), ("▁a", -2.0)];
        assert_eq!(encode(&spm(&pieces), "ab"), [3, 4]);
        assert_eq!(encode(&spm(&pieces), "a"), [5]);
        let equal = [("a", -9.0), ("▁", -9.0), ("aa", -1.0)];
        assert_eq!(encode(&spm(&equal), "aaa"), [2, 3, 1]);
    }

    #[test]
    fn unknown_text_falls_back_to_bytes_then_to_unk_then_fails() {
        let mut spm = spm(&[("▁", -1.0)]);
        assert_eq!(encode(&spm, "é"), [1, 0]);
        spm.add_byte(0xC3, 7);
        assert_eq!(encode(&spm, "é"), [1, 0], "both bytes are needed");
        spm.add_byte(0xA9, 8);
        assert_eq!(encode(&spm, "é"), [1, 7, 8]);
        spm.unk = None;
        assert!(spm.encode("x", true, &mut Vec::new()).is_err());
    }

    #[test]
    fn unused_pieces_are_taken_apart_again() {
        let mut spm = spm(&[("a", -9.0), ("b", -9.0), ("c", -9.0), ("▁", -9.0), ("abc", -3.0)]);
        spm.add_piece("ab", 9, -1.0, TokenKind::Unused);
        assert_eq!(encode(&spm, "ab"), [4, 1, 2]);
        assert_eq!(encode(&spm, "abc"), [4, 5], "the unused piece leads to a longer one");
    }

    #[test]
    fn the_space_prefix_goes_only_where_a_text_starts() {
        let spm = spm(&[("a", -9.0), ("▁", -9.0), ("▁a", -1.0)]);
        let mut ids = Vec::new();
        spm.encode("a", false, &mut ids).unwrap();
        spm.encode("a a", true, &mut ids).unwrap();
        spm.encode("", true, &mut ids).unwrap();
        assert_eq!(ids, [1, 3, 3]);
    }
}
