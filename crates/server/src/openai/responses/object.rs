//! The response as an object.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::request::{ResponseRequest, ResponseTool};
use crate::chat::{Block, Call, Tool};
use crate::generation::{Finish, ScoredToken};
use crate::observe::name_answer;
use crate::openai::logprobs::{ChatLogprob, ChatLogprobs};
use crate::random::random_id;
use crate::state::{ServerState, unix_time_s};
use crate::usage::TokenCounts;

/// # Source
/// OpenAI's API reference, "The response object".
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct ResponseObject {
    pub(crate) id: String,
    object: &'static str,
    created_at: u64,
    status: &'static str,
    background: bool,
    error: Option<Value>,
    incomplete_details: Option<Value>,
    instructions: Option<String>,
    max_output_tokens: Option<usize>,
    metadata: Map<String, Value>,
    model: String,
    output: Vec<Item>,
    parallel_tool_calls: bool,
    previous_response_id: (),
    store: bool,
    temperature: f32,
    text: Value,
    tool_choice: Value,
    tools: Vec<Value>,
    top_logprobs: u32,
    top_p: f32,
    truncation: &'static str,
    usage: Option<Usage>,
}

/// What a response cost.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
#[schemars(rename = "ResponseUsage")]
struct Usage {
    input_tokens: usize,
    input_tokens_details: InputDetails,
    output_tokens: usize,
    output_tokens_details: OutputDetails,
    total_tokens: usize,
}

#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
struct InputDetails {
    cached_tokens: usize,
}

#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
struct OutputDetails {
    reasoning_tokens: usize,
}

impl From<TokenCounts> for Usage {
    fn from(counts: TokenCounts) -> Self {
        Self {
            input_tokens: counts.prompt,
            input_tokens_details: InputDetails { cached_tokens: counts.cached },
            output_tokens: counts.completion,
            output_tokens_details: OutputDetails {
                reasoning_tokens: counts.reasoning.unwrap_or(0),
            },
            total_tokens: counts.prompt + counts.completion,
        }
    }
}

/// How a response ended, or that it has not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Running,
    Completed,
    /// Its length was reached.
    Cut,
}

impl Ending {
    pub(crate) fn new(finish: Option<&Finish>) -> Self {
        match finish {
            Some(Finish::Length) => Self::Cut,
            Some(_) => Self::Completed,
            None => Self::Running,
        }
    }

    /// The status of the item that ends so.
    pub(crate) fn status(self) -> &'static str {
        match self {
            Self::Running => "in_progress",
            Self::Completed => "completed",
            Self::Cut => "incomplete",
        }
    }
}

/// A member of `output`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schemars(rename = "OutputItem")]
pub(crate) enum Item {
    Reasoning {
        id: String,
        summary: [(); 0],
        content: Vec<Part>,
        status: &'static str,
    },
    Message {
        id: String,
        role: &'static str,
        status: &'static str,
        content: Vec<Part>,
    },
    FunctionCall {
        id: String,
        call_id: String,
        name: String,
        arguments: String,
        status: &'static str,
    },
}

/// A part of an item.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schemars(rename = "OutputPart")]
pub(crate) enum Part {
    ReasoningText { text: String },
    OutputText { text: String, annotations: [(); 0], logprobs: Vec<ChatLogprob> },
}

impl Item {
    /// An id for a block's item.
    pub(crate) fn new_id(block: &Block) -> String {
        random_id(match block {
            Block::Reasoning(_) => "rs_",
            Block::Text(_) => "msg_",
            Block::Call(_) => "fc_",
        })
    }

    /// A block's item; one that has just begun has no parts yet.
    pub(crate) fn new(
        id: String,
        block: &Block,
        status: &'static str,
        logprobs: Vec<ChatLogprob>,
    ) -> Self {
        let part = Part::new(block, logprobs).filter(|_| status != "in_progress");
        let content = part.into_iter().collect();
        match block {
            Block::Reasoning(_) => Self::Reasoning { id, summary: [], content, status },
            Block::Text(_) => Self::Message { id, role: "assistant", status, content },
            Block::Call(Call { id: call_id, name, arguments }) => Self::FunctionCall {
                id,
                call_id: call_id.clone(),
                name: name.clone(),
                arguments: arguments.clone(),
                status,
            },
        }
    }
}

impl Part {
    /// The one part of a block's item; calls have none.
    pub(crate) fn new(block: &Block, logprobs: Vec<ChatLogprob>) -> Option<Self> {
        match block {
            Block::Reasoning(text) => Some(Self::ReasoningText { text: text.clone() }),
            Block::Text(text) => {
                Some(Self::OutputText { text: text.clone(), annotations: [], logprobs })
            }
            Block::Call(_) => None,
        }
    }
}

/// The items of a whole answer. `tokens` are those of its texts and calls.
pub(crate) fn items(
    state: &ServerState,
    blocks: &[Block],
    tokens: &[ScoredToken],
    ending: Ending,
) -> Vec<Item> {
    let mut logprobs = logprobs(state, tokens);
    let num_blocks = blocks.len();
    let item = |(index, block): (usize, &Block)| {
        let is_cut = ending == Ending::Cut && index + 1 == num_blocks;
        let status = if is_cut { Ending::Cut } else { Ending::Completed }.status();
        let own =
            if matches!(block, Block::Text(_)) { std::mem::take(&mut logprobs) } else { vec![] };
        Item::new(Item::new_id(block), block, status, own)
    };
    blocks.iter().enumerate().map(item).collect()
}

/// Logprobs as responses tell them.
pub(crate) fn logprobs(state: &ServerState, tokens: &[ScoredToken]) -> Vec<ChatLogprob> {
    ChatLogprobs::new(state.tokenizer(), tokens).map_or_else(Vec::new, |told| told.content)
}

impl ResponseObject {
    /// A response that has just begun.
    pub(crate) fn new(model: String, request: &ResponseRequest) -> Self {
        let (fields, sampling) = (&request.fields, &request.sampling);
        let tool = |ResponseTool::Function(tool): &ResponseTool| tool_object(tool);
        let id = random_id("resp_");
        name_answer(&id);
        Self {
            id,
            object: "response",
            created_at: unix_time_s(),
            status: Ending::Running.status(),
            background: false,
            error: None,
            incomplete_details: None,
            instructions: fields.instructions.clone(),
            max_output_tokens: fields.max_output_tokens,
            metadata: fields.metadata.clone().unwrap_or_default(),
            model,
            output: Vec::new(),
            parallel_tool_calls: fields.parallel_tool_calls.unwrap_or(true),
            previous_response_id: (),
            store: false,
            temperature: sampling.temperature.unwrap_or(1.0),
            text: json!(fields.text.clone().unwrap_or_default()),
            tool_choice: fields.tool_choice.clone().unwrap_or_else(|| json!("auto")),
            tools: fields.tools.iter().flatten().map(tool).collect(),
            top_logprobs: fields.top_logprobs.unwrap_or(0),
            top_p: sampling.top_p.unwrap_or(1.0),
            truncation: "disabled",
            usage: None,
        }
    }

    /// Fills in what is known when it has ended.
    pub(crate) fn end(&mut self, ending: Ending, output: Vec<Item>, counts: TokenCounts) {
        self.status = ending.status();
        self.incomplete_details =
            (ending == Ending::Cut).then(|| json!({"reason": "max_output_tokens"}));
        self.output = output;
        self.usage = Some(Usage::from(counts));
    }

    /// Fills in why it failed.
    pub(crate) fn fail(&mut self, message: &str, output: Vec<Item>) {
        self.status = "failed";
        self.error = Some(json!({"code": "server_error", "message": message}));
        self.output = output;
    }
}

fn tool_object(tool: &Tool) -> Value {
    json!({
        "type": "function", "name": tool.name, "description": tool.description,
        "parameters": tool.parameters, "strict": tool.strict.unwrap_or(false),
    })
}
