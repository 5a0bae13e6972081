//! `inflight batch`.

use std::path::PathBuf;

use clap::Args;

use super::{
    EngineArgs, MODEL_HELP, PolicyArgs, PoolingChoice, ReasoningParser, StepArgs, ToolCallParser,
};

pub(crate) const EXAMPLES: &str = "\
Examples:
  inflight batch requests.jsonl -o answers.jsonl
  inflight batch requests.jsonl -o answers.jsonl --model Qwen/Qwen3-0.6B

Each line of the input is a request in the form of OpenAI's batches:
  {\"custom_id\": \"1\", \"method\": \"POST\", \"url\": \"/v1/chat/completions\",
   \"body\": {\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}}
(on one line; also /v1/completions, /v1/embeddings and /v1/responses). Answers come as they are \
ready. Whatever ended a run, the same command goes on where it was: no line that has its answer is \
asked again.";

/// Answers a file of requests.
#[derive(Args, Debug)]
pub(crate) struct BatchArgs {
    /// File of requests, one a line
    #[arg(value_name = "IN.jsonl")]
    pub(crate) input: PathBuf,

    /// File of answers, one a line; if it has some, the run goes on from there
    #[arg(short, long, value_name = "OUT.jsonl")]
    pub(crate) output: PathBuf,

    #[arg(long, help = MODEL_HELP, default_value = "default", hide_default_value = true)]
    pub(crate) model: String,

    /// Names by which requests may call the model [default: MODEL's own name]
    #[arg(long, value_name = "NAME", num_args = 1..)]
    pub(crate) served_model_name: Vec<String>,

    /// What embeddings are made of: auto is what the model's folder says (1_Pooling), otherwise the
    /// last token
    #[arg(long, value_enum, default_value_t = PoolingChoice::Auto)]
    pub(crate) pooling: PoolingChoice,

    /// How the model writes tool calls: auto reads it off its chat template
    #[arg(long, value_enum, default_value_t = ToolCallParser::Auto)]
    pub(crate) tool_call_parser: ToolCallParser,

    /// Whether thoughts (<think>...</think>) are told apart from the answer: auto does so if the
    /// model's chat template knows them
    #[arg(long, value_enum, default_value_t = ReasoningParser::Auto)]
    pub(crate) reasoning_parser: ReasoningParser,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,

    #[command(flatten)]
    pub(crate) policy: PolicyArgs,

    #[command(flatten)]
    pub(crate) steps: StepArgs,
}
