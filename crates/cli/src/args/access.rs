//! Who may ask a server, and how.

use std::path::PathBuf;

use clap::Args;

/// Who may ask, and what a connection may cost.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Access")]
pub(crate) struct AccessArgs {
    /// Key that requests must bear, as `Authorization: Bearer KEY` or `x-api-key: KEY`; may be
    /// given more than once. It opens everything, and leaves tenants to the requests' `user`. The
    /// health paths, /version, the page, /docs and /openapi.json need none
    #[arg(long, value_name = "KEY", env = "INFLIGHT_API_KEY", hide_env_values = true)]
    pub(crate) api_key: Vec<String>,

    /// File of keys, each with a name (the tenant), limits and rights. Lines: KEY name=NAME
    /// requests_per_minute=N tokens_per_minute=N max_concurrent=N admin; or JSON, a list of objects
    /// with these fields and `key`. KEY may be sha256: and its hash. /metrics and /debug need
    /// `admin`
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,

    /// Origin whose pages may ask, such as https://example.org, or * for all; may be given more
    /// than once
    #[arg(long, value_name = "ORIGIN")]
    pub(crate) cors_origin: Vec<String>,

    /// Most MiB of a request's body; over it 413
    #[arg(long, default_value_t = 16, value_name = "MIB",
        value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) max_body_size: u32,

    /// PEM file of a certificate, followed by those that vouch for it: all connections are
    /// encrypted then
    #[arg(long, alias = "ssl-certfile", value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,

    /// PEM file of the certificate's key
    #[arg(long, alias = "ssl-keyfile", value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,

    /// Most connections at once; further ones get 503
    #[arg(long, default_value_t = 4096, value_name = "CONNECTIONS",
        value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) max_connections: u32,

    /// Seconds in which a request's head, and after it its body, must have arrived; also how long a
    /// connection may be idle
    #[arg(long, default_value_t = 60, value_name = "SECONDS",
        value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub(crate) receive_timeout: u32,

    /// Seconds that a request may take from its being accepted to the end of its answer; over it
    /// 504. Requests may ask for less by `timeout_ms` [default: no limit]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=604_800))]
    pub(crate) request_timeout: Option<u32>,
}
