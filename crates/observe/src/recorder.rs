//! The last steps and the totals of all, always on.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
    time::Duration,
};

use inflight_engine::{RequestId, StepRecord};

use crate::requests::RequestTimelines;
use crate::{Bubbles, Cause, RequestTimeline};

/// Steps that are kept: at a thousand a second, the last few.
const KEPT_STEPS: usize = 8192;

/// Records that may wait to be taken; at a thousand steps a second, some seconds' worth.
const MAX_WAITING_RECORDS: usize = 8192;

/// How often records are taken. The engine does not wake anybody by sending one.
const INTERVAL: Duration = Duration::from_millis(50);

/// Keeps the last steps, adds up all.
#[derive(Debug, Default)]
pub struct StepRecorder(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    steps: VecDeque<StepRecord>,
    bubbles: Bubbles,
    requests: RequestTimelines,
    totals: StepTotals,
}

/// Sums over all steps since the start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepTotals {
    /// Steps recorded.
    pub num_steps: u64,
    /// Tokens computed by them.
    pub num_tokens: u64,
    /// Steps whose records were lost, as nobody took them in time.
    pub num_lost_steps: u64,
    /// Time in which the device computed; what it waited inside a batch is left out.
    pub busy: Duration,
    /// Time in which the host waited for the device.
    pub blocked: Duration,
    /// Time in which the device had nothing to run, by cause.
    pub idle: BTreeMap<Cause, Duration>,
}

impl StepRecorder {
    /// Starts a thread that takes the records sent to the sender returned, as long as somebody
    /// holds the recorder or the sender.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn start() -> std::io::Result<(Arc<Self>, SyncSender<StepRecord>)> {
        let (sender, records) = sync_channel(MAX_WAITING_RECORDS);
        let recorder = Arc::new(Self::default());
        let weak = Arc::downgrade(&recorder);
        let take = move || take_records(&weak, &records);
        thread::Builder::new().name("recorder".to_owned()).spawn(take)?;
        Ok((recorder, sender))
    }

    /// Adds a step; steps come in order.
    pub fn add(&self, record: StepRecord) {
        let mut kept = self.lock();
        let kept = &mut *kept;
        let length = |span: inflight_engine::Span| span.end.saturating_sub(span.start);
        for bubble in kept.bubbles.of(&record) {
            *kept.totals.idle.entry(bubble.cause).or_default() += length(bubble.span);
        }
        kept.requests.add(&record);
        let before = kept.steps.back();
        let next_batch = before.map_or(record.batch, |before| before.batch + 1);
        let already = before.map_or(Duration::ZERO, |before| before.compute.end);
        let totals = &mut kept.totals;
        totals.num_steps += 1;
        totals.num_tokens += record.num_tokens as u64;
        totals.num_lost_steps += record.batch.saturating_sub(next_batch);
        let computed = record.compute.end.saturating_sub(record.compute.start.max(already));
        totals.busy += computed.saturating_sub(length(record.stalled));
        totals.blocked += length(record.blocked);
        if kept.steps.len() == KEPT_STEPS {
            kept.steps.pop_front();
        }
        // Rows and arrivals are in the requests' own timelines now.
        kept.steps.push_back(StepRecord { rows: Vec::new(), accepted: Vec::new(), ..record });
    }

    /// The timeline of one of the latest requests.
    pub fn request(&self, id: RequestId) -> Option<RequestTimeline> {
        self.lock().requests.get(id).cloned()
    }

    /// The steps of the last `window` before the latest one's end, in order.
    pub fn last(&self, window: Duration) -> Vec<StepRecord> {
        let kept = self.lock();
        let end = kept.steps.back().map_or(Duration::ZERO, |step| step.collect.end);
        let from = end.saturating_sub(window);
        let first = kept.steps.partition_point(|step| step.collect.end < from);
        kept.steps.range(first..).cloned().collect()
    }

    /// Sums over all steps so far.
    pub fn totals(&self) -> StepTotals {
        self.lock().totals.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes records until the engine is gone, or everybody who could read them.
fn take_records(recorder: &Weak<StepRecorder>, records: &Receiver<StepRecord>) {
    use std::sync::mpsc::TryRecvError;
    loop {
        let Some(recorder) = recorder.upgrade() else { return };
        loop {
            match records.try_recv() {
                Ok(record) => recorder.add(record),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return,
            }
        }
        drop(recorder);
        thread::sleep(INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use inflight_engine::Span;

    fn span(start: u64, end: u64) -> Span {
        Span { start: Duration::from_millis(start), end: Duration::from_millis(end) }
    }

    fn step(batch: u64, compute: Span) -> StepRecord {
        let collect = Span { start: compute.end, end: compute.end };
        StepRecord { batch, num_tokens: 4, compute, collect, ..StepRecord::default() }
    }

    #[test]
    fn totals_add_up_and_overlapping_intervals_count_once() {
        let recorder = StepRecorder::default();
        recorder.add(step(1, span(0, 10)));
        recorder.add(step(2, span(8, 20)));
        recorder.add(step(5, span(25, 30)));
        let totals = recorder.totals();
        assert_eq!((totals.num_steps, totals.num_tokens, totals.num_lost_steps), (3, 12, 2));
        assert_eq!(totals.busy, Duration::from_millis(25));
        assert_eq!(totals.idle.values().sum::<Duration>(), Duration::from_millis(5));
    }

    #[test]
    fn the_oldest_steps_are_forgotten_and_a_window_is_cut_at_its_start() {
        let recorder = StepRecorder::default();
        let num_steps = KEPT_STEPS as u64 + 10;
        for i in 0..num_steps {
            recorder.add(step(i + 1, span(i, i + 1)));
        }
        assert_eq!(recorder.last(Duration::MAX).len(), KEPT_STEPS);
        let last = recorder.last(Duration::from_millis(2));
        let batches: Vec<u64> = last.iter().map(|step| step.batch).collect();
        assert_eq!(batches, [num_steps - 2, num_steps - 1, num_steps]);
        assert_eq!(recorder.totals().num_steps, num_steps);
    }

    #[test]
    fn records_are_taken_by_a_thread_of_its_own() {
        let (recorder, sender) = StepRecorder::start().unwrap();
        for i in 0..100 {
            sender.send(step(i + 1, span(i, i + 1))).unwrap();
        }
        while recorder.totals().num_steps < 100 {
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(recorder.totals().busy, Duration::from_millis(100));
    }
}
