//! How far loading has come: a bar for people, a log line for files.

use std::io::{self, IsTerminal};
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};
use inflight_model::LoadProgress;

/// Shows the loading of weights.
pub(crate) struct LoadingBar {
    /// `None`: nobody watches.
    bar: Option<ProgressBar>,
    started: Instant,
}

/// Whether somebody watches, and wants to.
pub(crate) fn is_watched(no_progress: bool) -> bool {
    !no_progress && io::stderr().is_terminal()
}

impl LoadingBar {
    pub(crate) fn new(no_progress: bool) -> Self {
        let bar = is_watched(no_progress).then(|| {
            let style = ProgressStyle::with_template("loading {bar:40} {pos}/{len} {elapsed}");
            let style = style.expect("the template is valid");
            ProgressBar::new(0).with_style(style)
        });
        if bar.is_none() {
            tracing::info!("loading weights");
        }
        Self { bar, started: Instant::now() }
    }

    pub(crate) fn show(&self, progress: LoadProgress) {
        if let Some(bar) = &self.bar {
            bar.set_length(progress.total as u64);
            bar.set_position(progress.done as u64);
        }
    }

    pub(crate) fn finish(self) {
        match self.bar {
            Some(bar) => bar.finish_and_clear(),
            None => {
                let seconds = self.started.elapsed().as_secs_f32();
                tracing::info!(seconds, "weights are loaded");
            }
        }
    }
}
