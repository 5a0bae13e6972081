//! The bytes and the kind of every token id.

use std::borrow::Cow;

use crate::TokenizerError;

/// The most ids that a vocabulary may have: ten times the largest known, far below any memory.
pub(crate) const MAX_VOCAB: usize = 1 << 22;

/// What a token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// Ordinary text.
    Normal,
    /// Ordinary text that is matched whole before anything else is split.
    UserDefined,
    /// Steers the model (begin, end, roles): not text, so skipped when decoding.
    Control,
    /// A hole in the vocabulary: stands for no text.
    Unused,
}

/// One token as log-probability lists show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenText<'a> {
    /// The bytes read as UTF-8, with U+FFFD where they are no whole character.
    pub text: Cow<'a, str>,
    /// The bytes themselves.
    pub bytes: &'a [u8],
}

/// Bytes and kind by token id. Ids past the end have no bytes: models pad their output layer.
#[derive(Debug, Default)]
pub struct TokenTable {
    bytes: Vec<u8>,
    /// Where each token's bytes end in `bytes`; they start where its predecessor's end.
    ends: Vec<usize>,
    kinds: Vec<TokenKind>,
    strips_first_space: bool,
}

impl TokenTable {
    pub(crate) fn new(strips_first_space: bool) -> Self {
        Self { strips_first_space, ..Self::default() }
    }

    /// Gives the next id its bytes and kind.
    pub(crate) fn push(&mut self, bytes: &[u8], kind: TokenKind) -> Result<(), TokenizerError> {
        if self.ends.len() == MAX_VOCAB {
            return Err(TokenizerError::BadVocab(format!("more than {MAX_VOCAB} tokens")));
        }
        self.bytes.extend_from_slice(bytes);
        self.ends.push(self.bytes.len());
        self.kinds.push(kind);
        Ok(())
    }

    /// How many ids there are, holes included.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no id at all.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The bytes that a token stands for, a control token's being its name.
    pub fn bytes(&self, id: u32) -> &[u8] {
        let index = id as usize;
        let Some(&end) = self.ends.get(index) else { return &[] };
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[start..end]
    }

    /// What a token is for; ids past the end are unused.
    pub fn kind(&self, id: u32) -> TokenKind {
        self.kinds.get(id as usize).copied().unwrap_or(TokenKind::Unused)
    }

    /// The token as log-probability lists show it.
    pub fn text(&self, id: u32) -> TokenText<'_> {
        let bytes = self.bytes(id);
        TokenText { text: String::from_utf8_lossy(bytes), bytes }
    }

    /// Whether the encoder puts a space before the text, which the decoder must take off again.
    pub(crate) fn strips_first_space(&self) -> bool {
        self.strips_first_space
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_kinds_and_ids_past_the_end() {
        let mut table = TokenTable::new(false);
        table.push(b"ab", TokenKind::Normal).unwrap();
        table.push(b"", TokenKind::Unused).unwrap();
        table.push(b"\xF0\x9F", TokenKind::Normal).unwrap();
        table.push(b"</s>", TokenKind::Control).unwrap();
        assert_eq!(table.bytes(0), b"ab");
        assert_eq!(table.bytes(1), b"");
        assert_eq!(table.bytes(3), b"</s>");
        assert_eq!(table.bytes(4), b"");
        assert_eq!(table.bytes(u32::MAX), b"");
        assert_eq!(table.kind(3), TokenKind::Control);
        assert_eq!(table.kind(u32::MAX), TokenKind::Unused);
        assert_eq!(table.text(2).text, "\u{FFFD}");
        assert_eq!(table.text(2).bytes, b"\xF0\x9F");
    }
}
