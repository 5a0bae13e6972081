//! `GET /v1/files`, `GET` and `DELETE /v1/files/{id}`, `GET /v1/files/{id}/content`.

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use tokio::fs::File;
use tokio::io::AsyncReadExt;

use super::object::{Deleted, FileKind, FileObject};
use super::page::{Page, PageQuery};
use super::records::Record;
use super::upload::disk;
use crate::access::Bearer;
use crate::error::ApiError;
use crate::state::ServerState;

/// OpenAI's.
const USUAL_LIMIT: usize = 10_000;
/// Bytes that are read at once.
const CHUNK_BYTES: u64 = 256 << 10;

type PageOf<T> = Result<Json<Page<T>>, ApiError>;

pub(crate) async fn list(
    State(state): State<ServerState>,
    bearer: Bearer,
    query: Result<Query<PageQuery>, QueryRejection>,
) -> PageOf<FileObject> {
    let store = state.files()?;
    let Query(query) = query.map_err(|error| ApiError::Query(error.body_text()))?;
    let owner = bearer.owner(store.salt());
    let is_asked = |file: &Record<FileObject>| {
        let is_fit = query.purpose.is_none_or(|asked| asked == file.object.purpose);
        file.owner == owner && is_fit
    };
    let files = store.files().select(is_asked).into_iter().map(|file| file.object).collect();
    Page::of(files, &query, USUAL_LIMIT, |file: &FileObject| &file.id).map(Json)
}

pub(crate) async fn get(
    State(state): State<ServerState>,
    bearer: Bearer,
    Path(id): Path<String>,
) -> Result<Json<FileObject>, ApiError> {
    find(&state, &bearer, id).map(Json)
}

pub(crate) async fn delete(
    State(state): State<ServerState>,
    bearer: Bearer,
    Path(id): Path<String>,
) -> Result<Json<Deleted>, ApiError> {
    let (store, file) = (state.files()?, find(&state, &bearer, id)?);
    let uses = store
        .batches()
        .select(|batch| batch.object.input_file_id == file.id && !batch.object.status.is_final());
    if let Some(batch) = uses.first() {
        let reason = format!("is being read by {}; cancel that first", batch.object.id);
        return Err(ApiError::invalid("file_id", reason));
    }
    store.delete(&file.id).map_err(disk)?;
    Ok(Json(Deleted { id: file.id, object: FileKind::File, deleted: true }))
}

pub(crate) async fn content(
    State(state): State<ServerState>,
    bearer: Bearer,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let file = find(&state, &bearer, id)?;
    let data = File::open(state.files()?.data_path(&file.id)).await.map_err(disk)?;
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_LENGTH, file.bytes.to_string()),
    ];
    let chunks = stream::try_unfold(data, |mut data| async move {
        let mut chunk = Vec::new();
        (&mut data).take(CHUNK_BYTES).read_to_end(&mut chunk).await?;
        Ok::<_, std::io::Error>((!chunk.is_empty()).then(|| (Bytes::from(chunk), data)))
    });
    Ok((headers, Body::from_stream(chunks)).into_response())
}

fn find(state: &ServerState, bearer: &Bearer, id: String) -> Result<FileObject, ApiError> {
    let store = state.files()?;
    let found = store.files().get(&id, bearer.owner(store.salt()).as_deref());
    found.map(|file| file.object).ok_or(ApiError::NoSuchObject { kind: "file", id })
}
