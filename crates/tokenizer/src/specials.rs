//! Finds tokens that are matched whole, before ordinary text is split.

use aho_corasick::{AhoCorasick, MatchKind};

use crate::TokenizerError;
use crate::token_table::TokenKind;

/// How the names of control tokens inside a text are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    /// As ordinary text: what a user typed cannot steer the model.
    AsText,
    /// As the control tokens that they name: for rendered chat templates.
    Parse,
}

/// A stretch of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Segment<'t> {
    /// Ordinary text, never empty.
    Text(&'t str),
    /// A token that was found whole.
    Token(u32),
}

/// Splits a text at the tokens that are matched whole.
///
/// The leftmost match wins, then the longest. llama.cpp searches for one token after the other,
/// longest first, which differs only where two of them overlap.
#[derive(Debug)]
pub(crate) struct SpecialFinder {
    all: Matcher,
    user_defined: Matcher,
}

impl SpecialFinder {
    /// Takes `(text, id, kind)` of the control and user-defined tokens.
    pub(crate) fn new(tokens: &[(&str, u32, TokenKind)]) -> Result<Self, TokenizerError> {
        let all: Vec<_> = tokens.iter().map(|&(text, id, _)| (text, id)).collect();
        let user_defined: Vec<_> = tokens
            .iter()
            .filter(|(_, _, kind)| *kind == TokenKind::UserDefined)
            .map(|&(text, id, _)| (text, id))
            .collect();
        Ok(Self { all: Matcher::new(&all)?, user_defined: Matcher::new(&user_defined)? })
    }

    /// Splits `text`; the segments cover it in order.
    pub(crate) fn split<'t>(&self, text: &'t str, special: Special) -> Vec<Segment<'t>> {
        match special {
            Special::AsText => self.user_defined.split(text),
            Special::Parse => self.all.split(text),
        }
    }
}

#[derive(Debug)]
struct Matcher {
    automaton: AhoCorasick,
    ids: Vec<u32>,
}

impl Matcher {
    fn new(tokens: &[(&str, u32)]) -> Result<Self, TokenizerError> {
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens.iter().map(|(text, _)| text))
            .map_err(|error| TokenizerError::BadVocab(format!("special tokens: {error}")))?;
        Ok(Self { automaton, ids: tokens.iter().map(|&(_, id)| id).collect() })
    }

    fn split<'t>(&self, text: &'t str) -> Vec<Segment<'t>> {
        let mut segments = Vec::new();
        let mut done = 0;
        for found in self.automaton.find_iter(text) {
            if found.start() > done {
                segments.push(Segment::Text(&text[done..found.start()]));
            }
            segments.push(Segment::Token(self.ids[found.pattern().as_usize()]));
            done = found.end();
        }
        if done < text.len() {
            segments.push(Segment::Text(&text[done..]));
        }
        segments
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_tokens_are_found_only_when_asked() {
        let finder = SpecialFinder::new(&[
            ("<|a|>", 7, TokenKind::Control),
            ("<|a|>b", 8, TokenKind::Control),
            ("\n\n", 9, TokenKind::UserDefined),
        ])
        .unwrap();
        let text = "x<|a|>b\n\n<|a|>";
        assert_eq!(
            finder.split(text, Special::Parse),
            [Segment::Text("x"), Segment::Token(8), Segment::Token(9), Segment::Token(7)]
        );
        assert_eq!(
            finder.split(text, Special::AsText),
            [Segment::Text("x<|a|>b"), Segment::Token(9), Segment::Text("<|a|>")]
        );
        assert_eq!(finder.split("", Special::Parse), []);
    }
}
