//! When waiting has been too long.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::SequenceId;
use crate::scheduler::Scheduler;

/// What a sequence has run into without being finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lapse {
    /// The deadline that its caller set.
    Deadline,
    /// The scheduler's limit on time in the queue.
    QueueTime,
}

/// Moments at which something lapses, the earliest first.
#[derive(Debug, Default)]
pub(crate) struct Lapses {
    by_time: BTreeSet<(Duration, SequenceId, Lapse)>,
}

impl Scheduler {
    /// Ends every sequence whose time is up, freeing all that it holds, and says why. Tokens of
    /// them that are in flight will be dropped.
    pub fn expire(&mut self) -> Vec<(SequenceId, Lapse)> {
        let mut expired = Vec::new();
        while let Some(&(time, id, lapse)) = self.lapses.by_time.first()
            && time <= self.now
        {
            self.remove(id);
            expired.push((id, lapse));
        }
        expired
    }

    /// Has a new sequence lapse at its deadline, or before, when it has waited for too long.
    pub(crate) fn watch_lapses(&mut self, id: SequenceId) {
        let sequence = &self.sequences[&id];
        let by_time = &mut self.lapses.by_time;
        by_time.extend(sequence.deadline.map(|time| (time, id, Lapse::Deadline)));
        by_time.extend(sequence.queue_limit.map(|time| (time, id, Lapse::QueueTime)));
    }

    /// A sequence that was admitted is past the limit on time in the queue, for good.
    pub(crate) fn lift_queue_limit(&mut self, id: SequenceId) {
        if let Some(time) = self.sequence_mut(id).queue_limit.take() {
            self.lapses.by_time.remove(&(time, id, Lapse::QueueTime));
        }
    }

    /// A sequence ends.
    pub(crate) fn forget_lapses(&mut self, id: SequenceId) {
        self.lift_queue_limit(id);
        if let Some(time) = self.sequence_mut(id).deadline.take() {
            self.lapses.by_time.remove(&(time, id, Lapse::Deadline));
        }
    }

    /// Number of moments that are watched for.
    pub(crate) fn num_lapses(&self) -> usize {
        self.lapses.by_time.len()
    }
}
