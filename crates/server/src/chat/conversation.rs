//! What is said so far, as a prompt.

use inflight_tokenizer::{ChatInput, Special, Tokenizer, TokenizerError};
use serde_json::{Map, Value, json};

use super::style::ChatStyle;
use super::tools::{self, Tool, ToolChoice};
use crate::output::{OutputOptions, ToolCallOptions};
use crate::request::Asked;

/// A conversation that an answer is wanted to.
#[derive(Clone, Debug, Default)]
pub(crate) struct Conversation {
    /// As templates take them: `role`, `content` and, where they apply, `tool_calls` (with
    /// arguments as objects), `tool_call_id`, `name`, `reasoning_content`.
    pub(crate) messages: Vec<Value>,
    pub(crate) tools: Vec<Tool>,
    pub(crate) tool_choice: ToolChoice,
    /// Whether the model may call several tools at once.
    pub(crate) only_one_call: bool,
    /// Whether the prompt ends inside the last message, for the model to go on with it.
    pub(crate) continues_last: bool,
    /// Whether the prompt ends with the start of an answer.
    pub(crate) adds_generation_prompt: bool,
    /// What the answer must be; calls that are asked for come before it.
    pub(crate) asked: Option<Asked>,
    /// Further variables of the template.
    pub(crate) variables: Map<String, Value>,
    /// How much the model may think; `None`: as much as it likes.
    pub(crate) thinking_budget: Option<Budget>,
}

/// Most tokens of thoughts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Budget {
    pub(crate) num_tokens: u64,
    /// What the API calls it.
    pub(crate) field: &'static str,
}

/// A rendered conversation.
#[derive(Clone, Debug)]
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<u32>,
    /// What to look for in the answer.
    pub(crate) output: OutputOptions,
}

impl Conversation {
    /// Renders the messages and encodes them.
    ///
    /// # Errors
    /// There is no template, or it refuses the messages.
    pub(crate) fn encode(
        mut self,
        tokenizer: &Tokenizer,
        style: &ChatStyle,
    ) -> Result<Prompt, TokenizerError> {
        let tools = self.take_tools(style);
        if !style.writes_calls {
            self.messages.iter_mut().for_each(write_out_calls);
        }
        let text = self.render(tokenizer, tools.as_ref())?;
        let reasoning = style.reasoning.map(|tags| (tags, tags.are_open_after(&text)));
        let tokens = tokenizer.encode_prompt(&text, Special::Parse)?;
        let output = OutputOptions { reasoning, tools: self.tool_calls(style) };
        Ok(Prompt { tokens, output })
    }

    fn has_tools(&self) -> bool {
        !self.tools.is_empty() && self.tool_choice != ToolChoice::None
    }

    fn tool_calls(&self, style: &ChatStyle) -> Option<ToolCallOptions> {
        let names = || self.tools.iter().map(|tool| tool.name.clone()).collect();
        let format = style.tool_format.filter(|_| self.has_tools())?;
        Some(ToolCallOptions { format, names: names(), only_one: self.only_one_call })
    }

    /// The tools for the template; if it does not know tools, the first message speaks of them.
    fn take_tools(&mut self, style: &ChatStyle) -> Option<Value> {
        if !self.has_tools() {
            return None;
        }
        let tools: Vec<_> = self.tools.iter().map(Tool::template).collect();
        if style.tells_tools {
            return Some(Value::Array(tools));
        }
        let mut text = tools::instructions(&tools);
        let is_system = |message: &&mut Value| message["role"] == "system";
        match self.messages.first_mut().filter(is_system) {
            Some(message) => {
                text.insert_str(0, "\n\n");
                text.insert_str(0, message["content"].as_str().unwrap_or_default());
                message["content"] = text.into();
            }
            None => self.messages.insert(0, json!({"role": "system", "content": text})),
        }
        None
    }

    fn render(
        &self,
        tokenizer: &Tokenizer,
        tools: Option<&Value>,
    ) -> Result<String, TokenizerError> {
        let messages = Value::Array(self.messages.clone());
        let mut text = tokenizer.render_chat(&ChatInput {
            messages: &messages,
            tools,
            add_generation_prompt: self.adds_generation_prompt && !self.continues_last,
            extra: Some(&self.variables),
        })?;
        if self.continues_last {
            let last = self.messages.last().and_then(|message| message["content"].as_str());
            let whole = last.unwrap_or_default().trim_start();
            let last = whole.trim_end();
            // What the template writes after a message is cut off again.
            let at = text.rfind(last).ok_or_else(|| {
                TokenizerError::TemplateFailed("it does not write the last message".to_owned())
            })?;
            // White space at its end stays where the template leaves it.
            let len = if text[at..].starts_with(whole) { whole.len() } else { last.len() };
            text.truncate(at + len);
        }
        Ok(text)
    }
}

/// Turns calls and their results into text, for templates that would leave them out.
fn write_out_calls(message: &mut Value) {
    let calls = message.as_object_mut().and_then(|message| message.remove("tool_calls"));
    if let Some(Value::Array(calls)) = calls {
        let mut text = message["content"].as_str().unwrap_or_default().to_owned();
        for call in calls {
            text += if text.is_empty() { "" } else { "\n" };
            text += &format!("<tool_call>\n{}\n</tool_call>", call["function"]);
        }
        message["content"] = text.into();
    }
    if message["role"] == "tool" {
        let content = message["content"].as_str().unwrap_or_default();
        let text = format!("<tool_response>\n{content}\n</tool_response>");
        *message = json!({"role": "user", "content": text});
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_written_out_for_simple_templates() {
        let call = json!({"type": "function", "id": "c", "function": {
            "name": "f", "arguments": {"a": 1},
        }});
        let mut message = json!({"role": "assistant", "content": "Hm", "tool_calls": [call]});
        write_out_calls(&mut message);
        let text = "Hm\n<tool_call>\n{\"name\":\"f\",\"arguments\":{\"a\":1}}\n</tool_call>";
        assert_eq!(message, json!({"role": "assistant", "content": text}));
        let mut result = json!({"role": "tool", "content": "4", "tool_call_id": "c"});
        write_out_calls(&mut result);
        let text = "<tool_response>\n4\n</tool_response>";
        assert_eq!(result, json!({"role": "user", "content": text}));
    }
}
