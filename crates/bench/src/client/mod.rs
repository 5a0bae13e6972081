//! A client for HTTP servers, ours or others', that adds little to what it measures.
//!
//! Reading order: [`address`] (where a server is), [`connection`] (requests over connections that
//! are kept), [`events`] (server-sent events out of bytes).
//!
//! Invariant: no TLS; what is measured is reached in plain text.

mod address;
mod connection;
mod events;

pub use address::ServerAddress;
pub(crate) use connection::excerpt;
pub use connection::{Client, ClientError, Reply};
pub(crate) use events::EventReader;
