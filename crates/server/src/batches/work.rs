//! A batch from its first line to its last.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::desk::Live;
use super::object::{Batch, Counts, Flaws, Status};
use super::split::split;
use crate::access::Bearer;
use crate::batch::{BatchError, BatchRun, Flaw, check_lines};
use crate::files::{FileStore, Record};
use crate::state::{ServerState, unix_time_s};

/// Lines of a batch that the engine has at once: as many more as clients' requests leave room for.
const MAX_AT_ONCE: usize = 64;

/// How work on a batch ended.
enum Ended {
    Complete,
    Cancelled,
    Expired,
    /// It cannot be answered.
    Invalid(Vec<Flaw>),
    /// The server ends; the next one goes on.
    Stopped,
}

struct Job {
    state: ServerState,
    store: FileStore,
    batch: Batch,
    owner: Option<String>,
    live: Arc<Live>,
}

/// Goes on with all batches that an earlier server has left.
pub(crate) fn resume(state: &ServerState) {
    let Ok(store) = state.files() else { return };
    for record in store.batches().select(|batch| !batch.object.status.is_final()) {
        tracing::info!(id = record.object.id, "a batch goes on");
        start(state, record);
    }
}

/// Works on a batch when its turn comes.
pub(super) fn start(state: &ServerState, record: Record<Batch>) {
    let Ok(store) = state.files().cloned() else { return };
    let Record { owner, object: batch, .. } = record;
    let live = store.desk().enter(&batch);
    let job = Job { state: state.clone(), store, batch, owner, live };
    tokio::spawn(async move {
        if let Err(error) = job.work().await {
            tracing::error!(id = job.batch.id, %error, "a batch's files cannot be read or written");
        }
        job.store.desk().leave(&job.batch.id);
    });
}

impl Job {
    async fn work(&self) -> io::Result<()> {
        let left = Duration::from_secs(self.batch.expires_at.saturating_sub(unix_time_s()));
        let ended = tokio::select! {
            biased;
            () = self.live.cancelled() => Ended::Cancelled,
            () = tokio::time::sleep(left) => Ended::Expired,
            ended = self.run() => ended?,
        };
        let status = match ended {
            Ended::Stopped => return Ok(()),
            Ended::Invalid(flaws) => return self.fail(flaws),
            Ended::Complete => Status::Completed,
            Ended::Cancelled => Status::Cancelled,
            Ended::Expired => Status::Expired,
        };
        self.finish(status).await
    }

    /// Answers all lines.
    async fn run(&self) -> io::Result<Ended> {
        let _turn = self.store.desk().turn.lock().await;
        let Some(bearer) = Bearer::of_owner(&self.state, &self.store, self.owner.as_deref()) else {
            return Ok(Ended::Invalid(vec![Flaw::of_batch("key", "its API key is gone")]));
        };
        if self.batch.status == Status::Validating {
            let flaws = self.check().await?;
            if !flaws.is_empty() {
                return Ok(Ended::Invalid(flaws));
            }
            // Somebody may have cancelled it in the meantime.
            self.change(|batch| {
                if batch.status == Status::Validating {
                    batch.status = Status::InProgress;
                    batch.in_progress_at = Some(unix_time_s());
                }
            })?;
        }
        let input = self.store.data_path(&self.batch.input_file_id);
        let answers = self.store.data_path(&self.batch.id);
        let run = match BatchRun::open(&self.state, &input, &answers, MAX_AT_ONCE) {
            Ok(run) => run.on_behalf_of(bearer),
            Err(error) => return ended_by(error),
        };
        let ran = run.run(|progress| {
            let (total, failed) = (progress.num_lines, progress.num_failed);
            let completed = progress.num_answered - failed;
            self.live.set_counts(Counts { total, completed, failed });
        });
        match ran.await {
            Ok(_) => Ok(Ended::Complete),
            Err(error) => ended_by(error),
        }
    }

    /// What is wrong with the lines, before any of them is answered.
    async fn check(&self) -> io::Result<Vec<Flaw>> {
        let path = self.store.data_path(&self.batch.input_file_id);
        let (endpoint, state) = (self.batch.endpoint.clone(), self.state.clone());
        let check = move || check_lines(&path, &endpoint, &state);
        let checked = tokio::task::spawn_blocking(check).await.map_err(io::Error::other)?;
        let (num_lines, flaws) = checked.map_err(io::Error::other)?;
        let counts = Counts { total: num_lines, ..Counts::default() };
        self.live.set_counts(counts);
        self.change(|batch| batch.request_counts = counts)?;
        Ok(flaws)
    }

    fn fail(&self, flaws: Vec<Flaw>) -> io::Result<()> {
        self.change(|batch| {
            batch.status = Status::Failed;
            batch.failed_at = Some(unix_time_s());
            batch.errors = Some(Flaws::new(flaws));
        })
    }

    /// Makes files of what was answered.
    async fn finish(&self, status: Status) -> io::Result<()> {
        if status == Status::Completed {
            self.change(|batch| {
                batch.status = Status::Finalizing;
                batch.finalizing_at = Some(unix_time_s());
            })?;
        }
        let (store, batch, owner) = (self.store.clone(), self.batch.clone(), self.owner.clone());
        let split = move || split(&store, &batch, owner.as_deref());
        let parted = tokio::task::spawn_blocking(split).await.map_err(io::Error::other)??;
        self.change(|batch| {
            batch.status = status;
            let now = Some(unix_time_s());
            match status {
                Status::Cancelled => batch.cancelled_at = now,
                Status::Expired => batch.expired_at = now,
                _ => batch.completed_at = now,
            }
            batch.output_file_id = parted.output_file_id;
            batch.error_file_id = parted.error_file_id;
            batch.request_counts = Counts { total: batch.request_counts.total, ..parted.counts };
        })?;
        match std::fs::remove_file(self.store.data_path(&self.batch.id)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn change(&self, change: impl FnOnce(&mut Batch)) -> io::Result<()> {
        self.store.batches().change(&self.batch.id, change).map(drop)
    }
}

fn ended_by(error: BatchError) -> io::Result<Ended> {
    match error {
        BatchError::EngineEnded => Ok(Ended::Stopped),
        BatchError::File { error, .. } => Err(error),
        error => Err(io::Error::other(error)),
    }
}
