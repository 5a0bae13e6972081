//! What users write. Nothing is resolved here.
//!
//! Here: commands and what only they have. [`engine`]: how models are loaded and run, which all
//! commands share. [`access`]: who may ask. [`policy`]: who runs when. [`bench`]: experiments.
//! [`simulate`]: planning. [`replay`]: what was decided.
//! [`tune`]: which kernels.

mod access;
mod batch;
mod batching;
mod bench;
mod bench_serve;
mod chats;
mod engine;
mod memory;
mod policy;
mod recall;
mod recorder;
mod replay;
mod simulate;
mod text;
mod top;
mod trace;
mod tune;

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

pub(crate) use access::AccessArgs;
pub(crate) use batch::BatchArgs;
pub(crate) use batching::{BatchingArgs, BatchingExperiment};
pub(crate) use bench::{
    AsyncArgs, BenchArgs, BenchCommand, CompareArgs, ConstraintChoice, FigureFiles, KernelsArgs,
    MeasuredModel, OfflineArgs, OverlapChoice,
};
pub(crate) use bench_serve::{ArrivalsChoice, EndpointChoice, PromptChoice, ServeLoadArgs};
pub(crate) use chats::ChatsArgs;
pub(crate) use engine::{
    CascadeChoice, DeviceChoice, DeviceWait, EngineArgs, KvChoice, LoadFormat, Quantization,
    SoftmaxChoice, StepArgs, Switch, WeightDtype,
};
pub(crate) use memory::MemoryArgs;
pub(crate) use policy::{BatchingChoice, MixingChoice, OrderChoice, PolicyArgs};
pub(crate) use recall::RecallArgs;
pub(crate) use recorder::RecorderArgs;
pub(crate) use replay::ReplayArgs;
pub(crate) use simulate::{LoadArgs, SimulateArgs, SimulatedDeviceArgs, SimulatedKv, SpreadChoice};
pub(crate) use text::TextArgs;
pub(crate) use top::TopArgs;
pub(crate) use trace::TraceArgs;
pub(crate) use tune::TuneArgs;

const EXAMPLES: &str = "\
Examples:
  inflight serve                                   serve the default model on 127.0.0.1:8000
  inflight serve model.gguf --port 9000            serve a GGUF file
  inflight serve Qwen/Qwen3-0.6B                   serve a model of the Hugging Face hub
  inflight run model.gguf 'Why is the sky blue?'   print one answer
  inflight chat model.gguf                         talk
  inflight batch in.jsonl -o out.jsonl             answer a file of requests
  inflight doctor                                  check the device and every operator on it
  inflight bench offline --config llama-3.1-8b     measure, with no download

`inflight serve --help` explains every flag.";

const SERVE_EXAMPLES: &str = "\
Examples:
  inflight serve
  inflight serve ./Qwen3-0.6B --max-model-len 4096 --served-model-name qwen
  inflight serve model.gguf --max-num-seqs 8 --kv-cache-memory 2

Then, in another terminal:
  curl -N http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}], \"stream\": true}'";

const RUN_EXAMPLES: &str = "\
Examples:
  inflight run default 'Why is the sky blue?'
  inflight run model.gguf --raw 'Once upon a time' --max-tokens 100 --temperature 0.8
  git diff | inflight run model.gguf --system 'Write a commit message.' -";

const CHAT_EXAMPLES: &str = "\
Examples:
  inflight chat
  inflight chat model.gguf --system 'Answer in rhymes.' --temperature 0.7

While it runs: Ctrl-C stops an answer, /reset forgets the conversation, /exit or Ctrl-D leaves.";

const DOCTOR_EXAMPLES: &str = "\
Examples:
  inflight doctor
  inflight doctor --device cuda    fail if there is no GPU to use

It says what was found, compares every operator with the CPU's on random inputs, compares the \
engine's tokens with overlap on and off, and measures copies. The exit code is 0 only if all is \
well.";

/// What MODEL may be, for every command's help.
const MODEL_HELP: &str = "\
Model: a .gguf file, a folder (config.json, safetensors, tokenizer.json), a name on the Hugging \
Face hub (org/name, org/name:revision, org/name:file.gguf), or `default`";

/// Serves large language models over the OpenAI API.
///
/// While the device computes one batch, the host already plans and sends the next. Requests join
/// and leave the running batch at every step.
#[derive(Debug, Parser)]
#[command(name = "inflight", version, propagate_version = true, after_help = EXAMPLES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,

    /// How much to log: error, warn, info, debug or trace, or a filter such as
    /// `info,inflight_engine=trace` [default: info for serve, warn otherwise]
    #[arg(long, global = true, env = "RUST_LOG", value_name = "LEVEL")]
    pub(crate) log_level: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve a model over the OpenAI API
    #[command(after_help = SERVE_EXAMPLES)]
    Serve(Box<ServeArgs>),
    /// Print the answer to one prompt
    #[command(after_help = RUN_EXAMPLES)]
    Run(RunArgs),
    /// Talk to a model
    #[command(after_help = CHAT_EXAMPLES)]
    Chat(ChatArgs),
    /// Answer a file of requests, in the form of OpenAI's batches
    #[command(after_help = batch::EXAMPLES)]
    Batch(Box<BatchArgs>),
    /// Say what was found and check that it computes what it should
    #[command(after_help = DOCTOR_EXAMPLES)]
    Doctor(DoctorArgs),
    /// Measure
    Bench(BenchArgs),
    /// Do again what an engine's scheduler decided, plan by plan
    #[command(after_help = replay::REPLAY_EXAMPLES)]
    Replay(ReplayArgs),
    /// Say what a model on a GPU would do under a load, and how many GPUs it needs
    #[command(after_help = simulate::SIMULATE_EXAMPLES)]
    Simulate(Box<SimulateArgs>),
    /// Look at a running server: how busy, how fast, how full, and why the device was idle
    #[command(after_help = top::EXAMPLES)]
    Top(TopArgs),
    /// Show where the time of the last steps went, and why the device was idle
    #[command(after_help = trace::EXAMPLES)]
    Trace(TraceArgs),
    /// Show by which kernels a GPU computes a model's matrix products, and choose them anew
    #[command(after_help = tune::EXAMPLES)]
    Tune(TuneArgs),
}

impl Command {
    pub(crate) fn default_log_level(&self) -> &'static str {
        match self {
            Self::Serve(_) => "info",
            Self::Run(_)
            | Self::Chat(_)
            | Self::Batch(_)
            | Self::Doctor(_)
            | Self::Bench(_)
            | Self::Replay(_)
            | Self::Simulate(_)
            | Self::Top(_)
            | Self::Trace(_)
            | Self::Tune(_) => "warn",
        }
    }
}

#[derive(Args, Debug)]
pub(crate) struct ServeArgs {
    #[arg(help = MODEL_HELP, default_value = "default", hide_default_value = true)]
    pub(crate) model: String,

    /// Address to listen on; 0.0.0.0 lets other machines in
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) host: String,

    /// Port to listen on; 0 lets the system choose one
    #[arg(long, default_value_t = 8000)]
    pub(crate) port: u16,

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

    /// Requests that may wait for a place in the batch; further ones are refused with status 429
    #[arg(long, default_value_t = 1024, value_name = "REQUESTS")]
    pub(crate) max_queue: usize,

    /// Seconds that running requests may go on after SIGTERM or Ctrl-C; a second one ends at once
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    pub(crate) shutdown_timeout: u64,

    /// Seconds that requests may wait without a step being taken until /health/ready fails
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    pub(crate) stall_timeout: u64,

    /// Collector of OpenTelemetry that gets a trace of every request, over HTTP; without a path,
    /// /v1/traces
    #[arg(long, alias = "otlp-traces-endpoint", value_parser = collector,
        value_name = "http://HOST:PORT")]
    pub(crate) otlp_endpoint: Option<String>,

    /// Folder of files and batches (/v1/files, /v1/batches), which are there again after a restart
    /// [default: none, and no batches]
    #[arg(long, value_name = "DIR")]
    pub(crate) files_dir: Option<PathBuf>,

    /// Most that uploaded files and answers may take there
    #[arg(long, default_value_t = 8, value_name = "GIB", requires = "files_dir",
        value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub(crate) files_size: u64,

    /// Whether /metrics has its figures under vLLM's names too
    #[arg(long, value_enum, default_value_t = Switch::On)]
    pub(crate) vllm_metrics: Switch,

    #[command(flatten)]
    pub(crate) access: AccessArgs,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,

    #[command(flatten)]
    pub(crate) policy: PolicyArgs,

    #[command(flatten)]
    pub(crate) steps: StepArgs,
}

fn collector(endpoint: &str) -> Result<String, String> {
    inflight_server::check_collector(endpoint).map(|()| endpoint.to_owned())
}

/// What of a prompt's states an embedding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PoolingChoice {
    Auto,
    /// The one after the last token.
    Last,
    /// The mean of those after all tokens.
    Mean,
}

/// How a model writes tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ToolCallParser {
    Auto,
    /// Hermes, Qwen, SmolLM: JSON between <tool_call> tags.
    Hermes,
    /// Llama 3: a JSON object alone.
    Llama3,
    /// Mistral: after [TOOL_CALLS].
    Mistral,
}

/// Whether thoughts are told apart from the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ReasoningParser {
    Auto,
    None,
}

#[derive(Args, Debug)]
pub(crate) struct RunArgs {
    #[arg(help = MODEL_HELP)]
    pub(crate) model: String,

    /// What to answer; `-` reads it from standard input
    pub(crate) prompt: String,

    /// Continue PROMPT as it is, without the model's chat template
    #[arg(long)]
    pub(crate) raw: bool,

    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,

    #[command(flatten)]
    pub(crate) steps: StepArgs,
}

#[derive(Args, Debug)]
pub(crate) struct ChatArgs {
    #[arg(help = MODEL_HELP, default_value = "default", hide_default_value = true)]
    pub(crate) model: String,

    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,

    #[command(flatten)]
    pub(crate) steps: StepArgs,
}

/// Checks the device, every operator on it and the engine's loop.
#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// What to check: auto is a GPU if there is one, otherwise the CPU; cuda:1 is the second GPU
    #[arg(long, default_value = "auto", value_name = "auto|cpu|cuda")]
    pub(crate) device: DeviceChoice,

    /// Groups of checks that are made at once; 1 tells which of them loses a device, since that is
    /// lost for all [default: one per core]
    #[arg(long, value_name = "NUM")]
    pub(crate) threads: Option<NonZeroUsize>,
}

/// How `run` and `chat` draw tokens; clients of `serve` say so in their requests.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArgs {
    /// Message that tells the model how to behave, before all others
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,

    /// Most tokens of an answer [default: as many as the context has room for]
    #[arg(long, value_name = "TOKENS")]
    pub(crate) max_tokens: Option<NonZeroUsize>,

    /// Randomness: 0 always takes the likeliest token, 1 follows the model's probabilities
    #[arg(long, default_value_t = 0.0)]
    pub(crate) temperature: f32,

    /// Draw from the likeliest tokens that reach this probability together; 1 keeps all
    #[arg(long, default_value_t = 1.0)]
    pub(crate) top_p: f32,

    /// Draw from this many of the likeliest tokens; 0 keeps all
    #[arg(long, default_value_t = 0)]
    pub(crate) top_k: u32,

    /// Over 1 discourages tokens that were there before
    #[arg(long, default_value_t = 1.0)]
    pub(crate) repetition_penalty: f32,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn wrong_flags_are_named() {
        let check = |flags: &[&str], named: &str| {
            let arguments = ["inflight", "serve", "model.gguf"].iter().chain(flags);
            let error = Cli::try_parse_from(arguments).unwrap_err().to_string();
            assert!(error.contains(named), "{flags:?}: {error}");
        };
        check(&["--port", "70000"], "--port");
        check(&["--otlp-endpoint", "localhost"], "--otlp-endpoint");
        check(&["--overlap", "maybe"], "--overlap");
        check(&["--max-num-seqs", "0"], "--max-num-seqs");
        check(&["--kv-cache-tokens", "9", "--kv-cache-memory", "1"], "--kv-cache-memory");
        check(&["--no-such-flag"], "--no-such-flag");
        check(&["--device", "tpu"], "--device");
        check(&["--device", "cuda:x"], "--device");
    }

    #[test]
    fn the_model_may_be_left_out() {
        let cli = Cli::try_parse_from(["inflight", "serve", "--served-model-name", "a", "b"]);
        let Command::Serve(args) = cli.unwrap().command else { panic!("another command") };
        assert_eq!(args.model, "default");
        assert_eq!(args.served_model_name, ["a", "b"]);
        assert_eq!((args.host.as_str(), args.port), ("127.0.0.1", 8000));
    }
}
