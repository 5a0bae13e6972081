//! Long work beside the threads that serve connections.

use crate::error::ApiError;

/// Less text than this is encoded at once: it takes no longer than handing it to another thread.
const INLINE_BYTES: usize = 4096;

/// Keeps long work from holding up the connections that share this thread.
pub(crate) async fn off_thread<T: Send + 'static>(
    num_bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    if num_bytes <= INLINE_BYTES {
        return Ok(work());
    }
    tokio::task::spawn_blocking(work).await.map_err(|error| {
        tracing::error!(%error, "work beside the connections failed");
        ApiError::internal()
    })
}
