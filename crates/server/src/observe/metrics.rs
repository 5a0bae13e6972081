//! What is counted over all requests.

use std::sync::atomic::{AtomicU64, Ordering};

use inflight_observe::Histogram;

use super::request_log::RequestLog;

/// Bounds of the histograms, in seconds: vLLM's, so that its dashboards fit.
///
/// # Source
/// vLLM, `docs/design/metrics.md` and its `/metrics`.
const FIRST_TOKEN_BOUNDS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
const INTER_TOKEN_BOUNDS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
const REQUEST_BOUNDS: &[f64] = &[
    0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
];

/// In tokens: 1, 2 and 5 times powers of ten, as vLLM has them for a context of some length.
const TOKEN_BOUNDS: &[f64] = &[
    1.0,
    2.0,
    5.0,
    10.0,
    20.0,
    50.0,
    100.0,
    200.0,
    500.0,
    1000.0,
    2000.0,
    5000.0,
    10_000.0,
    20_000.0,
    50_000.0,
    100_000.0,
    200_000.0,
    500_000.0,
    1_000_000.0,
];

/// How a request ended, as metrics have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Stop,
    Length,
    Abort,
    Error,
}

impl Ending {
    pub(crate) const ALL: [(Self, &'static str); 4] = [
        (Self::Stop, "stop"),
        (Self::Length, "length"),
        (Self::Abort, "abort"),
        (Self::Error, "error"),
    ];
}

/// Counts and latencies of all requests since the start.
#[derive(Debug)]
pub(crate) struct Metrics {
    pub(crate) prompt_tokens: AtomicU64,
    pub(crate) generated_tokens: AtomicU64,
    /// Tokens of prompts that were looked up in the prefix cache, and those found there.
    pub(crate) prefix_queries: AtomicU64,
    pub(crate) prefix_hits: AtomicU64,
    /// In the order of [`Ending::ALL`].
    ended: [AtomicU64; Ending::ALL.len()],
    pub(crate) first_token: Histogram,
    pub(crate) inter_token: Histogram,
    pub(crate) end_to_end: Histogram,
    pub(crate) queue: Histogram,
    pub(crate) prefill: Histogram,
    pub(crate) decode: Histogram,
    pub(crate) inference: Histogram,
    /// A mean for each sequence.
    pub(crate) time_per_token: Histogram,
    /// Tokens of a sequence's prompt, and tokens that it generated.
    pub(crate) prompt_len: Histogram,
    pub(crate) output_len: Histogram,
    pub(crate) requests: RequestLog,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            prompt_tokens: AtomicU64::default(),
            generated_tokens: AtomicU64::default(),
            prefix_queries: AtomicU64::default(),
            prefix_hits: AtomicU64::default(),
            ended: Default::default(),
            first_token: Histogram::new(FIRST_TOKEN_BOUNDS),
            inter_token: Histogram::new(INTER_TOKEN_BOUNDS),
            end_to_end: Histogram::new(REQUEST_BOUNDS),
            queue: Histogram::new(REQUEST_BOUNDS),
            prefill: Histogram::new(REQUEST_BOUNDS),
            decode: Histogram::new(REQUEST_BOUNDS),
            inference: Histogram::new(REQUEST_BOUNDS),
            time_per_token: Histogram::new(INTER_TOKEN_BOUNDS),
            prompt_len: Histogram::of_numbers(TOKEN_BOUNDS),
            output_len: Histogram::of_numbers(TOKEN_BOUNDS),
            requests: RequestLog::default(),
        }
    }
}

impl Metrics {
    pub(crate) fn count_end(&self, ending: Ending) {
        self.ended[ending as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn num_ended(&self, ending: Ending) -> u64 {
        self.ended[ending as usize].load(Ordering::Relaxed)
    }
}
