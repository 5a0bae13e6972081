//! Tokenizers from GGUF metadata.

use std::collections::HashSet;

use crate::bpe::ByteBpe;
use crate::encoder::{Encoder, Words};
use crate::pre_rules::PreRule;
use crate::specials::SpecialFinder;
use crate::spm::{self, SPACE_MARK, Spm};
use crate::token_table::{MAX_VOCAB, TokenKind, TokenTable};
use crate::tokenizer::Parts;
use crate::{ChatTemplate, TemplateTokens, TokenizerError, byte_level};

/// Names of tokens that end a turn or a text, whichever of them the file declares.
///
/// # Source
/// Files rarely declare all of them, so llama.cpp's `src/llama-vocab.cpp` goes by name too.
const END_NAMES: &[&str] = &[
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
];

/// The tokenizer's share of a GGUF file's metadata; the caller copies it from the keys named.
#[derive(Clone, Debug, Default)]
pub struct GgufVocab {
    /// `tokenizer.ggml.model`: `gpt2` or `llama`.
    pub model: String,
    /// `tokenizer.ggml.pre`: how `gpt2` texts are split into words.
    pub pre: Option<String>,
    /// `tokenizer.ggml.tokens`.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.scores`: needed by `llama`, may be empty for `gpt2`.
    pub scores: Vec<f32>,
    /// `tokenizer.ggml.token_type`: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused,
    /// 6 byte. If empty, all are normal.
    pub token_types: Vec<i32>,
    /// `tokenizer.ggml.merges`: needed by `gpt2`.
    pub merges: Vec<String>,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos: Option<u32>,
    /// `tokenizer.ggml.unknown_token_id`.
    pub unk: Option<u32>,
    /// `tokenizer.ggml.padding_token_id`.
    pub pad: Option<u32>,
    /// `tokenizer.ggml.add_bos_token`; by default `llama` and some `pre` rules do.
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`; by default none does.
    pub add_eos: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`; by default `llama` does, `gpt2` never.
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.chat_template`.
    pub chat_template: Option<String>,
    /// Further tokens that end a generation: `tokenizer.ggml.eot_token_id`, `eom_token_id`.
    pub extra_eog: Vec<u32>,
}

impl GgufVocab {
    /// Builds what a tokenizer consists of.
    pub(crate) fn into_parts(self) -> Result<Parts, TokenizerError> {
        self.check()?;
        let kinds = self.kinds();
        let (words, adds_bos) = match self.model.as_str() {
            "gpt2" => self.byte_bpe(&kinds)?,
            "llama" => (Words::Spm(Box::new(self.spm(&kinds))), true),
            _ => return Err(TokenizerError::UnknownModel(self.model)),
        };
        let table = self.table(&kinds, &words)?;
        let specials = self.specials(&kinds, &table)?;
        let adds_bos = self.add_bos.unwrap_or(adds_bos);
        let adds_eos = self.add_eos.unwrap_or(false);
        Ok(Parts {
            encoder: Encoder::Gguf { specials, words },
            eos_ids: self.end_ids(),
            bos: self.bos,
            prefix: self.bos.filter(|_| adds_bos).into_iter().collect(),
            suffix: self.eos.filter(|_| adds_eos).into_iter().collect(),
            chat_template: self.compile_chat_template()?,
            table,
        })
    }

    /// Refuses what contradicts itself, so that the rest may index freely.
    fn check(&self) -> Result<(), TokenizerError> {
        let bad = |reason| Err(TokenizerError::BadVocab(reason));
        let len = self.tokens.len();
        if len == 0 || len > MAX_VOCAB {
            return bad(format!("{len} tokens (expected 1 to {MAX_VOCAB})"));
        }
        if !self.token_types.is_empty() && self.token_types.len() != len {
            return bad(format!("{} token types for {len} tokens", self.token_types.len()));
        }
        if self.model == "llama" && self.scores.len() != len {
            return bad(format!("{} scores for {len} tokens", self.scores.len()));
        }
        if let Some(index) = self.scores.iter().position(|score| score.is_nan()) {
            return bad(format!("the score of token {index} is not a number"));
        }
        if let Some(id) = self.named_ids().find(|&id| id as usize >= len) {
            return bad(format!("special token {id} lies past the {len} tokens"));
        }
        let mut seen = HashSet::with_capacity(len);
        let named = self.tokens.iter().filter(|token| !token.is_empty());
        match named.into_iter().find(|token| !seen.insert(token.as_str())) {
            Some(token) => bad(format!("token {token:?} occurs twice")),
            None => Ok(()),
        }
    }

    /// The ids that the file gives a role.
    fn named_ids(&self) -> impl Iterator<Item = u32> {
        let named = [self.bos, self.eos, self.unk, self.pad].into_iter().flatten();
        named.chain(self.extra_eog.iter().copied())
    }

    /// Kinds by id: as the file says, but a token with a role is a control token in any case.
    fn kinds(&self) -> Vec<TokenKind> {
        let mut kinds = vec![TokenKind::Normal; self.tokens.len()];
        for (kind, token_type) in kinds.iter_mut().zip(&self.token_types) {
            *kind = match token_type {
                2 | 3 => TokenKind::Control,
                4 => TokenKind::UserDefined,
                5 => TokenKind::Unused,
                _ => TokenKind::Normal,
            };
        }
        for id in self.named_ids().chain(self.end_ids()) {
            kinds[id as usize] = TokenKind::Control;
        }
        kinds
    }

    /// All tokens that end a generation, the declared one first.
    fn end_ids(&self) -> Vec<u32> {
        let has = |name: &str| self.tokens.iter().any(|token| token == name);
        // Where both of these end a turn, `<|end|>` only ends a message within it.
        let is_harmony = has("<|return|>") && has("<|call|>");
        let ends = |token: &&str| END_NAMES.contains(token) && !(is_harmony && *token == "<|end|>");
        let mut ids: Vec<u32> = self.eos.into_iter().chain(self.extra_eog.clone()).collect();
        let by_name = self.tokens.iter().map(String::as_str).zip(0..);
        ids.extend(by_name.filter(|(token, _)| ends(token)).map(|(_, id)| id));
        let mut seen = HashSet::new();
        ids.retain(|&id| seen.insert(id));
        ids
    }

    /// The byte-level encoder, and whether texts start with BOS by its rule.
    fn byte_bpe(&self, kinds: &[TokenKind]) -> Result<(Words, bool), TokenizerError> {
        let rule = PreRule::find(self.pre.as_deref())?;
        // Left out of the vocabulary, a control token cannot come out of text by accident.
        let tokens = self.named_tokens(kinds).filter(|(_, _, kind)| *kind != TokenKind::Control);
        let bpe = ByteBpe::new(rule, tokens.map(|(token, id, _)| (token, id)), &self.merges)?;
        Ok((Words::Bpe(Box::new(bpe)), rule.adds_bos))
    }

    fn spm(&self, kinds: &[TokenKind]) -> Spm {
        let mut spm = Spm::new(self.unk, self.add_space_prefix.unwrap_or(true));
        for (token, id, kind) in self.named_tokens(kinds) {
            match (self.byte_of(id), kind) {
                (Some(byte), _) => spm.add_byte(byte, id),
                (None, TokenKind::Control) => {}
                (None, _) => spm.add_piece(token, id, self.scores[id as usize], kind),
            }
        }
        spm
    }

    fn named_tokens<'v>(
        &'v self,
        kinds: &[TokenKind],
    ) -> impl Iterator<Item = (&'v str, u32, TokenKind)> {
        let tokens = self.tokens.iter().zip(kinds).zip(0..);
        let tokens = tokens.map(|((token, &kind), id)| (token.as_str(), id, kind));
        tokens.filter(|(token, _, _)| !token.is_empty())
    }

    /// The byte that a `llama` token stands for, if it stands for one byte.
    fn byte_of(&self, id: u32) -> Option<u8> {
        let is_byte = self.token_types.get(id as usize).is_none_or(|&kind| kind == 6);
        if is_byte { spm::read_byte(&self.tokens[id as usize]) } else { None }
    }

    fn table(&self, kinds: &[TokenKind], words: &Words) -> Result<TokenTable, TokenizerError> {
        let mut table = TokenTable::new(words.adds_space_prefix());
        for (id, (token, &kind)) in (0..).zip(self.tokens.iter().zip(kinds)) {
            let bytes = match (words, kind) {
                (_, TokenKind::Control) => token.clone().into_bytes(),
                (Words::Spm(_), _) => match self.byte_of(id) {
                    Some(byte) => vec![byte],
                    None => token.replace(SPACE_MARK, " ").into_bytes(),
                },
                (Words::Bpe(_), TokenKind::Normal) => {
                    byte_level::read(token).unwrap_or_else(|| token.clone().into_bytes())
                }
                (Words::Bpe(_), _) => token.clone().into_bytes(),
            };
            table.push(&bytes, kind)?;
        }
        Ok(table)
    }

    /// Finds control and user-defined tokens by the text that they stand for.
    fn specials(
        &self,
        kinds: &[TokenKind],
        table: &TokenTable,
    ) -> Result<SpecialFinder, TokenizerError> {
        let is_whole = |kind| matches!(kind, TokenKind::Control | TokenKind::UserDefined);
        let whole = self.named_tokens(kinds).filter(|(_, _, kind)| is_whole(*kind));
        let with_text = whole.filter_map(|(_, id, kind)| {
            let text = std::str::from_utf8(table.bytes(id)).ok()?;
            Some((text, id, kind))
        });
        SpecialFinder::new(&with_text.collect::<Vec<_>>())
    }

    fn compile_chat_template(&self) -> Result<Option<ChatTemplate>, TokenizerError> {
        let Some(source) = &self.chat_template else { return Ok(None) };
        let text = |id: Option<u32>| id.map(|id| self.tokens[id as usize].clone());
        let tokens = TemplateTokens {
            bos: text(self.bos),
            eos: text(self.eos),
            unk: text(self.unk),
            pad: text(self.pad),
        };
        ChatTemplate::new(source, tokens).map(Some)
    }
}
