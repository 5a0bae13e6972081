//! Token ids to text, one at a time.

use std::sync::Arc;

use crate::token_table::{TokenKind, TokenTable};

/// Where the decoded tokens stand in the text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TextPosition {
    /// At its start: the space that some encoders put before every text is taken off.
    #[default]
    Start,
    /// After other text, as a completion after its prompt: that space is real and stays.
    Continuing,
}

/// How to decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeOptions {
    /// Leave control tokens out of the text. Default: true.
    pub skip_special_tokens: bool,
    /// Where the tokens stand in the text. Default: at its start.
    pub position: TextPosition,
}

impl Default for DecodeOptions {
    fn default() -> Self {
        Self { skip_special_tokens: true, position: TextPosition::Start }
    }
}

/// Decodes tokens as they arrive; each push costs the length of its own token.
///
/// ```text
/// tokens   F0 9F        A6        99 21        (one emoji over three tokens, then "!")
/// pending  F0 9F     F0 9F A6     -
/// pushed   ""           ""        "🦙!"
/// ```
#[derive(Clone, Debug)]
pub struct DecodeStream {
    table: Arc<TokenTable>,
    skip_special_tokens: bool,
    strip_next_space: bool,
    /// The start of a character whose other bytes have not come: at most three bytes.
    pending: Vec<u8>,
}

impl DecodeStream {
    pub(crate) fn new(table: Arc<TokenTable>, options: DecodeOptions) -> Self {
        let strip_next_space =
            table.strips_first_space() && options.position == TextPosition::Start;
        Self {
            table,
            skip_special_tokens: options.skip_special_tokens,
            strip_next_space,
            pending: Vec::new(),
        }
    }

    /// Takes the next token and returns the text that it completes, which may be empty.
    ///
    /// Bytes that can never become a character turn into U+FFFD, one for each maximal prefix of
    /// a character, as `String::from_utf8_lossy` does.
    pub fn push(&mut self, id: u32) -> String {
        match self.table.kind(id) {
            TokenKind::Control if self.skip_special_tokens => String::new(),
            _ => self.push_shown(id),
        }
    }

    /// As [`Self::push`], but never leaves out a control token.
    pub fn push_shown(&mut self, id: u32) -> String {
        let mut bytes = match self.table.kind(id) {
            TokenKind::Unused => return String::new(),
            _ => self.table.bytes(id),
        };
        if self.strip_next_space && !bytes.is_empty() {
            self.strip_next_space = false;
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
        self.pending.extend_from_slice(bytes);
        take_whole_characters(&mut self.pending)
    }

    /// Ends the text: an unfinished character turns into U+FFFD.
    pub fn finish(&mut self) -> String {
        let rest = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        rest
    }
}

/// Removes all from `pending` but a trailing start of a character, and returns it as text.
fn take_whole_characters(pending: &mut Vec<u8>) -> String {
    let mut unfinished = 0;
    if let Some(last) = pending.utf8_chunks().last() {
        let invalid = last.invalid();
        let is_prefix = std::str::from_utf8(invalid).is_err_and(|e| e.error_len().is_none());
        unfinished = if is_prefix { invalid.len() } else { 0 };
    }
    let whole = pending.len() - unfinished;
    let text = String::from_utf8_lossy(&pending[..whole]).into_owned();
    pending.drain(..whole);
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn stream(tokens: &[&[u8]], options: DecodeOptions) -> DecodeStream {
        let mut table = TokenTable::new(true);
        for bytes in tokens {
            let kind =
                if bytes.starts_with(b"<|") { TokenKind::Control } else { TokenKind::Normal };
            table.push(bytes, kind).unwrap();
        }
        DecodeStream::new(Arc::new(table), options)
    }

    fn pushes(tokens: &[&[u8]], options: DecodeOptions) -> Vec<String> {
        let mut stream = stream(tokens, options);
        let mut texts: Vec<_> = (0..tokens.len()).map(|id| stream.push(id as u32)).collect();
        texts.push(stream.finish());
        texts
    }

    #[test]
    fn characters_are_held_back_until_whole() {
        let llama = "🦙!".as_bytes();
        let texts = pushes(&[&llama[..2], &llama[2..3], &llama[3..]], DecodeOptions::default());
        assert_eq!(texts, ["", "", "🦙!", ""]);
    }

    #[test]
    fn broken_characters_turn_into_replacements() {
        let check = |tokens: &[&[u8]], expected: &[&str]| {
            assert_eq!(pushes(tokens, DecodeOptions::default()), expected, "{tokens:?}");
        };
        check(&[b"\xF0\x9F", b"a"], &["", "\u{FFFD}a", ""]);
        check(&[b"\xC3", b"\xC3", b"\xA9"], &["", "\u{FFFD}", "é", ""]);
        check(&[b"\xFF", b"a"], &["\u{FFFD}", "a", ""]);
        check(&[b"a\xE2\x82"], &["a", "\u{FFFD}"]);
        check(&[b"\xED", b"\xA0"], &["", "\u{FFFD}\u{FFFD}", ""]);
    }

    #[test]
    fn control_tokens_are_skipped_unless_asked() {
        let tokens: [&[u8]; 3] = [b"<|bos|>", b" a", b" b"];
        assert_eq!(pushes(&tokens, DecodeOptions::default()).concat(), "a b");
        let all = DecodeOptions { skip_special_tokens: false, ..DecodeOptions::default() };
        assert_eq!(pushes(&tokens, all).concat(), "<|bos|> a b");
        let position = TextPosition::Continuing;
        let later = DecodeOptions { position, ..DecodeOptions::default() };
        assert_eq!(pushes(&tokens, later).concat(), " a b");
    }

    proptest! {
        /// However bytes are cut into tokens, the stream equals the lossy reading of them all,
        /// and what it holds back is never more than three bytes.
        #[test]
        fn stream_equals_lossy_reading(
            tokens in prop::collection::vec(
                prop_oneof![
                    prop::collection::vec(any::<u8>(), 0..5),
                    prop::collection::vec(0x80u8..=0xFF, 1..3),
                    "\\PC{0,3}".prop_map(String::into_bytes),
                ],
                0..40,
            )
        ) {
            let slices: Vec<&[u8]> = tokens.iter().map(Vec::as_slice).collect();
            let options = DecodeOptions {
                skip_special_tokens: false,
                position: TextPosition::Continuing,
            };
            let mut stream = stream(&slices, options);
            let mut text = String::new();
            for id in 0..slices.len() {
                text += &stream.push(id as u32);
                prop_assert!(stream.pending.len() <= 3);
            }
            text += &stream.finish();
            let bytes = tokens.concat();
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }
}
