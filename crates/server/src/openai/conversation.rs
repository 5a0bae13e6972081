//! Fields that make a chat's prompt.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::messages::{Message, template_messages};
use super::tool_fields::{ToolChoiceField, ToolField, tool_choice};
use crate::chat::{Budget, Conversation, check_tools, set_effort, set_thinking};
use crate::error::ApiError;
use crate::state::ServerState;

/// What is said so far, and what the template makes of it.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub(crate) struct ConversationFields {
    messages: Option<Vec<Message>>,
    tools: Option<Vec<ToolField>>,
    tool_choice: Option<ToolChoiceField>,
    parallel_tool_calls: Option<bool>,
    reasoning_effort: Option<String>,
    enable_thinking: Option<bool>,
    /// vLLM's name. A model without thoughts keeps to any.
    thinking_token_budget: Option<u64>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
}

impl ConversationFields {
    /// Checks all fields.
    ///
    /// # Errors
    /// What is wrong with which field.
    pub(crate) fn resolve(self, state: &ServerState) -> Result<Conversation, ApiError> {
        let messages = self.messages.ok_or(ApiError::Missing { param: "messages" })?;
        let tools: Vec<_> =
            self.tools.unwrap_or_default().into_iter().map(ToolField::into_tool).collect();
        let tool_choice = tool_choice(self.tool_choice)?;
        check_tools(&tools, &tool_choice, |index| format!("tools[{index}].function"))?;
        let continues_last = self.continue_final_message.unwrap_or(false);
        if continues_last && self.add_generation_prompt == Some(true) {
            let reason = "goes only with `add_generation_prompt`: false";
            return Err(ApiError::invalid("continue_final_message", reason));
        }
        let mut variables = self.chat_template_kwargs.unwrap_or_default();
        if let Some(effort) = self.reasoning_effort {
            set_effort(&mut variables, &effort, state.style(), "reasoning_effort")?;
        }
        if let Some(enable) = self.enable_thinking {
            set_thinking(&mut variables, enable, state.style(), "enable_thinking")?;
        }
        Ok(Conversation {
            messages: template_messages(messages)?,
            tools,
            tool_choice,
            only_one_call: self.parallel_tool_calls == Some(false),
            continues_last,
            adds_generation_prompt: self.add_generation_prompt.unwrap_or(true),
            asked: None,
            variables,
            thinking_budget: self
                .thinking_token_budget
                .map(|num_tokens| Budget { num_tokens, field: "thinking_token_budget" }),
        })
    }
}
