//! The one error of this crate.

use std::path::PathBuf;

/// What can go wrong between text and token ids.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The GGUF file names a tokenizer family that is not built.
    #[error("tokenizer model `{0}` is not supported (supported: gpt2, llama)")]
    UnknownModel(String),
    /// The GGUF file names a splitting rule that is not known, and guessing would be wrong.
    #[error("pre-tokenizer `{pre}` is not supported (supported: {known})")]
    UnknownPreTokenizer {
        /// The rule that the file names.
        pre: String,
        /// The rules that are known, comma-separated.
        known: String,
    },
    /// The vocabulary contradicts itself.
    #[error("bad vocabulary: {0}")]
    BadVocab(String),
    /// A tokenizer file cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A tokenizer file was read and makes no sense.
    #[error("cannot use {path}: {reason}")]
    BadFile {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A text cannot be encoded.
    #[error("cannot encode the text: {0}")]
    Encode(String),
    /// A stop string is empty: it would stop at once.
    #[error("stop string {index} is empty")]
    EmptyStop {
        /// Its place in the list.
        index: usize,
    },
    /// The model brings no chat template, so messages have no agreed form.
    #[error("the model has no chat template: use the completions endpoint, or give a template")]
    NoChatTemplate,
    /// The chat template does not parse.
    #[error("the chat template is malformed: {0}")]
    TemplateSyntax(String),
    /// The template refused the messages by calling `raise_exception`: the caller's fault.
    #[error("the chat template refuses the messages: {0}")]
    TemplateRefused(String),
    /// The template failed on these messages in any other way.
    #[error("the chat template failed: {0}")]
    TemplateFailed(String),
}
