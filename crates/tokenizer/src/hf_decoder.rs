//! The decoder of a `tokenizer.json`, read as a rule for single tokens.

use serde::Deserialize;
use serde_json::Value;

use crate::byte_level;
use crate::spm::read_byte;

/// How a `tokenizer.json`'s decoder reads tokens, each on its own: that is what streaming needs.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct DecoderShape {
    is_byte_level: bool,
    has_byte_fallback: bool,
    /// What is written for what, in order.
    replaced: Vec<(String, String)>,
    pub(crate) strips_first_space: bool,
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

    /// The bytes of a token of the model's own vocabulary.
    pub(crate) fn token_bytes(&self, token: &str) -> Vec<u8> {
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

    /// The bytes of an added token: spelled as it is, but for the mark that stands for a space.
    pub(crate) fn added_token_bytes(&self, token: &str) -> Vec<u8> {
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
