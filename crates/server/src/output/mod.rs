//! What a model's text consists of: thoughts, answer, tool calls.
//!
//! ```text
//! text deltas -> reasoning (thoughts apart) -> tool_calls (calls apart) -> pieces
//! ```
//!
//! Reading order: [`piece`] (what comes out), [`parser`] (both in a row), `reasoning`, `tool_calls`
//! with `call_scanner` (one call) and `json_scanner` (one value), `marker` (finding marks).
//!
//! Invariant: pieces do not depend on how the text is cut, so that a stream adds up to the whole.
//! Invariant: only what may still become a mark, or white space before one, is held back.

mod call_scanner;
mod json_scanner;
mod marker;
mod parser;
mod piece;
mod reasoning;
mod tool_calls;

pub(crate) use parser::{OutputOptions, OutputParser};
pub(crate) use piece::Piece;
pub(crate) use reasoning::ReasoningTags;
pub(crate) use tool_calls::ToolCallOptions;
pub use tool_calls::ToolFormat;
