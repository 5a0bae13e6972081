//! Conversations: what all APIs of chats share.
//!
//! ```text
//! openai, anthropic -> Conversation -> prompt -> generation -> ChatReader (pieces) -> their events
//! ```
//!
//! Reading order: [`tools`] (functions that a model may call), [`style`] (what the model's template
//! knows), [`conversation`] (what is said so far, as a prompt), [`turns`] (its messages),
//! [`constraint`] (what an answer must be), [`run`] (its answers), [`blocks`] (an answer's parts).

mod blocks;
mod constraint;
mod conversation;
mod run;
mod style;
mod tools;
mod turns;

pub(crate) use blocks::{Block, BlockEvent, Blocks, Call};
pub(crate) use conversation::{Budget, Conversation};
pub(crate) use run::{ChatDelta, ChatReader, ChatRun, RunSize, encode};
pub(crate) use style::{ChatStyle, set_effort, set_thinking};
pub(crate) use tools::{Tool, ToolChoice, check_tools};
pub(crate) use turns::Turns;
