//! `POST /v1/responses`. Nothing is stored: every request brings the whole conversation.
//!
//! Reading order: [`request`] (fields), [`input`] (items to messages), [`object`] (the response),
//! [`events`] (the response in events), [`create`].

mod create;
mod events;
mod input;
mod object;
mod request;

pub(crate) use create::create;
pub(crate) use object::ResponseObject;
pub(crate) use request::describe;
