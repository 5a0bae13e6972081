//! `inflight top`: what users write.

use clap::Args;
use inflight_bench::client::ServerAddress;

pub(crate) const EXAMPLES: &str = "\
Examples:
  inflight top                                   the server on port 8000 of this machine
  inflight top http://127.0.0.1:9000 --interval-ms 500
  inflight top --once                            figures as text, for scripts";

#[derive(Args, Debug)]
pub(crate) struct TopArgs {
    /// Server to look at
    #[arg(default_value = "http://127.0.0.1:8000", value_name = "URL")]
    pub(crate) url: ServerAddress,

    /// Key to send as `Authorization: Bearer KEY`
    #[arg(long, env = "OPENAI_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub(crate) api_key: Option<String>,

    /// How often to look
    #[arg(long, default_value_t = 1000, value_name = "MS",
        value_parser = clap::value_parser!(u64).range(50..=60_000))]
    pub(crate) interval_ms: u64,

    /// Print the figures of one interval as text, and leave; needs no terminal
    #[arg(long)]
    pub(crate) once: bool,
}
