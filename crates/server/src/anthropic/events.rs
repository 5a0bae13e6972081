//! A message in events.
//!
//! ```text
//! message_start, ping
//!   each block:  content_block_start, content_block_delta ..., content_block_stop
//! message_delta  (why it ended, what it cost)
//! message_stop   | error
//! ```
//!
//! # Source
//! Anthropic's API reference, "Streaming messages".

use serde_json::{Value, json};

use super::AnthropicError;
use super::object::{ContentBlock, Ending, MessageObject, Usage};
use crate::chat::{Block, BlockEvent, Blocks, ChatReader};
use crate::error::ApiError;
use crate::generation::{Delta, Finish};
use crate::sse::{EventWriter, Events};
use crate::state::ServerState;
use crate::usage::TokenCounts;

/// Writes the events of one message.
pub(crate) struct MessageEvents {
    pub(crate) state: ServerState,
    pub(crate) object: MessageObject,
    pub(crate) reader: ChatReader,
    pub(crate) counts: TokenCounts,
    pub(crate) stops: Vec<String>,
    pub(crate) blocks: Blocks,
    pub(crate) finish: Option<Finish>,
}

fn push(kind: &str, mut fields: Value, events: &mut Events) {
    fields["type"] = kind.into();
    events.push_named(kind, &fields);
}

fn tell(index: usize, event: BlockEvent<'_>, events: &mut Events) {
    match event {
        BlockEvent::Opened(block) => {
            let block = ContentBlock::from(block.clone());
            let fields = json!({"index": index, "content_block": block});
            push("content_block_start", fields, events);
        }
        BlockEvent::Grown(block, more) => {
            let delta = match block {
                Block::Reasoning(_) => json!({"type": "thinking_delta", "thinking": more}),
                Block::Text(_) => json!({"type": "text_delta", "text": more}),
                Block::Call(_) => json!({"type": "input_json_delta", "partial_json": more}),
            };
            push("content_block_delta", json!({"index": index, "delta": delta}), events);
        }
        BlockEvent::Closed(_) => push("content_block_stop", json!({"index": index}), events),
    }
}

impl EventWriter for MessageEvents {
    fn start(&mut self, events: &mut Events) {
        push("message_start", json!({"message": self.object}), events);
        push("ping", json!({}), events);
    }

    fn delta(&mut self, index: usize, delta: Delta, events: &mut Events) {
        let answer = self.reader.read(index, delta, &mut self.counts);
        let style = self.state.style();
        for piece in answer.pieces {
            let mut tell = |index, event: BlockEvent<'_>| tell(index, event, events);
            self.blocks.push(piece, || style.call_id("toolu_"), &mut tell);
        }
        self.finish = answer.finish;
    }

    fn end(&mut self, events: &mut Events) {
        self.blocks.close(&mut |index, event| tell(index, event, events));
        let has_calls = self.blocks.all().iter().any(|block| matches!(block, Block::Call(_)));
        let ending = Ending::new(self.finish.as_ref(), &self.stops, has_calls);
        let fields = json!({"delta": ending, "usage": Usage::from(self.counts)});
        push("message_delta", fields, events);
        push("message_stop", json!({}), events);
    }

    fn error(&mut self, error: &ApiError, events: &mut Events) {
        events.push_named("error", &AnthropicError(error.clone()).body());
    }
}
