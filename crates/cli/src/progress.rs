//! How far something has come: a bar for people, a log line for files.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

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

/// Shows that something takes a while of which nobody knows how far it is.
pub(crate) struct Waiting {
    what: &'static str,
    /// `None`: nobody watches.
    spinner: Option<ProgressBar>,
    started: Instant,
}

impl Waiting {
    pub(crate) fn new(what: &'static str, no_progress: bool) -> Self {
        let spinner = is_watched(no_progress).then(|| {
            let style = ProgressStyle::with_template("{msg} {spinner} {elapsed}");
            let style = style.expect("the template is valid");
            let spinner = ProgressBar::new_spinner().with_style(style).with_message(what);
            spinner.enable_steady_tick(Duration::from_millis(100));
            spinner
        });
        Self { what, spinner, started: Instant::now() }
    }

    pub(crate) fn finish(self) {
        match self.spinner {
            Some(spinner) => spinner.finish_and_clear(),
            None => {
                let seconds = self.started.elapsed().as_secs_f32();
                tracing::info!(seconds, "{} took", self.what);
            }
        }
    }
}

/// Shows how many tokens were generated.
pub(crate) struct TokenBar(Option<ProgressBar>);

impl TokenBar {
    pub(crate) fn new(num_tokens: u64, no_progress: bool) -> Self {
        Self(is_watched(no_progress).then(|| {
            let style = "tokens {bar:40} {pos}/{len} {per_sec} {elapsed}, {eta} to go";
            let style = ProgressStyle::with_template(style).expect("the template is valid");
            ProgressBar::new(num_tokens).with_style(style)
        }))
    }

    pub(crate) fn show(&self, num_tokens: u64) {
        if let Some(bar) = &self.0 {
            bar.set_position(num_tokens);
        }
    }

    pub(crate) fn finish(self) {
        if let Some(bar) = self.0 {
            bar.finish_and_clear();
        }
    }
}

/// Shows how many lines of a batch are answered.
pub(crate) struct LineBar(Option<ProgressBar>);

impl LineBar {
    /// `num_done`: those that an earlier run has answered.
    pub(crate) fn new(num_lines: u64, num_done: u64, no_progress: bool) -> Self {
        Self(is_watched(no_progress).then(|| {
            let style = "lines {bar:40} {pos}/{len} {per_sec} {elapsed}, {eta} to go {msg}";
            let style = ProgressStyle::with_template(style).expect("the template is valid");
            let bar = ProgressBar::new(num_lines).with_style(style).with_position(num_done);
            bar.reset_eta();
            bar
        }))
    }

    pub(crate) fn show(&self, num_answered: u64, num_failed: u64) {
        if let Some(bar) = &self.0 {
            bar.set_position(num_answered);
            if num_failed > 0 {
                bar.set_message(format!("({num_failed} with errors)"));
            }
        }
    }

    pub(crate) fn finish(self) {
        if let Some(bar) = self.0 {
            bar.finish_and_clear();
        }
    }
}
