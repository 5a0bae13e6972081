//! `POST` and `GET /v1/batches`, `GET /v1/batches/{id}`, `POST /v1/batches/{id}/cancel`.

use std::collections::BTreeMap;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::HeaderMap;
use schemars::JsonSchema;
use serde::Deserialize;

use super::object::{Batch, BatchKind, Counts, Status};
use super::work::start;
use crate::access::Bearer;
use crate::batch::URLS;
use crate::error::ApiError;
use crate::files::page::{Page, PageQuery};
use crate::files::upload::disk;
use crate::files::{FileStore, Record};
use crate::openapi::Fields;
use crate::random::random_id;
use crate::request::{Body, admit, neutral};
use crate::state::{ServerState, unix_time_s};

/// Batches that have not ended; further ones are refused.
const MAX_LIVE: usize = 100;
/// Batches that are remembered; of those that have ended, the oldest make way.
const MAX_BATCHES: usize = 10_000;
/// OpenAI's.
const USUAL_LIMIT: usize = 20;
const WINDOW: &str = "24h";
const WINDOW_SECONDS: u64 = 24 * 60 * 60;
/// OpenAI's limits of metadata.
const MAX_PAIRS: usize = 16;
const MAX_NAME_CHARS: usize = 64;
const MAX_VALUE_CHARS: usize = 512;

#[derive(Debug, Deserialize, JsonSchema)]
struct BatchFields {
    input_file_id: Option<String>,
    #[schemars(extend("enum" = URLS))]
    endpoint: Option<String>,
    #[schemars(extend("enum" = [WINDOW]))]
    completion_window: Option<String>,
    metadata: Option<BTreeMap<String, String>>,
}

/// What [`create`] takes.
pub(crate) fn describe(fields: Fields<'_>) -> Fields<'_> {
    let fields = fields.group::<BatchFields>().neutral(neutral::BATCHES);
    fields.require("input_file_id").require("endpoint").require("completion_window")
}

pub(crate) async fn create(
    State(state): State<ServerState>,
    bearer: Bearer,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Batch>, ApiError> {
    let store = state.files()?;
    let bytes = admit(&state, &headers, body)?;
    let mut body = Body::parse(&bytes)?;
    let fields: BatchFields = body.take()?;
    body.take_neutral(neutral::BATCHES)?;
    body.refuse_rest()?;
    let owner = bearer.owner(store.salt());
    let batch = fields.batch(store, owner.as_deref())?;
    make_room(store, &state)?;
    let record = store.batches().put(&batch.id.clone(), owner, batch).map_err(disk)?;
    start(&state, record.clone());
    Ok(Json(record.object))
}

impl BatchFields {
    fn batch(self, store: &FileStore, owner: Option<&str>) -> Result<Batch, ApiError> {
        let missing = |param| ApiError::Missing { param };
        let input_file_id = self.input_file_id.ok_or_else(|| missing("input_file_id"))?;
        if store.files().get(&input_file_id, owner).is_none() {
            let reason = format!("there is no file {input_file_id:?}");
            return Err(ApiError::invalid("input_file_id", reason));
        }
        let endpoint = self.endpoint.ok_or_else(|| missing("endpoint"))?;
        if !URLS.contains(&endpoint.as_str()) {
            let reason = format!("is {endpoint:?}; it must be one of {}", URLS.join(", "));
            return Err(ApiError::invalid("endpoint", reason));
        }
        let completion_window =
            self.completion_window.ok_or_else(|| missing("completion_window"))?;
        if completion_window != WINDOW {
            let reason = format!("is {completion_window:?}; it must be {WINDOW:?}");
            return Err(ApiError::invalid("completion_window", reason));
        }
        check_metadata(self.metadata.as_ref())?;
        let created_at = unix_time_s();
        Ok(Batch {
            id: random_id("batch_"),
            object: BatchKind::Batch,
            endpoint,
            errors: None,
            input_file_id,
            completion_window,
            status: Status::Validating,
            output_file_id: None,
            error_file_id: None,
            created_at,
            in_progress_at: None,
            expires_at: created_at + WINDOW_SECONDS,
            finalizing_at: None,
            completed_at: None,
            failed_at: None,
            expired_at: None,
            cancelling_at: None,
            cancelled_at: None,
            request_counts: Counts::default(),
            metadata: self.metadata,
        })
    }
}

fn check_metadata(metadata: Option<&BTreeMap<String, String>>) -> Result<(), ApiError> {
    let Some(pairs) = metadata else { return Ok(()) };
    let is_long = |text: &str, most: usize| text.chars().count() > most;
    let is_over = pairs.len() > MAX_PAIRS
        || pairs
            .iter()
            .any(|(name, value)| is_long(name, MAX_NAME_CHARS) || is_long(value, MAX_VALUE_CHARS));
    if is_over {
        let reason = format!(
            "has over {MAX_PAIRS} pairs, or a name or value of over {MAX_NAME_CHARS} or \
             {MAX_VALUE_CHARS} characters"
        );
        return Err(ApiError::invalid("metadata", reason));
    }
    Ok(())
}

/// Refuses what would be too many, and forgets the oldest of those that have ended.
fn make_room(store: &FileStore, state: &ServerState) -> Result<(), ApiError> {
    let batches = store.batches();
    if batches.select(|batch| !batch.object.status.is_final()).len() >= MAX_LIVE {
        let retry_after_s = state.retry_after_s();
        return Err(ApiError::QueueFull { max_outstanding: MAX_LIVE, retry_after_s });
    }
    if batches.len() >= MAX_BATCHES {
        let oldest = batches.select(|batch| batch.object.status.is_final());
        if let Some(oldest) = oldest.first() {
            batches.remove(&oldest.object.id).map_err(disk)?;
        }
    }
    Ok(())
}

pub(crate) async fn list(
    State(state): State<ServerState>,
    bearer: Bearer,
    query: Result<Query<PageQuery>, QueryRejection>,
) -> Result<Json<Page<Batch>>, ApiError> {
    let store = state.files()?;
    let Query(query) = query.map_err(|error| ApiError::Query(error.body_text()))?;
    if query.purpose.is_some() {
        return Err(ApiError::UnknownField { param: "purpose".to_owned() });
    }
    let owner = bearer.owner(store.salt());
    let batches = store.batches().select(|batch| batch.owner == owner).into_iter();
    let batches = batches.map(|batch| store.desk().view(batch.object)).collect();
    Page::of(batches, &query, USUAL_LIMIT, |batch: &Batch| &batch.id).map(Json)
}

pub(crate) async fn get(
    State(state): State<ServerState>,
    bearer: Bearer,
    Path(id): Path<String>,
) -> Result<Json<Batch>, ApiError> {
    let (store, batch) = (state.files()?, find(&state, &bearer, id)?);
    Ok(Json(store.desk().view(batch.object)))
}

pub(crate) async fn cancel(
    State(state): State<ServerState>,
    bearer: Bearer,
    Path(id): Path<String>,
) -> Result<Json<Batch>, ApiError> {
    let (store, batch) = (state.files()?, find(&state, &bearer, id)?);
    let id = &batch.object.id;
    let mut refused = None;
    let changed = store.batches().change(id, |batch| match batch.status {
        Status::Validating | Status::InProgress => {
            batch.status = Status::Cancelling;
            batch.cancelling_at = Some(unix_time_s());
        }
        Status::Cancelling => {}
        status => refused = Some(status),
    });
    if let Some(status) = refused {
        let reason = format!("is {}", serde_json::json!(status));
        return Err(ApiError::invalid("batch_id", reason));
    }
    let changed = changed.map_err(disk)?.unwrap_or(batch);
    store.desk().cancel(&changed.object.id);
    Ok(Json(store.desk().view(changed.object)))
}

fn find(state: &ServerState, bearer: &Bearer, id: String) -> Result<Record<Batch>, ApiError> {
    let store = state.files()?;
    let found = store.batches().get(&id, bearer.owner(store.salt()).as_deref());
    found.ok_or(ApiError::NoSuchObject { kind: "batch", id })
}
