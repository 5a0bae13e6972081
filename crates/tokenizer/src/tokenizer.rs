//! The tokenizer that callers hold.

use std::path::Path;
use std::sync::Arc;

use crate::encoder::Encoder;
use crate::token_table::{TokenTable, TokenText};
use crate::{
    ChatInput, ChatTemplate, DecodeOptions, DecodeStream, GgufVocab, Special, TokenizerError,
    folder,
};

/// What every kind of file is read into.
pub(crate) struct Parts {
    pub(crate) encoder: Encoder,
    pub(crate) table: TokenTable,
    pub(crate) bos: Option<u32>,
    pub(crate) eos_ids: Vec<u32>,
    /// What a prompt starts with, usually BOS or nothing.
    pub(crate) prefix: Vec<u32>,
    /// What a prompt ends with, usually nothing.
    pub(crate) suffix: Vec<u32>,
    pub(crate) chat_template: Option<ChatTemplate>,
}

/// Turns text into token ids and back, for one model. Immutable: share it by [`Arc`].
pub struct Tokenizer {
    encoder: Encoder,
    table: Arc<TokenTable>,
    bos: Option<u32>,
    eos_ids: Vec<u32>,
    prefix: Vec<u32>,
    suffix: Vec<u32>,
    chat_template: Option<ChatTemplate>,
}

impl Tokenizer {
    /// Builds the tokenizer of a GGUF file.
    ///
    /// # Errors
    /// An unknown family or splitting rule, a vocabulary that contradicts itself, a malformed
    /// chat template.
    pub fn from_gguf(vocab: GgufVocab) -> Result<Self, TokenizerError> {
        vocab.into_parts().map(Self::from_parts)
    }

    /// Reads the tokenizer of a Hugging Face folder: `tokenizer.json`, and, where present,
    /// `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json`,
    /// `config.json`, `chat_template.jinja` and `chat_template.json`.
    ///
    /// # Errors
    /// A missing `tokenizer.json`, and any file that cannot be read or understood.
    pub fn from_folder(path: impl AsRef<Path>) -> Result<Self, TokenizerError> {
        folder::read(path.as_ref()).map(Self::from_parts)
    }

    fn from_parts(parts: Parts) -> Self {
        Self {
            encoder: parts.encoder,
            table: Arc::new(parts.table),
            bos: parts.bos,
            eos_ids: parts.eos_ids,
            prefix: parts.prefix,
            suffix: parts.suffix,
            chat_template: parts.chat_template,
        }
    }

    /// Encodes `text` alone: no BOS.
    ///
    /// # Errors
    /// A text that the vocabulary cannot express, which byte-level vocabularies never meet.
    pub fn encode(&self, text: &str, special: Special) -> Result<Vec<u32>, TokenizerError> {
        self.encoder.encode(text, special)
    }

    /// Encodes a whole prompt: as [`Self::encode`], with the BOS that the model expects, but
    /// never a second one where the text brings its own, as rendered chat templates do.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_prompt(&self, text: &str, special: Special) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = self.encode(text, special)?;
        if !ids.starts_with(&self.prefix) {
            ids.splice(..0, self.prefix.iter().copied());
        }
        if !ids.ends_with(&self.suffix) {
            ids.extend(&self.suffix);
        }
        Ok(ids)
    }

    /// Decodes a whole text from its start.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
        let options = DecodeOptions { skip_special_tokens, ..DecodeOptions::default() };
        let mut stream = self.decode_stream(options);
        let mut text: String = ids.iter().map(|&id| stream.push(id)).collect();
        text += &stream.finish();
        text
    }

    /// Starts to decode tokens as they arrive.
    pub fn decode_stream(&self, options: DecodeOptions) -> DecodeStream {
        DecodeStream::new(Arc::clone(&self.table), options)
    }

    /// The model's chat template.
    ///
    /// # Errors
    /// The model has none.
    pub fn chat_template(&self) -> Result<&ChatTemplate, TokenizerError> {
        self.chat_template.as_ref().ok_or(TokenizerError::NoChatTemplate)
    }

    /// Renders messages as the prompt text that the model was trained on. Encode it by
    /// [`Self::encode_prompt`] with [`Special::Parse`].
    ///
    /// # Errors
    /// The model has no template, or the template fails on, or refuses, the messages.
    pub fn render_chat(&self, input: &ChatInput<'_>) -> Result<String, TokenizerError> {
        self.chat_template()?.render(input)
    }

    /// How many ids the vocabulary has; the model's output layer may be padded beyond.
    pub fn vocab_size(&self) -> usize {
        self.table.len()
    }

    /// The token that starts a text, if the model has one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// All tokens that end a generation.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }

    /// The bytes that a token stands for; none for an id past the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.table.bytes(id)
    }

    /// A token as log-probability lists show it.
    pub fn token_text(&self, id: u32) -> TokenText<'_> {
        self.table.text(id)
    }

    /// Bytes and kinds of all tokens, for those who build on them (grammars).
    pub fn token_table(&self) -> &Arc<TokenTable> {
        &self.table
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("bos", &self.bos)
            .field("eos_ids", &self.eos_ids)
            .field("has_chat_template", &self.chat_template.is_some())
            .finish_non_exhaustive()
    }
}

const _: fn() = || {
    fn is_shareable<T: Send + Sync>() {}
    is_shareable::<Tokenizer>();
    is_shareable::<DecodeStream>();
};
