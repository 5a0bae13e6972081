//! What a scheduler was told and what it decided, kept so that it can be done again.
//!
//! A scheduler is pure: the same calls give the same plans. So its calls are all that needs to be
//! kept, and most of a call follows from the calls before. A step takes some thirty bytes.
//!
//! In reading order: [`Recorded`] is a scheduler that keeps its calls, [`Record`] what it kept,
//! [`Replay`] does it again.
//!
//! Invariant: no token and no text of a user is kept. Which prompts and outputs begin alike is, as
//! the prefix cache decides by that: blocks are numbered, equal ones alike.
//! Invariant: takes at most [`Recorded::MAX_BYTES`]; beyond, the oldest plans are forgotten, and
//! what is left can be looked at but not done again.

mod event;
mod recorded;
mod replay;
mod sequences;
mod varint;

pub use event::Planned;
pub use recorded::{Record, Recorded};
pub use replay::{RecordError, Replay, ReplayedStep};
pub use sequences::SequenceRecord;
