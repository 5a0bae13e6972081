//! `POST /v1/files`.

use std::path::PathBuf;

use axum::Json;
use axum::extract::State;
use axum::extract::multipart::{Field, Multipart, MultipartError, MultipartRejection};
use axum::http::StatusCode;
use tokio::fs::File;
use tokio::io::AsyncWriteExt;

use super::object::{FileObject, Purpose};
use super::store::FileStore;
use crate::access::Bearer;
use crate::error::ApiError;
use crate::random::random_id;
use crate::state::{Phase, ServerState};

/// Most bytes of one file; OpenAI's limit for batches.
pub(crate) const MAX_FILE_BYTES: usize = 200 << 20;
/// What a form has beside its file.
pub(crate) const FORM_BYTES: usize = 64 << 10;
const MAX_NAME_BYTES: usize = 255;

/// What has arrived of a file. Removed when dropped, unless it was moved to its place.
struct Part {
    path: PathBuf,
    filename: String,
}

impl Drop for Part {
    fn drop(&mut self) {
        // Nothing is there if the file was kept.
        let _ = std::fs::remove_file(&self.path);
    }
}

pub(crate) async fn create(
    State(state): State<ServerState>,
    bearer: Bearer,
    form: Result<Multipart, MultipartRejection>,
) -> Result<Json<FileObject>, ApiError> {
    let store = state.files()?.clone();
    if state.phase() != Phase::Serving {
        return Err(ApiError::ShuttingDown);
    }
    let mut form = form.map_err(|error| ApiError::Form(error.body_text()))?;
    let id = random_id("file-");
    let (mut purpose, mut part) = (None, None);
    while let Some(field) = form.next_field().await.map_err(broken)? {
        match field.name().unwrap_or_default() {
            "purpose" => purpose = Some(read_purpose(field).await?),
            "file" if part.is_none() => part = Some(receive(field, &store, &id).await?),
            name => return Err(ApiError::UnknownField { param: name.to_owned() }),
        }
    }
    let purpose = purpose.ok_or(ApiError::Missing { param: "purpose" })?;
    let part = part.ok_or(ApiError::Missing { param: "file" })?;
    let (filename, owner) = (part.filename.clone(), bearer.owner(store.salt()));
    let kept =
        tokio::task::spawn_blocking(move || store.keep(&part.path, id, purpose, filename, owner));
    let kept = kept.await.map_err(|_| ApiError::internal())?.map_err(disk)?;
    Ok(Json(kept.object))
}

async fn read_purpose(field: Field<'_>) -> Result<Purpose, ApiError> {
    match field.text().await.map_err(broken)?.as_str() {
        "batch" => Ok(Purpose::Batch),
        other => {
            let reason = format!("is {other:?}; files of this server are for \"batch\"");
            Err(ApiError::invalid("purpose", reason))
        }
    }
}

/// Writes a file as it arrives.
async fn receive(mut field: Field<'_>, store: &FileStore, id: &str) -> Result<Part, ApiError> {
    let filename = field.file_name().unwrap_or("file").to_owned();
    if filename.len() > MAX_NAME_BYTES || filename.chars().any(char::is_control) {
        let reason = format!("its name has over {MAX_NAME_BYTES} bytes or control characters");
        return Err(ApiError::invalid("file", reason));
    }
    let room = store.room()?;
    let part = Part { path: store.part_path(id), filename };
    let mut file = File::create(&part.path).await.map_err(disk)?;
    let mut num_bytes = 0_u64;
    while let Some(chunk) = field.chunk().await.map_err(broken)? {
        num_bytes += chunk.len() as u64;
        if num_bytes > MAX_FILE_BYTES as u64 {
            return Err(ApiError::BodyTooLarge { max_bytes: MAX_FILE_BYTES });
        }
        if num_bytes > room {
            return Err(store.full());
        }
        file.write_all(&chunk).await.map_err(disk)?;
    }
    if num_bytes == 0 {
        return Err(ApiError::invalid("file", "is empty"));
    }
    file.flush().await.map_err(disk)?;
    file.sync_data().await.map_err(disk)?;
    Ok(part)
}

fn broken(error: MultipartError) -> ApiError {
    match error.status() {
        StatusCode::PAYLOAD_TOO_LARGE => ApiError::BodyTooLarge { max_bytes: MAX_FILE_BYTES },
        _ => ApiError::Form(error.body_text()),
    }
}

/// The disk fails, which is nobody's business but ours.
pub(crate) fn disk(error: std::io::Error) -> ApiError {
    tracing::error!(%error, "a file of a client cannot be kept or read");
    ApiError::internal()
}
