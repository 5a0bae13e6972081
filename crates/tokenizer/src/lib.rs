//! Text room: encode, incremental decode, stop strings, chat templates.
//!
//! Text stops here. The server hands this crate strings and gets token ids; the engine's tokens
//! come back as ids and leave as text. In reading order:
//!
//! - [`Tokenizer`]: the one type that callers hold, from a [`GgufVocab`] or a Hugging Face folder.
//! - `encoder`: how text becomes ids, by `specials` and then `bpe` (with `pre_rules` and
//!   `byte_level`) or `spm`; or by `hf` (with `hf_decoder`, `hf_frame`).
//! - [`TokenTable`]: the bytes and the kind of every id; [`DecodeStream`] turns ids into text.
//! - [`StopMatcher`]: stop strings that may span or start inside tokens.
//! - [`ChatTemplate`]: messages to prompt, as `transformers` renders them.
//!
//! Invariant: no HTTP, no device, no other Inflight crate.
//! Invariant: the concatenated pushes of a [`DecodeStream`] equal [`Tokenizer::decode`] byte for
//! byte, and no push ever ends inside a character.
//! Invariant: a [`StopMatcher`] releases no byte of a stop string, nor of a prefix that could
//! still become one.
//! Invariant: under [`Special::AsText`] a control token's name in a text is ordinary text.

mod bpe;
mod byte_level;
mod chat;
mod decode;
mod encoder;
mod error;
mod folder;
mod gguf;
mod hf;
mod hf_decoder;
mod hf_frame;
mod pre_rules;
mod specials;
mod spm;
mod stop;
mod token_table;
mod tokenizer;

pub use chat::{ChatInput, ChatTemplate, TemplateTokens};
pub use decode::{DecodeOptions, DecodeStream, TextPosition};
pub use error::TokenizerError;
pub use gguf::GgufVocab;
pub use pre_rules::known_pre_tokenizers;
pub use specials::Special;
pub use stop::{StopMatcher, StopUpdate};
pub use token_table::{TokenKind, TokenTable, TokenText};
pub use tokenizer::Tokenizer;
