//! What a model thinks before it answers, told from the answer.

use super::{Piece, marker};

/// What a model writes around its thoughts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReasoningTags {
    pub(crate) open: &'static str,
    pub(crate) close: &'static str,
}

/// Of DeepSeek R1, Qwen3 and most others; of Magistral.
const KNOWN: [ReasoningTags; 2] = [
    ReasoningTags { open: "<think>", close: "</think>" },
    ReasoningTags { open: "[THINK]", close: "[/THINK]" },
];

impl ReasoningTags {
    /// The tags that a chat template writes or cuts off.
    pub(crate) fn of_template(mentions: impl Fn(&str) -> bool) -> Option<Self> {
        KNOWN.into_iter().find(|tags| mentions(tags.open) || mentions(tags.close))
    }

    /// Whether a prompt ends inside a block of thoughts that it opened itself.
    pub(crate) fn are_open_after(&self, prompt: &str) -> bool {
        let last = prompt.rfind(self.open);
        last.is_some_and(|at| prompt[at + self.open.len()..].trim().is_empty())
    }
}

/// Splits a text into thoughts and answer. White space around both is left out.
#[derive(Debug)]
pub(crate) struct ReasoningSplitter {
    tags: ReasoningTags,
    state: State,
    /// What cannot be told yet.
    held: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Thoughts come first or not at all.
    Start,
    /// In the thoughts, of which some were told or none.
    Thoughts {
        has_begun: bool,
    },
    /// White space after the thoughts.
    Gap,
    Answer,
}

impl ReasoningSplitter {
    /// `is_open`: the prompt has opened the thoughts.
    pub(crate) fn new(tags: ReasoningTags, is_open: bool) -> Self {
        let state = if is_open { State::Thoughts { has_begun: false } } else { State::Start };
        Self { tags, state, held: String::new() }
    }

    /// Whether the answer has not begun.
    pub(crate) fn is_thinking(&self) -> bool {
        matches!(self.state, State::Thoughts { .. })
    }

    /// Takes more text. Thoughts go to `pieces`; returned is what belongs to the answer.
    pub(crate) fn push(&mut self, text: &str, pieces: &mut Vec<Piece>) -> String {
        if self.state == State::Answer {
            return text.to_owned();
        }
        self.held += text;
        if self.state == State::Start {
            self.start();
        }
        if self.is_thinking() {
            self.think(pieces);
        }
        self.answer()
    }

    /// Ends the text.
    pub(crate) fn finish(&mut self, pieces: &mut Vec<Piece>) -> String {
        let rest = std::mem::take(&mut self.held);
        match self.state {
            State::Thoughts { .. } => {
                Piece::Reasoning(rest.trim_end().to_owned()).join(pieces);
                String::new()
            }
            State::Gap => String::new(),
            State::Start | State::Answer => rest,
        }
    }

    fn start(&mut self) {
        let text = self.held.trim_start();
        if let Some(rest) = text.strip_prefix(self.tags.open) {
            self.held = rest.to_owned();
            self.state = State::Thoughts { has_begun: false };
        } else if !self.tags.open.starts_with(text) {
            self.state = State::Answer;
        }
    }

    fn think(&mut self, pieces: &mut Vec<Piece>) {
        if self.state == (State::Thoughts { has_begun: false }) {
            self.held = self.held.trim_start().to_owned();
            self.state = State::Thoughts { has_begun: !self.held.is_empty() };
        }
        let close = self.tags.close;
        let end = self.held.find(close);
        let unsure = end.unwrap_or(self.held.len() - marker::num_held(&self.held, &[close]));
        // White space is left out if the end comes right after it.
        let sure = self.held[..unsure].trim_end().len();
        Piece::Reasoning(self.held[..sure].to_owned()).join(pieces);
        match end {
            Some(at) => {
                self.held.drain(..at + close.len());
                self.state = State::Gap;
            }
            None => drop(self.held.drain(..sure)),
        }
    }

    fn answer(&mut self) -> String {
        if self.state == State::Gap && !self.held.trim_start().is_empty() {
            self.held = self.held.trim_start().to_owned();
            self.state = State::Answer;
        }
        if self.state == State::Answer { std::mem::take(&mut self.held) } else { String::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Thoughts and answer, when the text comes in pieces of so many characters.
    fn split(text: &str, is_open: bool, piece_len: usize) -> (String, String) {
        let mut splitter = ReasoningSplitter::new(KNOWN[0], is_open);
        let (mut pieces, mut answer) = (Vec::new(), String::new());
        let chars: Vec<char> = text.chars().collect();
        for piece in chars.chunks(piece_len) {
            answer += &splitter.push(&piece.iter().collect::<String>(), &mut pieces);
        }
        answer += &splitter.finish(&mut pieces);
        let thoughts = pieces.into_iter().map(|piece| match piece {
            Piece::Reasoning(text) => text,
            other => panic!("{other:?}"),
        });
        (thoughts.collect(), answer)
    }

    #[test]
    fn thoughts_and_answer() {
        let check = |text: &str, is_open: bool, thoughts: &str, answer: &str| {
            for len in [1, 2, 3, 7, 100] {
                let expected = (thoughts.to_owned(), answer.to_owned());
                assert_eq!(split(text, is_open, len), expected, "{text:?} by {len}");
            }
        };
        check("<think>\nSo.\n\n1 < 2\n</think>\n\nYes.\n", false, "So.\n\n1 < 2", "Yes.\n");
        check("hm </think> Yes", true, "hm", "Yes");
        check("\n<think>\n\n</think>\n\nYes", false, "", "Yes");
        check("No <think>s</think>", false, "", "No <think>s</think>");
        check("<thin", false, "", "<thin");
        check("<think>cut </thi", false, "cut </thi", "");
        check("cut \n", true, "cut", "");
        check("", true, "", "");
        check("  plain", false, "", "  plain");
        check("<think>a</think>b</think>c", false, "a", "b</think>c");
    }

    #[test]
    fn prompts_that_open_the_thoughts() {
        assert!(KNOWN[0].are_open_after("<|im_start|>assistant\n<think>\n"));
        assert!(!KNOWN[0].are_open_after("assistant\n<think>\n\n</think>\n\n"));
        assert!(!KNOWN[0].are_open_after("user: what is <think>?\nassistant\n"));
        assert!(!KNOWN[0].are_open_after("assistant\n"));
    }
}
