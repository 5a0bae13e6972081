//! Being asked to end.

use std::process;

use anyhow::{Context, Result};

/// Exit code of a process that was interrupted, as shells have it.
const INTERRUPTED: i32 = 130;

/// Resolves at the first SIGTERM or SIGINT. At the second the process ends at once.
///
/// # Errors
/// Signals cannot be caught.
pub(crate) fn shutdown_requested() -> Result<impl Future<Output = ()> + Send + 'static> {
    let mut signals = Signals::new().context("signals cannot be caught")?;
    Ok(async move {
        signals.next().await;
        tokio::spawn(async move {
            signals.next().await;
            tracing::warn!("ending at once");
            process::exit(INTERRUPTED);
        });
    })
}

#[cfg(unix)]
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self)
    }

    async fn next(&mut self) {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending().await
        }
    }
}
