//! What a request's body says, in the words that all endpoints share.
//!
//! Reading order: [`body`] (a body's fields, none unseen), [`neutral`] (fields that change
//! nothing), [`sampling`] (how tokens are drawn and where an output ends), [`constraint`] (what it
//! must be), [`service`] (how urgent it is, and to whom), `kv_cache` (what it keeps), [`prompt`]
//! (a prompt as text or tokens), `string_or` (fields that are a string or a list), `words` (texts
//! that sampling knows as tokens).

pub(crate) mod body;
pub(crate) mod constraint;
mod kv_cache;
pub(crate) mod neutral;
pub(crate) mod prompt;
pub(crate) mod sampling;
mod service;
mod string_or;
mod words;

pub(crate) use body::{Body, admit};
pub(crate) use constraint::{Asked, ConstraintFields};
pub(crate) use sampling::{Length, SamplingFields, SequenceTemplate, Surroundings};
pub(crate) use service::Service;
pub(crate) use string_or::StringOr;
