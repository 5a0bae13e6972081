//! Batches of requests that are left here and answered when there is room: `/v1/batches`.
//!
//! Reading order: [`object`] (what a batch is to clients), [`desk`] (those that have not ended),
//! [`work`] (a batch from its first line to its last), [`split`] (its answers, as files),
//! [`endpoints`].
//!
//! ```text
//! validating -> in_progress -> finalizing -> completed
//!     |              |   `-> (24 h are up)  -> expired      \
//!     `-> failed     `-> cancelling         -> cancelled    / with what was answered until then
//! ```
//!
//! Lines are answered as by `inflight batch`, so a batch goes on where it was when the server is
//! started again, however it ended.
//!
//! Invariant: one batch at a time is worked on, in the order of their creation.

mod desk;
pub(crate) mod endpoints;
pub(crate) mod object;
mod split;
mod work;

pub(crate) use desk::Desk;
pub(crate) use object::Batch;
pub(crate) use work::resume;
