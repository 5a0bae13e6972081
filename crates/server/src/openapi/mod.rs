//! What the API is, for programs: an OpenAPI document made of the types that requests are read into
//! and answers are written from.
//!
//! Reading order: [`fields`] (a body's fields, group by group, as `request::body` takes them),
//! [`ranges`] (what of a field's type is allowed), [`operation`] (one endpoint), [`endpoints`] (all
//! of them), [`document`] (the document, and `GET /openapi.json`).
//!
//! Invariant: what the document refuses, the server refuses; `tests/openapi.rs` and schemathesis
//! hold them to each other.

mod document;
mod endpoints;
mod fields;
mod operation;
mod ranges;

pub(crate) use document::serve;
pub(crate) use fields::Fields;
