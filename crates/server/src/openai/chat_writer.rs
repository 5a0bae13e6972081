//! Answers of a chat in OpenAI's shapes.

use schemars::JsonSchema;
use serde::Serialize;

use super::chunks::ChunkWriter;
use super::logprobs::ChatLogprobs;
use super::response::Ending;
use crate::chat::{Block, Blocks, Call, ChatDelta, ChatReader};
use crate::generation::{Delta, ScoredToken};
use crate::output::Piece;
use crate::state::ServerState;
use crate::text_stream::TextOptions;
use crate::usage::TokenCounts;

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "ChatChoice")]
pub(crate) struct WholeChoice {
    index: usize,
    message: AssistantMessage,
    logprobs: Option<ChatLogprobs>,
    #[serde(flatten)]
    ending: Ending,
}

#[derive(Debug, Serialize, JsonSchema)]
struct AssistantMessage {
    role: &'static str,
    /// Null if tools were called and nothing was said.
    content: Option<String>,
    refusal: (),
    /// DeepSeek's and vLLM's addition.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "AnswerToolCall")]
struct ToolCall {
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    function: FunctionCall,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "AnswerFunctionCall")]
struct FunctionCall {
    name: String,
    arguments: String,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "ChatChunkChoice")]
pub(crate) struct ChunkChoice {
    index: usize,
    delta: MessageDelta,
    logprobs: Option<ChatLogprobs>,
    #[serde(flatten)]
    ending: Ending,
}

#[derive(Debug, Default, Serialize, JsonSchema)]
struct MessageDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[ToolCallDelta; 1]>,
}

/// The first of a call has its id and name, the others more of its arguments.
#[derive(Debug, Default, Serialize, JsonSchema)]
struct ToolCallDelta {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: FunctionDelta,
}

#[derive(Debug, Default, Serialize, JsonSchema)]
struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

/// Writes the answers of one request.
pub(crate) struct ChatWriter {
    state: ServerState,
    text: TextOptions,
    tells_reasoning: bool,
    answers: Vec<Progress>,
}

/// How far an answer's stream is.
#[derive(Clone, Debug, Default)]
struct Progress {
    has_role: bool,
    num_calls: usize,
    /// Tokens whose text is held back.
    tokens: Vec<ScoredToken>,
}

impl ChatWriter {
    pub(crate) fn new(
        state: &ServerState,
        text: TextOptions,
        num_outputs: usize,
        tells_reasoning: bool,
    ) -> Self {
        let answers = vec![Progress::default(); num_outputs];
        Self { state: state.clone(), text, tells_reasoning, answers }
    }

    pub(crate) fn whole_choice(&mut self, index: usize, answer: ChatDelta) -> WholeChoice {
        let logprobs = ChatLogprobs::new(self.state.tokenizer(), &answer.tokens);
        let mut ending = self.ending(&answer);
        let message = self.message(answer.pieces);
        if !message.tool_calls.is_empty() {
            ending = ending.with_calls();
        }
        WholeChoice { index, message, logprobs, ending }
    }

    /// As the writer of a stream.
    pub(crate) fn streaming(self, reader: ChatReader) -> ChatChunks {
        ChatChunks { writer: self, reader }
    }

    fn message(&self, pieces: Vec<Piece>) -> AssistantMessage {
        let (mut content, mut reasoning) = (String::new(), String::new());
        let mut tool_calls = Vec::new();
        for block in Blocks::of(pieces, || self.state.style().call_id("call_")) {
            match block {
                Block::Reasoning(text) => reasoning += &text,
                Block::Text(text) => content += &text,
                Block::Call(Call { id, name, arguments }) => tool_calls.push(ToolCall {
                    id,
                    kind: "function",
                    function: FunctionCall { name, arguments },
                }),
            }
        }
        let has_reasoning = self.tells_reasoning && !reasoning.is_empty();
        AssistantMessage {
            role: "assistant",
            content: (tool_calls.is_empty() || !content.is_empty()).then_some(content),
            refusal: (),
            reasoning_content: has_reasoning.then_some(reasoning),
            tool_calls,
        }
    }

    fn ending(&self, answer: &ChatDelta) -> Ending {
        let eos_ids = self.state.tokenizer().eos_ids();
        Ending::new(answer.finish.as_ref(), &self.text.stops, eos_ids)
    }

    /// A piece as a chunk's delta; `None` if it is not told.
    fn delta(&mut self, index: usize, piece: Piece) -> Option<MessageDelta> {
        let num_calls = &mut self.answers[index].num_calls;
        Some(match piece {
            Piece::Reasoning(_) if !self.tells_reasoning => return None,
            Piece::Reasoning(text) => {
                MessageDelta { reasoning_content: Some(text), ..MessageDelta::default() }
            }
            Piece::Text(text) => MessageDelta { content: Some(text), ..MessageDelta::default() },
            Piece::Call { name } => {
                *num_calls += 1;
                call_delta(ToolCallDelta {
                    index: *num_calls - 1,
                    id: Some(self.state.style().call_id("call_")),
                    kind: Some("function"),
                    function: FunctionDelta { name: Some(name), arguments: String::new() },
                })
            }
            Piece::Arguments(arguments) => call_delta(ToolCallDelta {
                index: *num_calls - 1,
                function: FunctionDelta { name: None, arguments },
                ..ToolCallDelta::default()
            }),
        })
    }
}

fn call_delta(call: ToolCallDelta) -> MessageDelta {
    MessageDelta { tool_calls: Some([call]), ..MessageDelta::default() }
}

/// Writes the chunks of one request.
pub(crate) struct ChatChunks {
    writer: ChatWriter,
    reader: ChatReader,
}

impl ChunkWriter for ChatChunks {
    type Choice = ChunkChoice;
    const OBJECT: &'static str = "chat.completion.chunk";

    fn choices(
        &mut self,
        index: usize,
        delta: Delta,
        counts: &mut TokenCounts,
    ) -> Vec<ChunkChoice> {
        let mut answer = self.reader.read(index, delta, counts);
        let writer = &mut self.writer;
        let mut deltas = Vec::new();
        if !std::mem::replace(&mut writer.answers[index].has_role, true) {
            let content = Some(String::new());
            deltas.push(MessageDelta { role: Some("assistant"), content, ..Default::default() });
        }
        let num_opening = deltas.len();
        let pieces = std::mem::take(&mut answer.pieces);
        deltas.extend(pieces.into_iter().filter_map(|piece| writer.delta(index, piece)));
        if deltas.len() == num_opening && answer.finish.is_some() {
            deltas.push(MessageDelta::default());
        }
        let mut ending = writer.ending(&answer);
        let progress = &mut writer.answers[index];
        if progress.num_calls > 0 {
            ending = ending.with_calls();
        }
        progress.tokens.append(&mut answer.tokens);
        let empty = |delta| ChunkChoice { index, delta, logprobs: None, ending: Ending::default() };
        let has_more = deltas.len() > num_opening;
        let mut choices: Vec<_> = deltas.into_iter().map(empty).collect();
        // What belongs to the whole delta goes with the last of its chunks.
        if let Some(last) = choices.last_mut().filter(|_| has_more) {
            let tokens = std::mem::take(&mut progress.tokens);
            last.logprobs = ChatLogprobs::new(writer.state.tokenizer(), &tokens);
            last.ending = ending;
        }
        choices
    }
}
