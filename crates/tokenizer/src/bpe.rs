//! Byte-level byte-pair encoding: GGUF's `gpt2` family.

use fancy_regex::Regex;
use tokenizers::Model;
use tokenizers::models::bpe::{BPE, Vocab};

use crate::pre_rules::{self, PreRule};
use crate::{TokenizerError, byte_level};

/// Splits text into words by a [`PreRule`] and merges each word's bytes.
///
/// # Source
/// Sennrich et al. 2016 (byte-pair encoding), Radford et al. 2019 (over bytes).
#[derive(Debug)]
pub(crate) struct ByteBpe {
    patterns: Vec<Regex>,
    model: BPE,
}

impl ByteBpe {
    /// Takes `(token, id)` of all tokens that text may become, and the merges, best first, each
    /// as two tokens with a space between.
    pub(crate) fn new<'v>(
        rule: &PreRule,
        tokens: impl Iterator<Item = (&'v str, u32)>,
        merges: &[String],
    ) -> Result<Self, TokenizerError> {
        let vocab: Vocab = tokens.map(|(token, id)| (token.to_string(), id)).collect();
        let merges =
            merges.iter().map(|merge| parse_merge(merge)).collect::<Result<Vec<_>, _>>()?;
        let model = BPE::builder()
            .vocab_and_merges(vocab, merges)
            .ignore_merges(rule.ignore_merges)
            .build()
            .map_err(|error| TokenizerError::BadVocab(error.to_string()))?;
        Ok(Self { patterns: rule.compile(), model })
    }

    /// Appends the ids of `text` to `ids`.
    pub(crate) fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let mut spelled = String::new();
        for word in pre_rules::split(&self.patterns, text)? {
            spelled.clear();
            byte_level::spell(word.as_bytes(), &mut spelled);
            let tokens = self
                .model
                .tokenize(&spelled)
                .map_err(|error| TokenizerError::Encode(error.to_string()))?;
            ids.extend(tokens.iter().map(|token| token.id));
        }
        Ok(())
    }
}

fn parse_merge(merge: &str) -> Result<(String, String), TokenizerError> {
    let bad = || TokenizerError::BadVocab(format!("merge `{merge}` is not two tokens"));
    let (left, right) = merge.split_once(' ').ok_or_else(bad)?;
    if left.is_empty() || right.is_empty() || right.contains(' ') {
        return Err(bad());
    }
    Ok((left.to_string(), right.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bpe(pre: &str, tokens: &[&str], merges: &[&str]) -> Result<ByteBpe, TokenizerError> {
        let rule = PreRule::find(Some(pre)).unwrap();
        let merges: Vec<String> = merges.iter().map(ToString::to_string).collect();
        ByteBpe::new(rule, tokens.iter().copied().zip(0..), &merges)
    }

    fn encode(bpe: &ByteBpe, text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        bpe.encode(text, &mut ids).unwrap();
        ids
    }

    #[test]
    fn merges_go_by_rank_and_stay_inside_words() {
        let tokens = ["a", "b", "c", "Ġ", "ab", "bc", "Ġa"];
        let bpe = bpe("gpt-2", &tokens, &["b c", "a b", "Ġ a"]).unwrap();
        assert_eq!(encode(&bpe, "abc"), [0, 5], "bc ranks before ab");
        assert_eq!(encode(&bpe, "ab a"), [4, 6]);
        assert!(encode(&bpe, "").is_empty());
    }

    #[test]
    fn some_rules_take_known_words_whole() {
        let tokens = ["a", "b", "c", "bc", "abc"];
        assert_eq!(encode(&bpe("llama-bpe", &tokens, &["b c"]).unwrap(), "abc"), [4]);
        assert_eq!(encode(&bpe("gpt-2", &tokens, &["b c"]).unwrap(), "abc"), [0, 3]);
    }

    #[test]
    fn hostile_merges_are_errors() {
        for merge in ["ab", "", " ", "a ", "a b c", "a x"] {
            assert!(bpe("gpt-2", &["a", "b", "ab"], &[merge]).is_err(), "{merge:?}");
        }
    }
}
