//! `inflight trace`: what users write.

use std::path::PathBuf;

use clap::{ArgGroup, Args};
use inflight_bench::BuiltInConfig;

use super::bench::built_in;

pub(crate) const EXAMPLES: &str = "\
Examples:
  inflight trace http://127.0.0.1:8000                       the last second of a running server
  inflight trace http://127.0.0.1:8000 --seconds 5 --json steps.json
  inflight trace http://127.0.0.1:8000 --request chatcmpl-0123  where one request's time went
  inflight trace off.json on.json --picture both.html        timelines that were written before
  inflight trace --run default --picture both.html           a short load of its own, both ways

The picture is a page that needs nothing else: four lanes (host, copies to the device, computing, \
copies back), every gap of the device with its cause. The JSON is for https://ui.perfetto.dev.";

#[derive(Args, Debug)]
#[command(group(ArgGroup::new("what").required(true).multiple(false)
    .args(["sources", "run", "config"])))]
pub(crate) struct TraceArgs {
    /// A running server's address, or timelines that --trace, --trace-file or this command wrote
    #[arg(value_name = "URL|FILE")]
    pub(crate) sources: Vec<String>,

    /// Run a short load on MODEL, with overlap off and on
    #[arg(long, value_name = "MODEL")]
    pub(crate) run: Option<String>,

    /// The same on random weights in the shapes of a well-known model
    #[arg(long, value_parser = built_in(), value_name = "NAME")]
    pub(crate) config: Option<BuiltInConfig>,

    /// How much of a server's past to show
    #[arg(long, default_value_t = 1.0, value_name = "SECONDS")]
    pub(crate) seconds: f64,

    /// Print what became of one request of a server instead: by its id, by X-Request-Id, or by
    /// the engine's number
    #[arg(long, value_name = "ID", conflicts_with_all = ["run", "config", "picture", "json"])]
    pub(crate) request: Option<String>,

    /// Key to send as `Authorization: Bearer KEY`
    #[arg(long, env = "OPENAI_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub(crate) api_key: Option<String>,

    /// File for the picture, as HTML [default: timeline.html, unless there is a --json]
    #[arg(long, value_name = "FILE")]
    pub(crate) picture: Option<PathBuf>,

    /// File for the timeline, for Perfetto; of two timelines one for each, `off` and `on` put
    /// before the extension
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}
