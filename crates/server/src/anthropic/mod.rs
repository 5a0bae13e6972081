//! Anthropic's API of messages.
//!
//! Reading order: [`error`] (its shape of errors), [`content`] (what goes in), [`request`]
//! (fields), [`object`] (a message), [`events`] (a message in events), [`messages`] and
//! [`count_tokens`] (the endpoints).

mod content;
pub(crate) mod count_tokens;
mod error;
mod events;
pub(crate) mod messages;
mod object;
mod request;

pub(crate) use error::{AnthropicError, ErrorBody};
pub(crate) use object::MessageObject;
pub(crate) use request::{describe, describe_prompt};
