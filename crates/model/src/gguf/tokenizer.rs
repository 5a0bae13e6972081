//! What a GGUF file says about its tokenizer, as plain data.

use super::{GgufFile, GgufValue};
use crate::ModelError;

/// A tokenizer's vocabulary and options, unchecked: whoever builds a tokenizer from it must check
/// that lengths agree and ids exist.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufTokenizer {
    /// Kind of tokenizer: `gpt2` (byte-level BPE), `llama` (SentencePiece BPE), ...
    pub model: String,
    /// How text is split before BPE merges, by llama.cpp's name for the rule.
    pub pre: Option<String>,
    /// Text of every token, by id.
    pub tokens: Vec<String>,
    /// Score of every token, or empty.
    pub scores: Vec<f32>,
    /// Type of every token (1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte), or
    /// empty.
    pub token_types: Vec<i32>,
    /// BPE merges, `left right`, best first.
    pub merges: Vec<String>,
    /// Begins a sequence.
    pub bos_token_id: Option<u32>,
    /// Ends a sequence.
    pub eos_token_id: Option<u32>,
    /// Ends a turn of a chat.
    pub eot_token_id: Option<u32>,
    /// Stands for what the vocabulary cannot express.
    pub unknown_token_id: Option<u32>,
    /// Fills batches.
    pub padding_token_id: Option<u32>,
    /// Whether to put `bos_token_id` first.
    pub add_bos_token: Option<bool>,
    /// Whether to put `eos_token_id` last.
    pub add_eos_token: Option<bool>,
    /// Whether SentencePiece text gets a space in front.
    pub add_space_prefix: Option<bool>,
    /// Jinja template of chats.
    pub chat_template: Option<String>,
}

impl GgufTokenizer {
    pub(super) fn read(file: &GgufFile) -> Result<Self, ModelError> {
        let reader = Reader { file };
        Ok(Self {
            model: reader.required("tokenizer.ggml.model", string)?,
            pre: reader.optional("tokenizer.ggml.pre", string)?,
            tokens: reader.required("tokenizer.ggml.tokens", |value| list(value, string))?,
            scores: reader.list("tokenizer.ggml.scores", |value| Some(value.as_f64()? as f32))?,
            token_types: reader.list("tokenizer.ggml.token_type", small_integer)?,
            merges: reader.list("tokenizer.ggml.merges", string)?,
            bos_token_id: reader.optional("tokenizer.ggml.bos_token_id", id)?,
            eos_token_id: reader.optional("tokenizer.ggml.eos_token_id", id)?,
            eot_token_id: reader.optional("tokenizer.ggml.eot_token_id", id)?,
            unknown_token_id: reader.optional("tokenizer.ggml.unknown_token_id", id)?,
            padding_token_id: reader.optional("tokenizer.ggml.padding_token_id", id)?,
            add_bos_token: reader.optional("tokenizer.ggml.add_bos_token", GgufValue::as_bool)?,
            add_eos_token: reader.optional("tokenizer.ggml.add_eos_token", GgufValue::as_bool)?,
            add_space_prefix: reader
                .optional("tokenizer.ggml.add_space_prefix", GgufValue::as_bool)?,
            chat_template: reader.optional("tokenizer.chat_template", string)?,
        })
    }
}

fn string(value: &GgufValue) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn id(value: &GgufValue) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

fn small_integer(value: &GgufValue) -> Option<i32> {
    value.as_u64().and_then(|value| i32::try_from(value).ok())
}

fn list<T>(value: &GgufValue, item: impl Fn(&GgufValue) -> Option<T>) -> Option<Vec<T>> {
    value.as_array()?.iter().map(item).collect()
}

struct Reader<'a> {
    file: &'a GgufFile,
}

impl Reader<'_> {
    fn optional<T>(
        &self,
        key: &str,
        convert: impl Fn(&GgufValue) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let Some(value) = self.file.metadata(key) else { return Ok(None) };
        match convert(value) {
            Some(value) => Ok(Some(value)),
            None => Err(self.error(key, "is of the wrong type")),
        }
    }

    fn required<T>(
        &self,
        key: &str,
        convert: impl Fn(&GgufValue) -> Option<T>,
    ) -> Result<T, ModelError> {
        self.optional(key, convert)?.ok_or_else(|| self.error(key, "is missing"))
    }

    fn list<T>(
        &self,
        key: &str,
        item: impl Fn(&GgufValue) -> Option<T>,
    ) -> Result<Vec<T>, ModelError> {
        Ok(self.optional(key, |value| list(value, &item))?.unwrap_or_default())
    }

    fn error(&self, key: &str, reason: &str) -> ModelError {
        ModelError::bad_config(self.file.path(), key, reason)
    }
}
