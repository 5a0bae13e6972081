//! A request's fields.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::content::{Message, TextBlock, turns};
use crate::chat::{Budget, Conversation, Tool, ToolChoice, check_tools, set_thinking};
use crate::error::ApiError;
use crate::openapi::Fields;
use crate::request::{Body, SamplingFields, StringOr, neutral};
use crate::state::ServerState;

const THINKING_BUDGET: &str = "thinking.budget_tokens";

/// What makes the prompt.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub(crate) struct PromptFields {
    pub(crate) model: Option<String>,
    messages: Option<Vec<Message>>,
    system: Option<StringOr<TextBlock>>,
    tools: Option<Vec<ToolField>>,
    tool_choice: Option<ToolChoiceField>,
    thinking: Option<Thinking>,
    chat_template_kwargs: Option<Map<String, Value>>,
}

/// What makes the answer.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub(crate) struct AnswerFields {
    pub(crate) max_tokens: Option<usize>,
    stop_sequences: Option<Vec<String>>,
    pub(crate) stream: Option<bool>,
}

/// A member of `tools`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "fields that are known and change nothing")]
#[schemars(rename = "AnthropicTool")]
struct ToolField {
    r#type: Option<ToolKind>,
    name: String,
    description: Option<String>,
    input_schema: Map<String, Value>,
    strict: Option<bool>,
    cache_control: Option<Value>,
}

/// Tools that the client runs; this server runs none.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "AnthropicToolKind")]
enum ToolKind {
    Custom,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "lowercase", deny_unknown_fields)]
#[schemars(rename = "AnthropicToolChoice")]
enum ToolChoiceField {
    Auto { disable_parallel_tool_use: Option<bool> },
    Any { disable_parallel_tool_use: Option<bool> },
    Tool { name: String, disable_parallel_tool_use: Option<bool> },
    None {},
}

impl ToolChoiceField {
    /// The choice, and whether only one call may come of it.
    fn resolve(self) -> (ToolChoice, bool) {
        let (choice, only_one) = match self {
            Self::Auto { disable_parallel_tool_use } => {
                (ToolChoice::Auto, disable_parallel_tool_use)
            }
            Self::Any { disable_parallel_tool_use } => {
                (ToolChoice::Required, disable_parallel_tool_use)
            }
            Self::Tool { name, disable_parallel_tool_use } => {
                (ToolChoice::Named(name), disable_parallel_tool_use)
            }
            Self::None {} => (ToolChoice::None, None),
        };
        (choice, only_one.unwrap_or(false))
    }
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "lowercase", deny_unknown_fields)]
#[schemars(rename = "AnthropicThinking")]
enum Thinking {
    Enabled {
        #[schemars(extend("minimum" = 1))]
        budget_tokens: Option<u64>,
    },
    Adaptive {},
    Disabled {},
}

/// A whole request.
pub(crate) struct MessageRequest {
    pub(crate) prompt: PromptFields,
    pub(crate) answer: AnswerFields,
    pub(crate) sampling: SamplingFields,
}

/// What [`MessageRequest::parse`] takes.
pub(crate) fn describe(fields: Fields<'_>) -> Fields<'_> {
    fields
        .group::<PromptFields>()
        .group::<AnswerFields>()
        .group::<SamplingFields>()
        .neutral(neutral::ANTHROPIC)
        .require("messages")
        .require("max_tokens")
}

/// What [`PromptFields::parse`] takes.
pub(crate) fn describe_prompt(fields: Fields<'_>) -> Fields<'_> {
    fields.group::<PromptFields>().require("messages")
}

impl MessageRequest {
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        let mut body = Body::parse(bytes)?;
        let mut request =
            Self { prompt: body.take()?, answer: body.take()?, sampling: body.take()? };
        body.take_neutral(neutral::ANTHROPIC)?;
        body.refuse_rest()?;
        request.check_thinking_budget()?;
        request.sampling.set_stops(request.answer.stop_sequences.take(), "stop_sequences")?;
        Ok(request)
    }
}

impl MessageRequest {
    /// There must be tokens left for the answer, as with Anthropic.
    fn check_thinking_budget(&self) -> Result<(), ApiError> {
        let Some(Thinking::Enabled { budget_tokens: Some(budget) }) = self.prompt.thinking else {
            return Ok(());
        };
        let most = self.answer.max_tokens.map_or(u64::MAX, |max_tokens| max_tokens as u64);
        if budget == 0 || budget >= most {
            let reason = format!("is {budget}; it must be over 0 and below max_tokens");
            return Err(ApiError::invalid(THINKING_BUDGET, reason));
        }
        Ok(())
    }
}

impl PromptFields {
    /// The fields of a request that asks only for their size.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        let mut body = Body::parse(bytes)?;
        let fields = body.take()?;
        body.refuse_rest()?;
        Ok(fields)
    }

    pub(crate) fn conversation(self, state: &ServerState) -> Result<Conversation, ApiError> {
        let messages = self.messages.ok_or(ApiError::Missing { param: "messages" })?;
        let tools = self.tools.unwrap_or_default().into_iter();
        let tools: Vec<_> = tools
            .map(|tool| Tool {
                name: tool.name,
                description: tool.description,
                parameters: Some(tool.input_schema),
                strict: tool.strict,
            })
            .collect();
        let choice = self.tool_choice.map(ToolChoiceField::resolve);
        let (tool_choice, only_one_call) = choice.unwrap_or_default();
        check_tools(&tools, &tool_choice, |index| format!("tools[{index}]"))?;
        let thinking_budget = match &self.thinking {
            Some(Thinking::Enabled { budget_tokens }) => *budget_tokens,
            _ => None,
        };
        let thinking_budget =
            thinking_budget.map(|num_tokens| Budget { num_tokens, field: THINKING_BUDGET });
        let mut variables = self.chat_template_kwargs.unwrap_or_default();
        match self.thinking {
            None => {}
            Some(Thinking::Enabled { .. } | Thinking::Adaptive {}) => {
                set_thinking(&mut variables, true, state.style(), "thinking")?;
            }
            Some(Thinking::Disabled {}) => {
                set_thinking(&mut variables, false, state.style(), "thinking")?;
            }
        }
        let (messages, continues_last) = turns(self.system, messages)?;
        Ok(Conversation {
            messages,
            tools,
            tool_choice,
            only_one_call,
            continues_last,
            adds_generation_prompt: true,
            asked: None,
            variables,
            thinking_budget,
        })
    }
}
