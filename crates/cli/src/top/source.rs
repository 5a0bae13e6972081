//! Where samples come from.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use inflight_bench::client::{Client, ClientError, ServerAddress};

use super::sample::Sample;

/// A running server, asked from one thread.
pub(super) struct Source {
    client: Client,
    runtime: tokio::runtime::Runtime,
}

impl Source {
    pub(super) fn new(address: &ServerAddress, api_key: Option<&str>) -> Result<Self> {
        let client = Client::new(address.clone(), api_key).context("--api-key")?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(Self { client, runtime })
    }

    /// The server now, with the steps of its last `window`.
    pub(super) fn sample(&self, window: Duration) -> Result<Sample> {
        self.runtime.block_on(self.ask(window)).map_err(|error| self.explain(error))?.context(
            "/metrics does not tell what Inflight's does: is this a server of another kind?",
        )
    }

    async fn ask(&self, window: Duration) -> Result<Option<Sample>, ClientError> {
        let metrics = self.client.get("/metrics").await?;
        let at = Instant::now();
        let state = self.client.get("/debug/state").await?;
        let path = format!("/debug/timeline?seconds={}", window.as_secs_f64());
        let steps = self.client.get(&path).await?;
        // A busy engine may leave its requests untold, and one without work has no steps.
        let state = serde_json::from_slice(&state).unwrap_or_default();
        let steps = inflight_observe::read_timeline(&steps).unwrap_or_default();
        Ok(Sample::new(&String::from_utf8_lossy(&metrics), &state, steps, at))
    }

    /// What a user can do about an error.
    fn explain(&self, error: ClientError) -> anyhow::Error {
        let address = self.client.address();
        let advice = match &error {
            ClientError::Connect(..) => {
                "is a server running there? `inflight serve MODEL` starts one on port 8000"
            }
            ClientError::Status(401, _) => "give the server's key by --api-key or OPENAI_API_KEY",
            ClientError::Status(403, _) => "give a key of an administrator by --api-key",
            ClientError::Status(404, _) => "is this a server of another kind?",
            _ => return anyhow!(error).context(format!("asking {address}")),
        };
        anyhow!("{error}\n{advice}")
    }
}
