//! Chat templates: messages to prompt.

mod functions;
mod tojson;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use serde_json::{Map, Value};

use crate::TokenizerError;
use functions::Refusal;

/// Steps that a template may take, or pieces of 64 bytes that it may allocate: half a second and
/// 320 MB at most, and a thousand steps for each of 5,000 messages.
const FUEL: u64 = 5_000_000;

/// How deep a template may nest, a macro's call costing some ten: what a stack of 2 MB holds.
const RECURSION_LIMIT: usize = 500;

const DEFAULT: &str = "chat_template";
const TOOL_USE: &str = "chat_template (tool_use)";

/// The names of special tokens that templates write out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TemplateTokens {
    /// Starts a text.
    pub bos: Option<String>,
    /// Ends a text.
    pub eos: Option<String>,
    /// Stands for unknown text.
    pub unk: Option<String>,
    /// Fills up batches.
    pub pad: Option<String>,
}

/// What a template renders.
#[derive(Clone, Copy, Debug)]
pub struct ChatInput<'a> {
    /// A list of objects with `role`, `content` and what else the template reads.
    pub messages: &'a Value,
    /// A list of function descriptions.
    pub tools: Option<&'a Value>,
    /// End with the start of the assistant's answer.
    pub add_generation_prompt: bool,
    /// Further variables (`enable_thinking`, `documents`, ...); they overrule all others.
    pub extra: Option<&'a Map<String, Value>>,
}

/// A compiled chat template, which renders as `transformers` does: blocks trimmed, Python's
/// methods, `tojson`, `raise_exception`, `strftime_now`, loop controls, lenient undefined.
///
/// A template is a program from the model's file. It gets bounded steps and recursion, and sees
/// nothing but its input.
///
/// # Source
/// `utils/chat_template_utils.py` of transformers.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    tokens: TemplateTokens,
}

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    /// A template that does not parse, with the line.
    pub fn new(source: &str, tokens: TemplateTokens) -> Result<Self, TokenizerError> {
        let mut template = Self { environment: environment()?, tokens };
        template.add(DEFAULT, source)?;
        Ok(template)
    }

    /// Adds a second template, which renders inputs that bring tools.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_tool_use(mut self, source: &str) -> Result<Self, TokenizerError> {
        self.add(TOOL_USE, source)?;
        Ok(self)
    }

    fn add(&mut self, name: &'static str, source: &str) -> Result<(), TokenizerError> {
        self.environment
            .add_template_owned(name, functions::without_generation_tags(source))
            .map_err(|error| TokenizerError::TemplateSyntax(describe(&error)))
    }

    /// Whether a template's text contains `text`: what it does not write, it cannot mean.
    pub fn mentions(&self, text: &str) -> bool {
        self.environment.templates().any(|(_, template)| template.source().contains(text))
    }

    /// Renders messages as a prompt.
    ///
    /// # Errors
    /// [`TokenizerError::TemplateRefused`] with the template's own words if it calls
    /// `raise_exception`, else [`TokenizerError::TemplateFailed`].
    pub fn render(&self, input: &ChatInput<'_>) -> Result<String, TokenizerError> {
        let has_tool_use = self.environment.get_template(TOOL_USE).is_ok();
        let name = if input.tools.is_some() && has_tool_use { TOOL_USE } else { DEFAULT };
        self.environment
            .get_template(name)
            .and_then(|template| template.render(self.variables(input)))
            .map_err(|error| into_tokenizer_error(&error))
    }

    /// All that a template sees, later entries overruling earlier ones.
    fn variables(&self, input: &ChatInput<'_>) -> minijinja::Value {
        let json = |value: &Value| minijinja::Value::from(Serde(value));
        let text = |text: &Option<String>| match text {
            Some(text) => minijinja::Value::from(text.as_str()),
            None => minijinja::Value::UNDEFINED,
        };
        let given = [
            ("messages", json(input.messages)),
            ("tools", json(input.tools.unwrap_or(&Value::Null))),
            ("documents", minijinja::Value::from(())),
            ("add_generation_prompt", minijinja::Value::from(input.add_generation_prompt)),
            ("bos_token", text(&self.tokens.bos)),
            ("eos_token", text(&self.tokens.eos)),
            ("unk_token", text(&self.tokens.unk)),
            ("pad_token", text(&self.tokens.pad)),
        ];
        let extra = input.extra.into_iter().flatten();
        let extra = extra.map(|(name, value)| (name.as_str(), json(value)));
        minijinja::Value::from_pairs(given.into_iter().chain(extra))
    }
}

fn environment() -> Result<Environment<'static>, TokenizerError> {
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .map_err(|error| TokenizerError::TemplateSyntax(describe(&error)))?;
    let mut environment = Environment::new();
    environment.set_syntax(syntax);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(RECURSION_LIMIT);
    environment.add_filter("tojson", tojson::tojson);
    environment.add_function("raise_exception", functions::raise_exception);
    environment.add_function("strftime_now", functions::strftime_now);
    Ok(environment)
}

fn into_tokenizer_error(error: &Error) -> TokenizerError {
    let first: &(dyn std::error::Error + 'static) = error;
    let mut causes = std::iter::successors(Some(first), |cause| cause.source());
    match causes.find_map(|cause| cause.downcast_ref::<Refusal>()) {
        Some(Refusal(message)) => TokenizerError::TemplateRefused(message.clone()),
        None if error.kind() == ErrorKind::OutOfFuel => {
            TokenizerError::TemplateFailed(format!("it takes more than {FUEL} steps"))
        }
        None => TokenizerError::TemplateFailed(describe(error)),
    }
}

/// The error with its causes, in one line.
fn describe(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}
