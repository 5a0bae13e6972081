//! Batches that have not ended.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::object::{Batch, Counts, Status};

/// Where batches wait for their turn.
#[derive(Default)]
pub(crate) struct Desk {
    /// Whose turn it is; fair, so batches have it in the order in which they ask.
    pub(super) turn: tokio::sync::Mutex<()>,
    live: Mutex<HashMap<String, Arc<Live>>>,
}

/// A batch that has not ended.
pub(crate) struct Live {
    cancelled: watch::Sender<bool>,
    counts: Mutex<Counts>,
}

impl Desk {
    pub(super) fn enter(&self, batch: &Batch) -> Arc<Live> {
        let is_cancelled = batch.status == Status::Cancelling;
        let live = Arc::new(Live {
            cancelled: watch::Sender::new(is_cancelled),
            counts: Mutex::new(batch.request_counts),
        });
        self.live().insert(batch.id.clone(), Arc::clone(&live));
        live
    }

    pub(super) fn leave(&self, id: &str) {
        self.live().remove(id);
    }

    /// A batch as it is now.
    pub(super) fn view(&self, mut batch: Batch) -> Batch {
        if let Some(live) = self.live().get(&batch.id).filter(|_| !batch.status.is_final()) {
            batch.request_counts = live.counts();
        }
        batch
    }

    /// Ends a batch early.
    pub(super) fn cancel(&self, id: &str) {
        if let Some(live) = self.live().get(id) {
            live.cancelled.send_replace(true);
        }
    }

    fn live(&self) -> MutexGuard<'_, HashMap<String, Arc<Live>>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Live {
    /// Resolves when the batch is to end early.
    pub(super) async fn cancelled(&self) {
        let mut cancelled = self.cancelled.subscribe();
        // The sender lives as long as this.
        let _ = cancelled.wait_for(|is_cancelled| *is_cancelled).await;
    }

    pub(super) fn set_counts(&self, counts: Counts) {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner) = counts;
    }

    fn counts(&self) -> Counts {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
