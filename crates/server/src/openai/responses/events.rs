//! The response in events.
//!
//! ```text
//! response.created, response.in_progress
//!   each item:    response.output_item.added
//!     its part:   response.content_part.added, deltas, done, response.content_part.done
//!     or a call:  response.function_call_arguments.delta ..., .done
//!                 response.output_item.done
//! response.completed | response.incomplete | response.failed
//! ```
//!
//! # Source
//! OpenAI's API reference, "Streaming events".

use serde::Serialize;
use serde_json::{Value, json};

use super::object::{Ending, Item, Part, ResponseObject, logprobs};
use crate::chat::{Block, BlockEvent, Blocks, ChatReader};
use crate::error::ApiError;
use crate::generation::Delta;
use crate::openai::logprobs::ChatLogprob;
use crate::sse::{EventWriter, Events};
use crate::state::ServerState;
use crate::usage::TokenCounts;

/// Writes the events of one response.
pub(crate) struct ResponseEvents {
    state: ServerState,
    object: ResponseObject,
    reader: ChatReader,
    counts: TokenCounts,
    blocks: Blocks,
    ending: Ending,
    output: Output,
}

/// What was told so far.
#[derive(Default)]
struct Output {
    num_events: u64,
    /// The items that are whole.
    items: Vec<Item>,
    /// Of the item that is not.
    item_id: String,
    /// Of the tokens that no event has told yet.
    new_logprobs: Vec<ChatLogprob>,
    /// Of the open text.
    text_logprobs: Vec<ChatLogprob>,
}

#[derive(Serialize)]
struct Event<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    sequence_number: u64,
    #[serde(flatten)]
    fields: Value,
}

impl ResponseEvents {
    pub(crate) fn new(
        state: ServerState,
        object: ResponseObject,
        reader: ChatReader,
        counts: TokenCounts,
    ) -> Self {
        let (blocks, output) = (Blocks::default(), Output::default());
        Self { state, object, reader, counts, blocks, ending: Ending::Running, output }
    }
}

impl Output {
    fn push(&mut self, kind: &str, fields: Value, events: &mut Events) {
        let sequence_number = self.num_events;
        self.num_events += 1;
        events.push_named(kind, &Event { kind, sequence_number, fields });
    }

    fn tell(&mut self, index: usize, event: BlockEvent<'_>, ending: Ending, events: &mut Events) {
        match event {
            BlockEvent::Opened(block) => self.open(index, block, events),
            BlockEvent::Grown(block, more) => self.grow(index, block, more, events),
            BlockEvent::Closed(block) => self.close(index, block, ending, events),
        }
    }

    fn open(&mut self, index: usize, block: &Block, events: &mut Events) {
        self.item_id = Item::new_id(block);
        let item = Item::new(self.item_id.clone(), block, Ending::Running.status(), vec![]);
        let fields = json!({"output_index": index, "item": item});
        self.push("response.output_item.added", fields, events);
        if let Some(part) = Part::new(block, vec![]) {
            let mut fields = self.place(index, block);
            fields["part"] = json!(part);
            self.push("response.content_part.added", fields, events);
        }
    }

    fn grow(&mut self, index: usize, block: &Block, more: &str, events: &mut Events) {
        let mut fields = self.place(index, block);
        fields["delta"] = more.into();
        let kind = match block {
            Block::Reasoning(_) => "response.reasoning_text.delta",
            Block::Call(_) => "response.function_call_arguments.delta",
            Block::Text(_) => {
                let logprobs = std::mem::take(&mut self.new_logprobs);
                fields["logprobs"] = json!(logprobs);
                self.text_logprobs.extend(logprobs);
                "response.output_text.delta"
            }
        };
        self.push(kind, fields, events);
    }

    fn close(&mut self, index: usize, block: &Block, ending: Ending, events: &mut Events) {
        let logprobs = std::mem::take(&mut self.text_logprobs);
        let mut fields = self.place(index, block);
        let kind = match block {
            Block::Reasoning(text) => {
                fields["text"] = text.clone().into();
                "response.reasoning_text.done"
            }
            Block::Text(text) => {
                fields["text"] = text.clone().into();
                fields["logprobs"] = json!(logprobs);
                "response.output_text.done"
            }
            Block::Call(call) => {
                fields["name"] = call.name.clone().into();
                fields["arguments"] = call.arguments.clone().into();
                "response.function_call_arguments.done"
            }
        };
        self.push(kind, fields, events);
        if let Some(part) = Part::new(block, logprobs.clone()) {
            let mut fields = self.place(index, block);
            fields["part"] = json!(part);
            self.push("response.content_part.done", fields, events);
        }
        let status = if ending == Ending::Cut { ending } else { Ending::Completed }.status();
        let item = Item::new(std::mem::take(&mut self.item_id), block, status, logprobs);
        self.push(
            "response.output_item.done",
            json!({"output_index": index, "item": item}),
            events,
        );
        self.items.push(item);
    }

    /// Where a delta belongs.
    fn place(&self, index: usize, block: &Block) -> Value {
        let mut place = json!({"item_id": self.item_id, "output_index": index});
        if !matches!(block, Block::Call(_)) {
            place["content_index"] = 0.into();
        }
        place
    }
}

impl EventWriter for ResponseEvents {
    fn start(&mut self, events: &mut Events) {
        for kind in ["response.created", "response.in_progress"] {
            self.output.push(kind, json!({"response": self.object}), events);
        }
    }

    fn delta(&mut self, index: usize, delta: Delta, events: &mut Events) {
        let answer = self.reader.read(index, delta, &mut self.counts);
        let tokens = &answer.tokens[answer.num_thought_tokens..];
        self.output.new_logprobs.extend(logprobs(&self.state, tokens));
        let (style, output) = (self.state.style(), &mut self.output);
        for piece in answer.pieces {
            // What ends in the middle of an answer is whole.
            let mut tell = |index, event: BlockEvent<'_>| {
                output.tell(index, event, Ending::Running, events);
            };
            self.blocks.push(piece, || style.call_id("call_"), &mut tell);
        }
        self.ending = Ending::new(answer.finish.as_ref());
    }

    fn end(&mut self, events: &mut Events) {
        let (ending, output) = (self.ending, &mut self.output);
        let mut tell = |index, event: BlockEvent<'_>| output.tell(index, event, ending, events);
        if self.blocks.all().is_empty() {
            self.blocks.open(Block::Text(String::new()), &mut tell);
        }
        self.blocks.close(&mut tell);
        self.object.end(ending, self.output.items.clone(), self.counts);
        let kind = match ending {
            Ending::Cut => "response.incomplete",
            Ending::Running | Ending::Completed => "response.completed",
        };
        self.output.push(kind, json!({"response": self.object}), events);
    }

    fn error(&mut self, error: &ApiError, events: &mut Events) {
        self.object.fail(&error.to_string(), self.output.items.clone());
        self.output.push("response.failed", json!({"response": self.object}), events);
    }
}
