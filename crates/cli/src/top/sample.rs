//! What a server tells at one moment, and what happened between two of them.

use std::time::{Duration, Instant};

use inflight_engine::StepRecord;
use inflight_observe::HistogramSnapshot;
use serde_json::Value;

use super::exposition::Exposition;

/// Histograms that are shown: what people call them, and what `/metrics` does.
pub(super) const LATENCIES: [(&str, &str); 4] = [
    ("first token", "inflight_time_to_first_token_seconds"),
    ("between tokens", "inflight_inter_token_latency_seconds"),
    ("whole request", "inflight_request_duration_seconds"),
    ("in the queue", "inflight_request_queue_seconds"),
];
const NO_WORK: &str = "no_work";

/// The server at one moment.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    pub(super) model: String,
    pub(super) num_running: usize,
    pub(super) num_waiting: usize,
    /// Of the KV cache, and how many of them somebody needs.
    pub(super) num_blocks: usize,
    pub(super) num_used_blocks: usize,
    /// Ids of the requests in the batch.
    pub(super) batch: Vec<u64>,
    pub(super) steps: Vec<StepRecord>,
    pub(super) totals: Totals,
}

/// What was counted since the server's start.
#[derive(Clone, Debug)]
pub(super) struct Totals {
    pub(super) at: Instant,
    num_generated: f64,
    num_computed: f64,
    num_steps: f64,
    busy_s: f64,
    /// By cause.
    idle_s: Vec<(String, f64)>,
    /// In [`LATENCIES`]' order.
    latencies: Vec<Option<HistogramSnapshot>>,
}

/// What happened between two moments, a second.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Rates {
    /// How long that was.
    pub(super) over: Duration,
    /// Tokens.
    pub(super) generated: f64,
    /// Tokens, those of prompts too.
    pub(super) computed: f64,
    pub(super) steps: f64,
    /// Part of the time in which the device computed.
    pub(super) busy: f64,
    /// Part of the time in which it was idle, by cause, the largest first.
    pub(super) idle: Vec<(String, f64)>,
}

impl Sample {
    /// Out of `/metrics`, `/debug/state` and the steps of `/debug/timeline`; `None`: that is no
    /// server of ours.
    pub(super) fn new(
        metrics: &str,
        state: &Value,
        steps: Vec<StepRecord>,
        at: Instant,
    ) -> Option<Self> {
        let told = Exposition::parse(metrics);
        let count = |name: &str| told.value(name).unwrap_or(0.0);
        let model = told.label("inflight_requests_running", "model_name")?;
        let num_blocks = count("inflight_kv_cache_blocks") as usize;
        let num_free = count("inflight_kv_cache_free_blocks") as usize;
        let requests = state["engine"]["requests"].as_array();
        let running = requests.into_iter().flatten().filter(|r| r["running"] == true);
        Some(Self {
            model: model.to_owned(),
            num_running: count("inflight_requests_running") as usize,
            num_waiting: count("inflight_requests_waiting") as usize,
            num_blocks,
            num_used_blocks: num_blocks.saturating_sub(num_free),
            batch: running.filter_map(|request| request["id"].as_u64()).collect(),
            steps,
            totals: Totals {
                at,
                num_generated: count("inflight_generated_tokens_total"),
                num_computed: count("inflight_computed_tokens_total"),
                num_steps: count("inflight_steps_total"),
                busy_s: count("inflight_device_busy_seconds_total"),
                idle_s: told.by_label("inflight_device_idle_seconds_total", "cause"),
                latencies: LATENCIES.map(|(_, name)| told.histogram(name)).into(),
            },
        })
    }

    /// Share of the KV cache's blocks that somebody needs.
    pub(super) fn cache_usage(&self) -> f64 {
        self.num_used_blocks as f64 / self.num_blocks.max(1) as f64
    }

    pub(super) fn rates_since(&self, before: &Totals) -> Rates {
        let now = &self.totals;
        let over = now.at.saturating_duration_since(before.at);
        let seconds = over.as_secs_f64().max(1e-9);
        let rate = |now: f64, then: f64| (now - then).max(0.0) / seconds;
        let busy = rate(now.busy_s, before.busy_s).min(1.0);
        Rates {
            over,
            generated: rate(now.num_generated, before.num_generated),
            computed: rate(now.num_computed, before.num_computed),
            steps: rate(now.num_steps, before.num_steps),
            busy,
            idle: self.idle_since(before, seconds, 1.0 - busy),
        }
    }

    /// Parts of `seconds` by cause, `room` together at most.
    ///
    /// Having no work is counted when the next step ends it: until then nobody tells it, and then
    /// some of it may be from before.
    fn idle_since(&self, before: &Totals, seconds: f64, room: f64) -> Vec<(String, f64)> {
        let mut idle: Vec<_> = self
            .totals
            .idle_s
            .iter()
            .map(|(cause, now)| {
                let then = before.idle_s.iter().find(|(other, _)| other == cause);
                let then = then.map_or(0.0, |(_, then)| *then);
                (cause.clone(), ((now - then) / seconds).clamp(0.0, room))
            })
            .collect();
        let others: f64 = idle.iter().filter(|(cause, _)| cause != NO_WORK).map(|(_, p)| p).sum();
        let left = (room - others).max(0.0);
        let has_work = self.num_running + self.num_waiting > 0;
        let counted = idle.iter().position(|(cause, _)| cause == NO_WORK);
        let counted = counted.map_or(0.0, |at| idle.swap_remove(at).1);
        idle.push((NO_WORK.to_owned(), if has_work { counted.min(left) } else { left }));
        idle.retain(|(_, part)| *part > 0.0);
        idle.sort_by(|a, b| b.1.total_cmp(&a.1));
        idle
    }

    /// Milliseconds of half, nine tenths and 99 hundredths of what was measured since `before`, in
    /// [`LATENCIES`]' order; `None`: nothing was.
    pub(super) fn latencies_since(&self, before: &Totals) -> [[Option<f64>; 3]; LATENCIES.len()] {
        std::array::from_fn(|i| {
            let Some(mut since) = self.totals.latencies[i].clone() else { return [None; 3] };
            if let Some(then) = &before.latencies[i] {
                let counts = since.counts.iter_mut().zip(&then.counts);
                counts.for_each(|(now, then)| *now = now.saturating_sub(*then));
            }
            [0.5, 0.9, 0.99].map(|q| since.quantile(q).map(|s| 1e3 * s))
        })
    }
}
