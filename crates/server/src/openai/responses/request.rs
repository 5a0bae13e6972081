//! A request's fields.

use inflight_grammar::Constraint;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::input::{Input, InputItem, messages};
use crate::chat::{Conversation, Tool, ToolChoice, check_tools, set_effort};
use crate::error::ApiError;
use crate::openai::logprobs::check_count;
use crate::openai::tool_fields::choice_of_word;
use crate::openapi::Fields;
use crate::request::{Asked, Body, SamplingFields, StringOr, neutral};
use crate::state::ServerState;

/// Fields of responses alone.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub(crate) struct ResponseFields {
    model: Option<String>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    #[schemars(with = "Option<StringOr<InputItem>>")]
    input: Option<Input>,
    pub(crate) instructions: Option<String>,
    pub(crate) max_output_tokens: Option<usize>,
    pub(crate) top_logprobs: Option<u32>,
    #[schemars(extend("items" = {"enum": ["message.output_text.logprobs"]}))]
    include: Option<Vec<String>>,
    pub(crate) tools: Option<Vec<ResponseTool>>,
    #[schemars(with = "Option<ToolChoiceSchema>")]
    pub(crate) tool_choice: Option<Value>,
    pub(crate) parallel_tool_calls: Option<bool>,
    reasoning: Option<Reasoning>,
    pub(crate) text: Option<TextField>,
    chat_template_kwargs: Option<Map<String, Value>>,
    pub(crate) metadata: Option<Map<String, Value>>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "ResponseStreamOptions")]
struct StreamOptions {
    #[schemars(extend("enum" = [false, null]))]
    include_obfuscation: Option<bool>,
}

/// What the text must be.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct TextField {
    #[serde(default)]
    format: TextFormat,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["medium", null]))]
    verbosity: Option<String>,
}

/// As `response_format` of chats, but flat.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum TextFormat {
    #[default]
    Text,
    JsonObject,
    JsonSchema {
        name: String,
        schema: Value,
        description: Option<String>,
        strict: Option<bool>,
    },
}

impl TextField {
    /// What it asks for; `None`: nothing.
    fn asked(self) -> Result<Option<Asked>, ApiError> {
        if self.verbosity.is_some_and(|verbosity| verbosity != "medium") {
            let reason = "leave it out or set it to \"medium\"";
            return Err(ApiError::unsupported("text.verbosity", reason));
        }
        Ok(match self.format {
            TextFormat::Text => None,
            TextFormat::JsonObject => Some(Asked::new(Constraint::JsonObject, "text.format")),
            TextFormat::JsonSchema { schema, .. } => {
                Some(Asked::new(Constraint::JsonSchema(schema), "text.format.schema"))
            }
        })
    }
}

/// How much to think.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "ReasoningOptions")]
struct Reasoning {
    effort: Option<String>,
    #[schemars(extend("type" = "null"))]
    summary: Option<Value>,
    #[schemars(extend("type" = "null"))]
    generate_summary: Option<Value>,
}

/// A member of `tools`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum ResponseTool {
    Function(Tool),
}

/// `tool_choice`, if it is no word.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
#[schemars(rename = "ResponseNamedTool")]
enum NamedTool {
    Function { name: String },
}

/// What [`tool_choice`] reads, for the API's description.
#[derive(JsonSchema)]
#[schemars(untagged, rename = "ResponseToolChoice")]
#[expect(dead_code, reason = "it is described, not made")]
enum ToolChoiceSchema {
    Word(#[schemars(extend("enum" = ["none", "auto", "required"]))] String),
    Named(NamedTool),
}

/// A whole request.
pub(crate) struct ResponseRequest {
    pub(crate) sampling: SamplingFields,
    pub(crate) fields: ResponseFields,
}

/// What [`ResponseRequest::parse`] takes.
pub(crate) fn describe(fields: Fields<'_>) -> Fields<'_> {
    fields
        .group::<ResponseFields>()
        .group::<SamplingFields>()
        .neutral(neutral::COMMON)
        .neutral(neutral::RESPONSES)
        .require("input")
}

impl ResponseRequest {
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        let mut body = Body::parse(bytes)?;
        // `metadata` and `top_logprobs` are taken before anybody calls them neutral.
        let request = Self { fields: body.take()?, sampling: body.take()? };
        body.take_neutral(neutral::COMMON)?;
        body.take_neutral(neutral::RESPONSES)?;
        body.refuse_rest()?;
        Ok(request)
    }

    pub(crate) fn model(&self) -> Option<String> {
        self.fields.model.clone()
    }

    pub(crate) fn is_streaming(&self) -> Result<bool, ApiError> {
        let is_streaming = self.fields.stream.unwrap_or(false);
        match &self.fields.stream_options {
            Some(_) if !is_streaming => {
                Err(ApiError::invalid("stream_options", "goes only with `stream`: true"))
            }
            Some(StreamOptions { include_obfuscation: Some(true) }) => {
                let param = "stream_options.include_obfuscation";
                Err(ApiError::unsupported(param, "leave it out or set it to false"))
            }
            _ => Ok(is_streaming),
        }
    }

    /// How many of the likeliest tokens to tell; `None`: no logprobs.
    pub(crate) fn top_logprobs(&self) -> Result<Option<u32>, ApiError> {
        let mut is_included = false;
        for name in self.fields.include.iter().flatten() {
            if name != "message.output_text.logprobs" {
                let reason = format!("there is no {name:?} here");
                return Err(ApiError::unsupported("include", reason));
            }
            is_included = true;
        }
        match self.fields.top_logprobs {
            None | Some(0) if !is_included => Ok(None),
            count => check_count("top_logprobs", count.unwrap_or(0)).map(Some),
        }
    }
}

impl ResponseFields {
    pub(crate) fn conversation(self, state: &ServerState) -> Result<Conversation, ApiError> {
        let input = self.input.ok_or(ApiError::Missing { param: "input" })?;
        let tools = self.tools.unwrap_or_default().into_iter();
        let tools: Vec<_> = tools.map(|ResponseTool::Function(tool)| tool).collect();
        let tool_choice = tool_choice(self.tool_choice)?;
        check_tools(&tools, &tool_choice, |index| format!("tools[{index}]"))?;
        let mut variables = self.chat_template_kwargs.unwrap_or_default();
        if let Some(reasoning) = self.reasoning {
            if reasoning.summary.is_some_and(|summary| !summary.is_null())
                || reasoning.generate_summary.is_some_and(|summary| !summary.is_null())
            {
                let reason = "thoughts are told whole, as reasoning_text; leave it out";
                return Err(ApiError::unsupported("reasoning.summary", reason));
            }
            if let Some(effort) = reasoning.effort {
                set_effort(&mut variables, &effort, state.style(), "reasoning.effort")?;
            }
        }
        Ok(Conversation {
            messages: messages(self.instructions.as_deref(), input)?,
            tools,
            tool_choice,
            only_one_call: self.parallel_tool_calls == Some(false),
            continues_last: false,
            adds_generation_prompt: true,
            asked: self.text.map_or(Ok(None), TextField::asked)?,
            variables,
            thinking_budget: None,
        })
    }
}

fn tool_choice(field: Option<Value>) -> Result<ToolChoice, ApiError> {
    match field {
        None | Some(Value::Null) => Ok(ToolChoice::Auto),
        Some(Value::String(word)) => choice_of_word(&word),
        Some(other) => match NamedTool::deserialize(&other) {
            Ok(NamedTool::Function { name }) => Ok(ToolChoice::Named(name)),
            Err(error) => Err(ApiError::invalid("tool_choice", error.to_string())),
        },
    }
}
