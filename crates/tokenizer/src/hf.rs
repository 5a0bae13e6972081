//! `tokenizer.json`, through the `tokenizers` library.

use fancy_regex::Regex;
use serde::Deserialize;
use serde_json::Value;
use tokenizers::tokenizer::{AddedVocabulary, PreTokenizedString};
use tokenizers::{Model, OffsetReferential, OffsetType, PreTokenizer};

use crate::hf_decoder::DecoderShape;
use crate::token_table::{MAX_VOCAB, TokenKind, TokenTable};
use crate::{Special, TokenizerError, byte_level, pre_rules};

/// White space that may stand in a row where the library splits words: beyond some million its
/// regular expressions give up without a word, and the ids would be wrong.
const MAX_SPACES: usize = 500_000;

/// The encoding half of a `tokenizer.json`: normalise, split, merge. Its truncation and padding
/// are not applied: an engine must see the whole prompt.
pub(crate) struct HfPipeline {
    tokenizer: tokenizers::Tokenizer,
    /// The added tokens once more, with control tokens' names read as ordinary text.
    added_as_text: AddedVocabulary,
    /// The patterns by which words are split, if that and the byte alphabet is all there is to
    /// splitting, as in most models: this is several times faster than the library's way.
    patterns: Option<Vec<Regex>>,
}

impl HfPipeline {
    /// Takes the tokenizer, and the `pre_tokenizer` member of its file.
    pub(crate) fn new(tokenizer: tokenizers::Tokenizer, pre_tokenizer: &Value) -> Self {
        let mut added_as_text = tokenizer.get_added_vocabulary().clone();
        added_as_text.set_encode_special_tokens(true);
        Self { tokenizer, added_as_text, patterns: byte_level_patterns(pre_tokenizer) }
    }

    pub(crate) fn encode(&self, text: &str, special: Special) -> Result<Vec<u32>, TokenizerError> {
        let added = match special {
            Special::AsText => &self.added_as_text,
            Special::Parse => self.tokenizer.get_added_vocabulary(),
        };
        let pieces = added.extract_and_normalize(self.tokenizer.get_normalizer(), text);
        match &self.patterns {
            Some(patterns) => self.encode_bytes(patterns, &pieces),
            None => self.encode_by_library(pieces),
        }
    }

    fn encode_bytes(
        &self,
        patterns: &[Regex],
        pieces: &PreTokenizedString,
    ) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::new();
        let mut spelled = String::new();
        let splits = pieces.get_splits(OffsetReferential::Normalized, OffsetType::None);
        for (text, _, added) in splits {
            if let Some(added) = added {
                ids.extend(added.iter().map(|token| token.id));
                continue;
            }
            for word in pre_rules::split(patterns, text)? {
                spelled.clear();
                byte_level::spell(word.as_bytes(), &mut spelled);
                let tokens = self.tokenizer.get_model().tokenize(&spelled).map_err(encode_error)?;
                ids.extend(tokens.iter().map(|token| token.id));
            }
        }
        Ok(ids)
    }

    fn encode_by_library(
        &self,
        mut pieces: PreTokenizedString,
    ) -> Result<Vec<u32>, TokenizerError> {
        for (text, ..) in pieces.get_splits(OffsetReferential::Normalized, OffsetType::None) {
            if longest_space(text) > MAX_SPACES {
                let reason = format!("more than {MAX_SPACES} white space characters in a row");
                return Err(TokenizerError::Encode(reason));
            }
        }
        if let Some(pre_tokenizer) = self.tokenizer.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces).map_err(encode_error)?;
        }
        let model = self.tokenizer.get_model();
        pieces.tokenize(|piece| model.tokenize(piece.get())).map_err(encode_error)?;
        let encoding = pieces.into_encoding(None, 0, OffsetType::None).map_err(encode_error)?;
        Ok(encoding.get_ids().to_vec())
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

fn encode_error(error: tokenizers::Error) -> TokenizerError {
    TokenizerError::Encode(error.to_string())
}

fn longest_space(text: &str) -> usize {
    text.split(|c: char| !c.is_whitespace()).map(str::len).max().unwrap_or(0)
}

/// The pre-tokenizers that amount to patterns; the byte alphabet must come last.
#[derive(Deserialize)]
#[serde(tag = "type")]
enum PreTokenizerPart {
    Sequence { pretokenizers: Vec<PreTokenizerPart> },
    Split { pattern: SplitPattern, behavior: String, invert: bool },
    Digits { individual_digits: bool },
    ByteLevel { add_prefix_space: bool, use_regex: Option<bool> },
}

#[derive(Deserialize)]
enum SplitPattern {
    String(String),
    Regex(String),
}

/// Reads a `pre_tokenizer` as patterns over the byte alphabet; `None` if it is anything else.
fn byte_level_patterns(pre_tokenizer: &Value) -> Option<Vec<Regex>> {
    let part = PreTokenizerPart::deserialize(pre_tokenizer).ok()?;
    let mut parts = match part {
        PreTokenizerPart::Sequence { pretokenizers } => pretokenizers,
        part => vec![part],
    };
    let PreTokenizerPart::ByteLevel { add_prefix_space: false, use_regex } = parts.pop()? else {
        return None;
    };
    let mut patterns = Vec::new();
    for part in parts {
        patterns.push(match part {
            PreTokenizerPart::Split { pattern, behavior, invert: false }
                if behavior == "Isolated" =>
            {
                match pattern {
                    SplitPattern::Regex(pattern) => Regex::new(&pattern).ok()?,
                    SplitPattern::String(text) => Regex::new(&fancy_regex::escape(&text)).ok()?,
                }
            }
            PreTokenizerPart::Digits { individual_digits: true } => Regex::new(r"\p{N}").ok()?,
            PreTokenizerPart::Digits { individual_digits: false } => Regex::new(r"\p{N}+").ok()?,
            _ => return None,
        });
    }
    if use_regex.unwrap_or(true) {
        patterns.push(Regex::new(pre_rules::GPT2).ok()?);
    }
    Some(patterns)
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    /// A pipeline with one token for each byte and some merges.
    fn pipeline(pre_tokenizer: &Value, normalizer: &Value) -> HfPipeline {
        let mut vocab = serde_json::Map::new();
        for byte in 0..=255u8 {
            let mut token = String::new();
            byte_level::spell(&[byte], &mut token);
            vocab.insert(token, byte.into());
        }
        let merges = ["a b", "Ġ a", "1 1", "Ġ Ġ", "Ã ©", "' s", "Ċ Ċ", "ab ab"];
        for (merge, id) in merges.iter().zip(256..) {
            vocab.insert(merge.replace(' ', ""), id.into());
        }
        let json = json!({
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "added_tokens": [{"id": 264, "content": "<x>", "special": true, "single_word": false,
                "lstrip": false, "rstrip": true, "normalized": false}],
            "model": {"type": "BPE", "vocab": vocab, "merges": merges},
        });
        let tokenizer = json.to_string().parse().unwrap();
        HfPipeline::new(tokenizer, pre_tokenizer)
    }

    fn byte_level(use_regex: bool) -> Value {
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": use_regex})
    }

    fn split(regex: &str) -> Value {
        let pattern = json!({"Regex": regex});
        json!({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false})
    }

    fn sequence(parts: &[Value]) -> Value {
        json!({"type": "Sequence", "pretokenizers": parts})
    }

    /// The shapes of GPT-2, SmolLM2, Qwen 2 and DeepSeek.
    fn shapes() -> Vec<Value> {
        let digits = json!({"type": "Digits", "individual_digits": true});
        let literal = json!({"type": "Split", "pattern": {"String": "."}, "behavior": "Isolated",
            "invert": false});
        vec![
            byte_level(true),
            sequence(&[digits, byte_level(true)]),
            sequence(&[split(r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), byte_level(false)]),
            sequence(&[split("[\r\n]"), literal, split(r"\s?\p{L}+"), byte_level(false)]),
        ]
    }

    #[test]
    fn other_pre_tokenizers_are_left_to_the_library() {
        let prefixed = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true});
        let mut inverted = split("a");
        inverted["invert"] = json!(true);
        for other in [
            prefixed,
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"}),
            sequence(&[inverted, byte_level(false)]),
            sequence(&[byte_level(false), split("a")]),
            Value::Null,
        ] {
            assert!(byte_level_patterns(&other).is_none(), "{other}");
        }
    }

    #[test]
    fn endless_white_space_is_refused_where_the_library_would_give_up() {
        let other = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true});
        let pipeline = pipeline(&other, &Value::Null);
        assert!(pipeline.encode(&" ".repeat(MAX_SPACES), Special::Parse).is_ok());
        assert!(pipeline.encode(&" ".repeat(MAX_SPACES + 1), Special::Parse).is_err());
    }

    static PIPELINES: LazyLock<Vec<HfPipeline>> = LazyLock::new(|| {
        let normalizers = [Value::Null, json!({"type": "NFC"})];
        let shaped = |n| shapes().into_iter().map(move |shape| pipeline(&shape, n));
        normalizers.iter().flat_map(shaped).collect()
    });

    proptest! {
        #[test]
        fn the_fast_way_equals_the_library(
            text in prop_oneof![any::<String>(), "[ab1' s\n\ré.]{0,30}(<x>)?[ ab1]{0,9}"]
        ) {
            for pipeline in PIPELINES.iter() {
                prop_assert!(pipeline.patterns.is_some());
                let expected = pipeline.tokenizer.encode(text.as_str(), false).unwrap();
                let ids = pipeline.encode(&text, Special::Parse).unwrap();
                prop_assert_eq!(ids, expected.get_ids());
            }
        }
    }
}
