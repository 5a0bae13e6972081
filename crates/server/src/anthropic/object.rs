//! A message as an object.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::chat::{Block, Call};
use crate::generation::Finish;
use crate::observe::name_answer;
use crate::random::random_id;
use crate::usage::TokenCounts;

/// # Source
/// Anthropic's API reference, "Create a message".
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct MessageObject {
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    role: &'static str,
    model: String,
    content: Vec<ContentBlock>,
    #[serde(flatten)]
    ending: Ending,
    usage: Usage,
}

/// A part of the answer.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum ContentBlock {
    Thinking { thinking: String, signature: &'static str },
    Text { text: String },
    ToolUse { id: String, name: String, input: Map<String, Value> },
}

impl From<Block> for ContentBlock {
    fn from(block: Block) -> Self {
        match block {
            // Nobody signs thoughts here: they are not secret.
            Block::Reasoning(thinking) => Self::Thinking { thinking, signature: "" },
            Block::Text(text) => Self::Text { text },
            Block::Call(Call { id, name, arguments }) => {
                // A call that was cut has no input yet; the stop reason tells so.
                let input = serde_json::from_str(&arguments).unwrap_or_default();
                Self::ToolUse { id, name, input }
            }
        }
    }
}

/// Why a message ended.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub(crate) struct Ending {
    stop_reason: Option<&'static str>,
    stop_sequence: Option<String>,
}

impl Ending {
    pub(crate) fn new(finish: Option<&Finish>, stops: &[String], has_calls: bool) -> Self {
        let stop_reason = finish.map(|finish| match finish {
            Finish::Length => "max_tokens",
            Finish::StopString(_) => "stop_sequence",
            Finish::StopToken(_) if has_calls => "tool_use",
            Finish::StopToken(_) => "end_turn",
        });
        let stop_sequence = match finish {
            Some(Finish::StopString(index)) => Some(stops[*index].clone()),
            _ => None,
        };
        Self { stop_reason, stop_sequence }
    }
}

/// What a message cost.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
#[schemars(rename = "MessageUsage")]
pub(crate) struct Usage {
    input_tokens: usize,
    cache_creation_input_tokens: usize,
    cache_read_input_tokens: usize,
    output_tokens: usize,
}

impl From<TokenCounts> for Usage {
    fn from(counts: TokenCounts) -> Self {
        Self {
            // What was found in the cache is counted apart.
            input_tokens: counts.prompt.saturating_sub(counts.cached),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: counts.cached,
            output_tokens: counts.completion,
        }
    }
}

impl MessageObject {
    /// A message of which nothing has been said.
    pub(crate) fn new(model: String, counts: TokenCounts) -> Self {
        let id = random_id("msg_");
        name_answer(&id);
        Self {
            id,
            kind: "message",
            role: "assistant",
            model,
            content: Vec::new(),
            ending: Ending::default(),
            usage: counts.into(),
        }
    }

    /// Fills in what was said.
    pub(crate) fn end(&mut self, blocks: Vec<Block>, ending: Ending, counts: TokenCounts) {
        self.content = blocks.into_iter().map(ContentBlock::from).collect();
        self.ending = ending;
        self.usage = counts.into();
    }
}
