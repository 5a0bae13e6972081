//! `inflight bench serve`: what users write.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{ArgGroup, Args, ValueEnum};
use inflight_bench::client::ServerAddress;
use inflight_bench::serve::{GoodputTargets, LengthDistribution};

use super::bench::FigureFiles;

pub(crate) const SERVE_LOAD_EXAMPLES: &str = "\
Examples:
  inflight bench serve --concurrency 1,8,32 --ignore-eos --plot load.svg
  inflight bench serve --url http://127.0.0.1:8124 --rate 1,2,4,8 --lengths lengths.json
  inflight bench serve --endpoint chat --rate 4 --goodput ttft:500,tpot:50 --json load.json
  inflight bench serve --input-len lognormal:200:0.8:2000 --output-len 32:256 --concurrency 16

A closed loop (--concurrency) sends a request when another has ended; a rate (--rate) sends them \
when they are due, whatever the server does, and counts times from then. TTFT: to the first text. \
ITL: between two pieces of text as they come. TPOT: the mean of that for each request, by tokens. \
Tokens are counted by the server where it tells (`usage`), otherwise pieces of text are.

Exit code 1: some request failed, or ended otherwise than it should.";

#[derive(Args, Debug)]
#[command(group(ArgGroup::new("pace").args(["concurrency", "rate"])))]
pub(crate) struct ServeLoadArgs {
    /// Server to measure: any that speaks OpenAI's API, over plain HTTP
    #[arg(long, alias = "base-url", default_value = "http://127.0.0.1:8000", value_name = "URL")]
    pub(crate) url: ServerAddress,

    /// Endpoint to ask
    #[arg(long, value_enum, default_value_t = EndpointChoice::Completions)]
    pub(crate) endpoint: EndpointChoice,

    /// Model to ask for [default: the first of /v1/models]
    #[arg(long, value_name = "NAME")]
    pub(crate) model: Option<String>,

    /// Key to send as `Authorization: Bearer KEY`
    #[arg(long, env = "OPENAI_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub(crate) api_key: Option<String>,

    /// Requests at a time; a list runs each in turn [default: 1, unless there is a --rate]
    #[arg(long, value_delimiter = ',', value_name = "REQUESTS")]
    pub(crate) concurrency: Vec<NonZeroUsize>,

    /// Requests a second; a list runs each in turn
    #[arg(long, alias = "request-rate", value_delimiter = ',', value_parser = rate,
        value_name = "RATE")]
    pub(crate) rate: Vec<f64>,

    /// With --rate: times between requests at random, or all the same
    #[arg(long, value_enum, default_value_t = ArrivalsChoice::Poisson)]
    pub(crate) arrivals: ArrivalsChoice,

    /// With --rate: most requests at once; further ones wait in this client, and their wait counts
    #[arg(long, default_value = "1024", value_name = "REQUESTS")]
    pub(crate) max_in_flight: NonZeroUsize,

    /// Requests of each run [default: 4 times --concurrency, at least 16; 10 s of --rate]
    #[arg(long, alias = "num-requests", value_name = "REQUESTS")]
    pub(crate) num_prompts: Option<NonZeroUsize>,

    /// Runs of each load, each with prompts of its own
    #[arg(long, default_value = "1", value_name = "RUNS")]
    pub(crate) repeats: NonZeroUsize,

    /// Requests before each load that are not measured
    #[arg(long, default_value_t = 1, value_name = "REQUESTS")]
    pub(crate) warm_up: usize,

    /// Tokens of prompts: N, LOW:HIGH (evenly) or lognormal:MEDIAN:SIGMA[:MOST]
    #[arg(long, default_value = "128", value_name = "LENGTH", conflicts_with = "lengths")]
    pub(crate) input_len: LengthDistribution,

    /// Tokens of outputs at most, in the same way
    #[arg(long, default_value = "128", value_name = "LENGTH", conflicts_with = "lengths")]
    pub(crate) output_len: LengthDistribution,

    /// JSON file of [input, output] pairs to take lengths from, in order
    #[arg(long, value_name = "FILE")]
    pub(crate) lengths: Option<PathBuf>,

    /// Prompts of words, about one token each, or of token ids (completions only)
    #[arg(long, value_enum, default_value_t = PromptChoice::Text)]
    pub(crate) prompts: PromptChoice,

    /// Token ids of --prompts ids: from the first up to but without the second
    #[arg(long, default_value = "1000:32000", value_parser = id_range, value_name = "LOW:HIGH")]
    pub(crate) id_range: (u32, u32),

    /// Tokens at the begin of all prompts that are the same
    #[arg(long, default_value_t = 0, value_name = "TOKENS")]
    pub(crate) shared_prefix: usize,

    /// Ask for outputs of full length (`ignore_eos`), and count others as failed
    #[arg(long)]
    pub(crate) ignore_eos: bool,

    /// Randomness of the outputs
    #[arg(long, default_value_t = 0.0)]
    pub(crate) temperature: f64,

    /// JSON object put into every request
    #[arg(long, value_parser = object, value_name = "JSON")]
    pub(crate) extra_body: Option<serde_json::Map<String, serde_json::Value>>,

    /// Do not ask the server to count tokens (`stream_options`)
    #[arg(long)]
    pub(crate) no_usage: bool,

    /// A new connection for every request
    #[arg(long)]
    pub(crate) no_keepalive: bool,

    /// Longest time of a request
    #[arg(long, default_value_t = 600, value_name = "SECONDS",
        value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) timeout: u64,

    /// Wait up to so long for the server to be there
    #[arg(long, default_value_t = 0, value_name = "SECONDS")]
    pub(crate) wait_ready: u64,

    /// Count requests that meet targets, in ms: ttft:200,tpot:50,e2e:5000, any of them
    #[arg(long, value_name = "TARGETS")]
    pub(crate) goodput: Option<GoodputTargets>,

    /// Keys prompts, lengths and the times between requests
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,

    #[command(flatten)]
    pub(crate) files: FigureFiles,

    /// No progress on the terminal
    #[arg(long)]
    pub(crate) no_progress: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum EndpointChoice {
    Completions,
    Chat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ArrivalsChoice {
    Poisson,
    Constant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PromptChoice {
    Text,
    Ids,
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if (1e-6..=1e6).contains(&rate) => Ok(rate),
        _ => Err("is no number of requests a second between 0.000001 and 1000000".to_owned()),
    }
}

fn id_range(text: &str) -> Result<(u32, u32), String> {
    let ids =
        text.split_once(':').and_then(|(low, high)| Some((low.parse().ok()?, high.parse().ok()?)));
    ids.filter(|(low, high)| low < high).ok_or("is not LOW:HIGH, two token ids".to_owned())
}

fn object(text: &str) -> Result<serde_json::Map<String, serde_json::Value>, String> {
    serde_json::from_str(text).map_err(|error| format!("is no JSON object: {error}"))
}
