//! `GET /debug/requests` and `GET /debug/requests/{id}`: what became of a request, step by step.

use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::{Path, State};
use inflight_engine::{RowKind, Span};
use inflight_observe::{RequestTimeline, Stretch};
use serde_json::{Value, json};

use super::metrics::Ending;
use super::request_log::{RequestEntry, SequenceEntry};
use crate::error::ApiError;
use crate::state::ServerState;

/// The latest requests' names, the latest first.
pub(crate) async fn list(State(state): State<ServerState>) -> Json<Value> {
    let entries = state.metrics().requests.latest();
    let requests = entries.iter().map(|entry| {
        let sequences = entry.sequences();
        json!({
            "id": entry.http.id,
            "names": entry.http.names(),
            "path": entry.http.path,
            "is_running": sequences.iter().any(|sequence| sequence.ended.is_none()),
        })
    });
    Json(json!({ "requests": requests.collect::<Vec<_>>() }))
}

/// One request's own timeline.
pub(crate) async fn get(
    State(state): State<ServerState>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let entry = state.metrics().requests.find(&id);
    let entry = entry.ok_or_else(|| {
        let reason = format!("no such request among the latest: `{id}`");
        ApiError::invalid("id", reason)
    })?;
    Ok(Json(request_json(&entry, &state)))
}

fn request_json(entry: &RequestEntry, state: &ServerState) -> Value {
    let sequences = entry.sequences();
    let told = sequences.iter().map(|sequence| {
        let timeline = sequence.engine_id.zip(state.recorder());
        let timeline = timeline.and_then(|(id, recorder)| recorder.request(id));
        let mut told = sequence_json(sequence);
        told["timeline"] = timeline.as_ref().map_or(Value::Null, timeline_json);
        told
    });
    json!({
        "id": entry.http.id,
        "names": entry.http.names(),
        "path": entry.http.path,
        "trace_id": entry.http.parent.as_ref().map(|parent| &parent.trace_id),
        "sequences": told.collect::<Vec<_>>(),
    })
}

fn sequence_json(sequence: &SequenceEntry) -> Value {
    let since = |moment: Option<Instant>| {
        moment.map(|at| at.saturating_duration_since(sequence.accepted).as_secs_f64())
    };
    let ending = sequence.ended.map(|(_, ending)| ending_name(ending));
    json!({
        "engine_id": sequence.engine_id.map(|id| id.0),
        "prompt_tokens": sequence.prompt_len,
        "cached_tokens": sequence.num_cached_tokens,
        "generated_tokens": sequence.num_tokens,
        "ending": ending,
        "queue_s": since(sequence.started),
        "first_token_s": since(sequence.first_token),
        "last_token_s": since(sequence.last_token),
        "ended_s": since(sequence.ended.map(|(at, _)| at)),
    })
}

pub(super) fn ending_name(ending: Ending) -> &'static str {
    Ending::ALL.into_iter().find(|(other, _)| *other == ending).map_or("", |(_, name)| name)
}

/// Times in microseconds since the engine started, as in `/debug/timeline`.
fn timeline_json(timeline: &RequestTimeline) -> Value {
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    let span = |span: Span| json!({"start_us": micros(span.start), "end_us": micros(span.end)});
    let stretch = |stretch: &Stretch| {
        json!({
            "kind": match stretch.kind {
                RowKind::Prefill => "prefill",
                RowKind::Decode => "decode",
            },
            "after_preemption": stretch.is_return,
            "first_batch": stretch.first_batch,
            "last_batch": stretch.last_batch,
            "steps": stretch.num_steps,
            "tokens": stretch.num_tokens,
            "staged_us": micros(stretch.staged),
            "compute": span(stretch.compute),
            "collected_us": micros(stretch.collected),
        })
    };
    json!({
        "queue": timeline.queue().map(span),
        "cached_tokens": timeline.num_cached_tokens,
        "preemptions": timeline.num_preemptions,
        "absences": timeline.absences().map(span).collect::<Vec<_>>(),
        "stretches": timeline.stretches.iter().map(stretch).collect::<Vec<_>>(),
    })
}
