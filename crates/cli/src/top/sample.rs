//! What a server tells, and rates between two tellings.

use std::collections::VecDeque;
use std::time::Instant;

use inflight_engine::StepRecord;
use serde_json::Value;

/// Rates that are remembered.
const MAX_RATES: usize = 240;

/// The server at one moment.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    at: Instant,
    pub(super) model: String,
    pub(super) num_running: usize,
    pub(super) num_waiting: usize,
    /// Share of the KV cache's blocks that somebody needs.
    pub(super) cache_usage: f64,
    num_steps: u64,
    num_tokens: u64,
    busy_s: f64,
    /// Cause and seconds, since the start.
    idle_s: Vec<(String, f64)>,
    /// Name, and milliseconds of half, nine tenths and 99 hundredths.
    pub(super) latencies: Vec<(&'static str, [Option<f64>; 3])>,
    pub(super) steps: Vec<StepRecord>,
}

/// What happened between two samples, each second.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Rates {
    /// Tokens computed.
    pub(super) tokens: f64,
    pub(super) steps: f64,
    /// Part of the time in which the device computed.
    pub(super) busy: f64,
    /// Part of the time in which it was idle, by cause, the largest first.
    pub(super) idle: Vec<(String, f64)>,
}

/// The samples so far.
pub(super) struct History {
    pub(super) address: String,
    pub(super) latest: Sample,
    /// Oldest first.
    pub(super) rates: VecDeque<Rates>,
    /// Why the server did not answer the last time.
    pub(super) error: Option<String>,
}

impl Sample {
    /// `None`, if `state` is no `/debug/state`.
    pub(super) fn new(state: &Value, steps: Vec<StepRecord>, at: Instant) -> Option<Self> {
        let (engine, told) = (&state["engine"], &state["steps"]);
        let requests = engine["requests"].as_array().map(Vec::as_slice).unwrap_or_default();
        let num_running = requests.iter().filter(|r| r["running"] == true).count();
        let blocks = engine["num_blocks"].as_f64().unwrap_or(0.0);
        let free = engine["num_free_blocks"].as_f64().unwrap_or(0.0);
        let idle = told["idle_s"].as_object()?;
        let latency = |name, key: &str| {
            let of = |q: &str| state["latencies"][key][q].as_f64().map(|s| s * 1e3);
            (name, [of("p50"), of("p90"), of("p99")])
        };
        Some(Self {
            at,
            model: state["models"][0].as_str()?.to_owned(),
            num_running,
            num_waiting: requests.len() - num_running,
            cache_usage: if blocks > 0.0 { 1.0 - free / blocks } else { 0.0 },
            num_steps: told["count"].as_u64()?,
            num_tokens: told["tokens"].as_u64()?,
            busy_s: told["busy_s"].as_f64()?,
            idle_s: idle.iter().map(|(k, v)| (k.clone(), v.as_f64().unwrap_or(0.0))).collect(),
            latencies: vec![
                latency("first token", "first_token_s"),
                latency("between tokens", "inter_token_s"),
                latency("whole request", "request_s"),
                latency("in the queue", "queue_s"),
            ],
            steps,
        })
    }

    fn rates_since(&self, before: &Self) -> Rates {
        let seconds = self.at.saturating_duration_since(before.at).as_secs_f64().max(1e-9);
        let count = |now: u64, then: u64| now.saturating_sub(then) as f64 / seconds;
        let idle = self.idle_s.iter().map(|(cause, s)| {
            let then = before.idle_s.iter().find(|(other, _)| other == cause);
            (cause.clone(), ((s - then.map_or(0.0, |(_, s)| *s)) / seconds).clamp(0.0, 1.0))
        });
        let mut idle: Vec<_> = idle.filter(|(_, part)| *part > 0.0).collect();
        idle.sort_by(|a, b| b.1.total_cmp(&a.1));
        Rates {
            tokens: count(self.num_tokens, before.num_tokens),
            steps: count(self.num_steps, before.num_steps),
            busy: ((self.busy_s - before.busy_s) / seconds).clamp(0.0, 1.0),
            idle,
        }
    }
}

impl History {
    pub(super) fn new(address: String, first: Sample) -> Self {
        Self { address, latest: first, rates: VecDeque::new(), error: None }
    }

    pub(super) fn push(&mut self, sample: Sample) {
        if self.rates.len() == MAX_RATES {
            self.rates.pop_front();
        }
        self.rates.push_back(sample.rates_since(&self.latest));
        (self.latest, self.error) = (sample, None);
    }

    pub(super) fn note_error(&mut self, error: String) {
        self.error = Some(error);
    }

    /// All in one line, for files and scripts.
    pub(super) fn line(&self) -> String {
        let rates = self.rates.back().cloned().unwrap_or_default();
        let Sample { model, num_running, num_waiting, cache_usage, .. } = &self.latest;
        format!(
            "{model}: busy {:.1} %, {:.0} tokens/s, {:.0} steps/s, {num_running} running, \
             {num_waiting} waiting, KV {:.1} %",
            100.0 * rates.busy,
            rates.tokens,
            rates.steps,
            100.0 * cache_usage
        )
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::Duration;

    use inflight_engine::Span;
    use serde_json::json;

    use super::*;

    /// A server after `seconds`, of which the device computed three quarters.
    pub(in super::super) fn sample(origin: Instant, seconds: u64) -> Sample {
        let state = json!({
            "models": ["smol"],
            "engine": {
                "requests": [{"running": true}, {"running": true}, {"running": false}],
                "num_blocks": 100, "num_free_blocks": 60,
            },
            "steps": {"count": 50 * seconds, "tokens": 800 * seconds,
                "busy_s": 0.75 * seconds as f64,
                "idle_s": {"no_work": 0.2 * seconds as f64, "host_waits": 0.05 * seconds as f64}},
            "latencies": {"first_token_s": {"p50": 0.1, "p90": 0.2, "p99": null}},
        });
        let span = |start, end| Span {
            start: Duration::from_millis(start),
            end: Duration::from_millis(end),
        };
        let step = |at: u64| StepRecord {
            batch: at,
            plan: span(at, at + 5),
            compute: span(at + 5, at + 15),
            ..StepRecord::default()
        };
        Sample::new(&state, vec![step(0), step(20)], origin + Duration::from_secs(seconds)).unwrap()
    }

    #[test]
    fn rates_are_differences_by_the_second() {
        let origin = Instant::now();
        let mut history = History::new("a".into(), sample(origin, 4));
        history.push(sample(origin, 6));
        let rates = history.rates.back().unwrap();
        assert!((rates.tokens - 800.0).abs() < 1e-6 && (rates.steps - 50.0).abs() < 1e-6);
        assert!((rates.busy - 0.75).abs() < 1e-9);
        let causes: Vec<_> = rates.idle.iter().map(|(cause, _)| cause.as_str()).collect();
        assert_eq!(causes, ["no_work", "host_waits"]);
        assert_eq!(
            history.line(),
            "smol: busy 75.0 %, 800 tokens/s, 50 steps/s, 2 running, 1 waiting, KV 40.0 %"
        );
        assert!(Sample::new(&json!({"models": ["x"]}), vec![], origin).is_none());
    }
}
