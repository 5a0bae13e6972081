//! `GET /debug/timeline`, `/debug/state` and `/debug/replay`: the last steps, who holds what now,
//! and what was decided.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Json;
use axum::extract::{Query, State};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use inflight_engine::{EngineSnapshot, StepRecord};
use inflight_observe::{Cause, HistogramSnapshot, Panel, TimelineWriter, write_picture};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::access::Account;
use crate::error::ApiError;
use crate::state::ServerState;

/// The longest stretch of time that can be asked for.
const MAX_SECONDS: f64 = 3600.0;

/// How long a busy engine may take to tell what it does.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(2);

/// How long it may take to tell what it decided, which is a few megabytes.
const RECORD_TIMEOUT: Duration = Duration::from_secs(10);

/// What part of the timeline is wanted, and how.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TimelineQuery {
    /// How long before the latest step it begins.
    #[serde(default = "one")]
    seconds: f64,
    #[serde(default)]
    format: TimelineFormat,
}

fn one() -> f64 {
    1.0
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum TimelineFormat {
    /// Chrome's trace events, for Perfetto.
    #[default]
    Chrome,
    /// A page with a picture.
    Html,
}

/// The last steps as a timeline.
pub(crate) async fn timeline(
    State(state): State<ServerState>,
    query: Result<Query<TimelineQuery>, axum::extract::rejection::QueryRejection>,
) -> Result<Response, ApiError> {
    let Query(query) = query.map_err(|error| ApiError::invalid("query", error.body_text()))?;
    if !(0.0..=MAX_SECONDS).contains(&query.seconds) {
        let reason = format!("is {}; it must be between 0 and {MAX_SECONDS}", query.seconds);
        return Err(ApiError::invalid("seconds", reason));
    }
    let steps = last_steps(&state, Duration::from_secs_f64(query.seconds));
    let (content_type, body) = match query.format {
        TimelineFormat::Chrome => ("application/json", chrome(&steps)),
        TimelineFormat::Html => ("text/html; charset=utf-8", page(&steps)),
    };
    Ok(([(CONTENT_TYPE, content_type)], body).into_response())
}

fn last_steps(state: &ServerState, window: Duration) -> Vec<StepRecord> {
    state.recorder().map(|recorder| recorder.last(window)).unwrap_or_default()
}

fn chrome(steps: &[StepRecord]) -> Vec<u8> {
    let write = || {
        let mut writer = TimelineWriter::new(Vec::new())?;
        steps.iter().try_for_each(|step| writer.add(step))?;
        writer.finish()
    };
    write().expect("memory takes what is written")
}

fn page(steps: &[StepRecord]) -> Vec<u8> {
    let mut page = Vec::new();
    let panel = Panel { title: "Steps of the engine", steps };
    write_picture(&mut page, "Inflight: timeline", &[panel]).expect("memory takes what is written");
    page
}

/// Everything that the dashboard shows.
pub(crate) async fn snapshot(State(state): State<ServerState>) -> Result<Response, ApiError> {
    let engine = Arc::clone(state.engine());
    let asked = tokio::task::spawn_blocking(move || engine.inspect(SNAPSHOT_TIMEOUT)).await;
    let snapshot = asked.ok().flatten();
    Ok(Json(json!({
        "models": state.config().model_names,
        "version": env!("CARGO_PKG_VERSION"),
        "engine": snapshot.as_ref().map(engine_json),
        "steps": steps_json(&state),
        "latencies": latencies_json(&state),
        "keys": keys_json(&state),
    }))
    .into_response())
}

/// What the scheduler was told and decided, for `inflight replay`.
pub(crate) async fn replay(State(state): State<ServerState>) -> Result<Response, ApiError> {
    let engine = std::sync::Arc::clone(state.engine());
    let asked = tokio::task::spawn_blocking(move || engine.record(RECORD_TIMEOUT)).await;
    // Steps are short: an engine that does not answer is stuck in one.
    let stalled = ApiError::Stalled { seconds: RECORD_TIMEOUT.as_secs() };
    let record = asked.ok().flatten().ok_or(stalled)?;
    Ok(Json(record).into_response())
}

fn engine_json(snapshot: &EngineSnapshot) -> Value {
    let requests = snapshot.requests.iter().map(|request| {
        json!({
            "id": request.id.0,
            "tenant": request.tenant.name(),
            "running": request.is_running,
            "prompt_len": request.prompt_len,
            "len": request.len,
            "computed": request.num_computed,
            "blocks": request.blocks,
        })
    });
    json!({
        "requests": requests.collect::<Vec<_>>(),
        "block_size": snapshot.block_size,
        "num_blocks": snapshot.num_blocks,
        "num_free_blocks": snapshot.num_free_blocks,
        "num_cached_blocks": snapshot.num_cached_blocks,
    })
}

/// What has become of each API key.
fn keys_json(state: &ServerState) -> Value {
    let key = |account: &Arc<Account>| {
        let count = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
        json!({
            "name": account.key().name,
            "admin": account.key().is_admin,
            "running": account.num_running(),
            "requests": count(&account.num_requests),
            "refused": count(&account.num_refused),
            "prompt_tokens": count(&account.prompt_tokens),
            "generated_tokens": count(&account.generated_tokens),
        })
    };
    state.accounts().iter().map(key).collect()
}

fn steps_json(state: &ServerState) -> Value {
    let Some(recorder) = state.recorder() else { return Value::Null };
    let totals = recorder.totals();
    let idle: serde_json::Map<_, _> = totals
        .idle
        .iter()
        .map(|(cause, time)| (cause.label().to_owned(), json!(time.as_secs_f64())))
        .collect();
    json!({
        "count": totals.num_steps,
        "tokens": totals.num_tokens,
        "busy_s": totals.busy.as_secs_f64(),
        "blocked_s": totals.blocked.as_secs_f64(),
        "idle_s": idle,
        "causes": causes_json(),
    })
}

/// What the labels of causes mean.
fn causes_json() -> Value {
    let cause = |cause: Cause| {
        (cause.label().to_owned(), json!({"name": cause.name(), "meaning": cause.meaning()}))
    };
    Value::Object(Cause::ALL.into_iter().map(cause).collect())
}

fn latencies_json(state: &ServerState) -> Value {
    let metrics = state.metrics();
    let quantiles = |histogram: HistogramSnapshot| {
        let [p50, p90, p99] = [0.5, 0.9, 0.99].map(|q| histogram.quantile(q));
        json!({"count": histogram.count(), "p50": p50, "p90": p90, "p99": p99})
    };
    json!({
        "first_token_s": quantiles(metrics.first_token.snapshot()),
        "inter_token_s": quantiles(metrics.inter_token.snapshot()),
        "request_s": quantiles(metrics.end_to_end.snapshot()),
        "queue_s": quantiles(metrics.queue.snapshot()),
    })
}
