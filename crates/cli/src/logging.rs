//! Logs, on stderr.

use std::io::{self, IsTerminal};

use tracing_subscriber::EnvFilter;

/// Starts logging. A filter that does not parse is reported and replaced by the default.
pub(crate) fn init(filter: Option<&str>, default: &str) {
    let parsed = EnvFilter::try_new(filter.unwrap_or(default));
    let problem = parsed.as_ref().err().map(ToString::to_string);
    tracing_subscriber::fmt()
        .with_env_filter(parsed.unwrap_or_else(|_| EnvFilter::new(default)))
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .init();
    if let Some(problem) = problem {
        tracing::warn!(problem, default, "--log-level is not understood");
    }
}
