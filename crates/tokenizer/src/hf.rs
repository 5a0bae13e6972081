//! `tokenizer.json`, through the `tokenizers` library.

use serde::Deserialize;
use serde_json::Value;
use tokenizers::tokenizer::AddedVocabulary;
use tokenizers::{Encoding, Model, OffsetType, PostProcessor, PreTokenizer, Token};

use crate::spm::read_byte;
use crate::token_table::{MAX_VOCAB, TokenKind, TokenTable};
use crate::{Special, TokenizerError, byte_level};

/// The encoding half of a `tokenizer.json`: normalise, split, merge. Its truncation and padding
/// are not applied: an engine must see the whole prompt.
pub(crate) struct HfPipeline {
    tokenizer: tokenizers::Tokenizer,
    /// The added tokens once more, with control tokens' names read as ordinary text.
    added_as_text: AddedVocabulary,
}

impl HfPipeline {
    pub(crate) fn new(tokenizer: tokenizers::Tokenizer) -> Self {
        let mut added_as_text = tokenizer.get_added_vocabulary().clone();
        added_as_text.set_encode_special_tokens(true);
        Self { tokenizer, added_as_text }
    }

    pub(crate) fn encode(&self, text: &str, special: Special) -> Result<Vec<u32>, TokenizerError> {
        let ids = self.try_encode(text, special);
        ids.map_err(|error| TokenizerError::Encode(error.to_string()))
    }

    fn try_encode(&self, text: &str, special: Special) -> tokenizers::Result<Vec<u32>> {
        let added = match special {
            Special::AsText => &self.added_as_text,
            Special::Parse => self.tokenizer.get_added_vocabulary(),
        };
        let mut pieces = added.extract_and_normalize(self.tokenizer.get_normalizer(), text);
        if let Some(pre_tokenizer) = self.tokenizer.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        pieces.tokenize(|piece| self.tokenizer.get_model().tokenize(piece.get()))?;
        Ok(pieces.into_encoding(None, 0, OffsetType::None)?.get_ids().to_vec())
    }

    /// What the post-processor puts before and after a text.
    pub(crate) fn frame(&self) -> Result<(Vec<u32>, Vec<u32>), TokenizerError> {
        /// Stands for the text: no vocabulary reaches this id.
        const TEXT: u32 = u32::MAX;
        let Some(processor) = self.tokenizer.get_post_processor() else {
            return Ok((Vec::new(), Vec::new()));
        };
        let text = Encoding::from_tokens(vec![Token::new(TEXT, String::new(), (0, 0))], 0);
        let framed = processor
            .process(text, None, true)
            .map_err(|error| TokenizerError::BadVocab(format!("post-processor: {error}")))?;
        let mut halves = framed.get_ids().split(|&id| id == TEXT).map(<[u32]>::to_vec);
        let prefix = halves.next().unwrap_or_default();
        Ok((prefix, halves.next().unwrap_or_default()))
    }

    pub(crate) fn token_to_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    /// Bytes and kinds of all tokens, as the file's decoder reads them.
    pub(crate) fn table(&self, decoder: &DecoderShape) -> Result<TokenTable, TokenizerError> {
        let mut tokens: Vec<(u32, Vec<u8>, TokenKind)> = Vec::new();
        let added = self.tokenizer.get_added_tokens_decoder();
        for (token, id) in self.tokenizer.get_model().get_vocab() {
            if !added.contains_key(&id) {
                tokens.push((id, decoder.token_bytes(&token), TokenKind::Normal));
            }
        }
        for (id, token) in added {
            let kind = if token.special { TokenKind::Control } else { TokenKind::UserDefined };
            tokens.push((id, decoder.added_token_bytes(&token.content), kind));
        }
        tokens.sort_unstable_by_key(|&(id, ..)| id);
        let mut table = TokenTable::new(decoder.strips_first_space);
        for (id, bytes, kind) in tokens {
            if id as usize >= MAX_VOCAB {
                return Err(TokenizerError::BadVocab(format!("token id {id} is out of reach")));
            }
            while table.len() < id as usize {
                table.push(b"", TokenKind::Unused)?;
            }
            if table.len() == id as usize {
                table.push(&bytes, kind)?;
            }
        }
        Ok(table)
    }
}

impl std::fmt::Debug for HfPipeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HfPipeline").finish_non_exhaustive()
    }
}

/// How a `tokenizer.json`'s decoder reads tokens, each on its own: that is what streaming needs.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct DecoderShape {
    is_byte_level: bool,
    has_byte_fallback: bool,
    /// What is written for what, in order.
    replaced: Vec<(String, String)>,
    strips_first_space: bool,
}

/// The members of the decoder's parts that matter here.
#[derive(Deserialize)]
#[serde(tag = "type")]
enum DecoderPart {
    Sequence {
        decoders: Vec<DecoderPart>,
    },
    ByteLevel {},
    ByteFallback {},
    Fuse {},
    Replace {
        pattern: Value,
        content: String,
    },
    Strip {
        content: String,
        start: usize,
        stop: usize,
    },
    Metaspace {
        replacement: String,
        prepend_scheme: Option<String>,
        add_prefix_space: Option<bool>,
    },
}

impl DecoderShape {
    /// Reads the `decoder` member of a `tokenizer.json`.
    ///
    /// # Errors
    /// A decoder that does not work token by token, with its name.
    pub(crate) fn parse(decoder: &Value) -> Result<Self, String> {
        if decoder.is_null() {
            return Err("it has no decoder".to_string());
        }
        let part = DecoderPart::deserialize(decoder)
            .map_err(|error| format!("its decoder cannot be streamed: {error}"))?;
        let mut shape = Self::default();
        shape.add(part)?;
        Ok(shape)
    }

    fn add(&mut self, part: DecoderPart) -> Result<(), String> {
        match part {
            DecoderPart::Sequence { decoders } => {
                return decoders.into_iter().try_for_each(|part| self.add(part));
            }
            DecoderPart::ByteLevel {} => self.is_byte_level = true,
            DecoderPart::ByteFallback {} => self.has_byte_fallback = true,
            DecoderPart::Fuse {} => {}
            DecoderPart::Replace { pattern, content } => {
                let pattern = pattern.get("String").and_then(Value::as_str);
                let pattern = pattern.ok_or("its decoder replaces by a regular expression")?;
                self.replaced.push((pattern.to_string(), content));
            }
            DecoderPart::Strip { content, start, stop } => {
                if (content.as_str(), start, stop) != (" ", 1, 0) {
                    return Err("its decoder strips other than one leading space".to_string());
                }
                self.strips_first_space = true;
            }
            DecoderPart::Metaspace { replacement, prepend_scheme, add_prefix_space } => {
                self.replaced.push((replacement, " ".to_string()));
                self.strips_first_space = match prepend_scheme {
                    Some(scheme) => scheme != "never",
                    None => add_prefix_space.unwrap_or(true),
                };
            }
        }
        Ok(())
    }

    fn token_bytes(&self, token: &str) -> Vec<u8> {
        if self.has_byte_fallback
            && let Some(byte) = read_byte(token)
        {
            return vec![byte];
        }
        if self.is_byte_level
            && let Some(bytes) = byte_level::read(token)
        {
            return bytes;
        }
        self.added_token_bytes(token)
    }

    /// Added tokens are spelled as they are, but for the mark that stands for a space.
    fn added_token_bytes(&self, token: &str) -> Vec<u8> {
        let replace = |text: String, (from, to): &(String, String)| text.replace(from, to);
        self.replaced.iter().fold(token.to_string(), replace).into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn decoders_as_models_have_them() {
        let byte_level = DecoderShape::parse(&json!({
            "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true
        }))
        .unwrap();
        assert_eq!(byte_level.token_bytes("Ġé"), b" \xE9", "é alone spells one byte");
        assert_eq!(byte_level.token_bytes("a b"), b"a b");
        let llama = DecoderShape::parse(&json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        ]}))
        .unwrap();
        assert_eq!(llama.token_bytes("▁a"), b" a");
        assert_eq!(llama.token_bytes("<0x0A>"), b"\n");
        assert!(llama.strips_first_space);
        let metaspace = DecoderShape::parse(&json!({
            "type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": false
        }))
        .unwrap();
        assert!(!metaspace.strips_first_space);
    }

    #[test]
    fn decoders_that_cannot_be_streamed_are_named() {
        let word_piece = json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
        assert!(DecoderShape::parse(&word_piece).unwrap_err().contains("WordPiece"));
        assert!(DecoderShape::parse(&Value::Null).is_err());
    }
}
