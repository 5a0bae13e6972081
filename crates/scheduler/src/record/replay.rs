//! Does again what was recorded.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use super::event::{Event, Planned};
use super::recorded::Record;
use super::sequences::StandIns;
use crate::{Batch, Scheduler, SchedulerConfig, SchedulerError, SequenceId};

/// Limits that no device has: a file must not ask for the memory that they would take.
const MOST: usize = 1 << 26;

/// Why a record cannot be done again.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RecordError {
    /// It is another program's.
    #[error("the record has layout {version}; this program reads {}", Record::VERSION)]
    Version {
        /// Its layout.
        version: u32,
    },
    /// Its limits are not a scheduler's.
    #[error("the record's limits: {0}")]
    Config(#[from] SchedulerError),
    /// Its calls are damaged.
    #[error("call {call} of the record is damaged: {what}")]
    Damaged {
        /// Which, from 0.
        call: usize,
        /// What is wrong.
        what: &'static str,
    },
}

/// One plan of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplayedStep {
    /// The scheduler's time.
    pub now: Duration,
    /// What was decided then.
    pub recorded: Planned,
    /// What is decided now; `None` if the record cannot be done again.
    pub replayed: Option<Planned>,
    /// Sequences that run after it, those that wait, and blocks that nobody needs.
    pub state: [usize; 3],
    /// What does not hold in the scheduler's books after it.
    pub violation: Option<String>,
}

impl ReplayedStep {
    /// Whether it was decided again as before.
    #[must_use]
    pub fn is_same(&self) -> bool {
        self.replayed.is_none_or(|replayed| replayed == self.recorded)
    }
}

/// A record being done again, plan by plan.
#[derive(Debug)]
pub struct Replay<'a> {
    record: &'a Record,
    stand_ins: StandIns<'a>,
    scheduler: Scheduler,
    log: Vec<u8>,
    at: usize,
    num_calls: usize,
    now: Duration,
    planned: Option<Batch>,
    in_flight: VecDeque<Batch>,
    /// Sampled rows of the batch collected last that were not committed.
    rows: VecDeque<SequenceId>,
    /// Where each sequence is in the record.
    places: HashMap<SequenceId, usize>,
    /// Something was done since the last plan.
    is_dirty: bool,
}

impl<'a> Replay<'a> {
    /// Begins at the record's start.
    ///
    /// # Errors
    /// [`RecordError`].
    pub fn new(record: &'a Record) -> Result<Self, RecordError> {
        if record.version != Record::VERSION {
            return Err(RecordError::Version { version: record.version });
        }
        let damaged = |what| RecordError::Damaged { call: 0, what };
        // A record is a file: its limits may be anything.
        let SchedulerConfig { max_num_seqs, max_model_len, num_blocks, .. } = record.config;
        let limits =
            [max_num_seqs, max_model_len, num_blocks, record.config.memory.num_swap_blocks];
        if limits.iter().any(|limit| *limit > MOST) {
            return Err(damaged("its limits are too large"));
        }
        let digit = |digit: &u8| char::from(*digit).to_digit(16);
        let byte = |pair: &[u8]| Some((digit(&pair[0])? << 4 | digit(pair.get(1)?)?) as u8);
        let log: Option<Vec<u8>> = record.log.as_bytes().chunks(2).map(byte).collect();
        Ok(Self {
            record,
            stand_ins: StandIns::new(&record.sequences, record.config.block_size.max(1)),
            scheduler: Scheduler::new(record.config.clone())?,
            log: log.ok_or_else(|| damaged("it is not in hexadecimal digits"))?,
            at: 0,
            num_calls: 0,
            now: Duration::ZERO,
            planned: None,
            in_flight: VecDeque::new(),
            rows: VecDeque::new(),
            places: HashMap::new(),
            is_dirty: false,
        })
    }

    /// The scheduler as it is after the latest plan.
    #[must_use]
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// Goes on to the next plan; `None` at the end.
    ///
    /// # Errors
    /// [`RecordError::Damaged`].
    pub fn step(&mut self) -> Result<Option<ReplayedStep>, RecordError> {
        while self.at < self.log.len() {
            let mut rest = &self.log[self.at..];
            let event = Event::read(&mut rest).ok_or_else(|| self.damaged("it is no call"))?;
            self.at = self.log.len() - rest.len();
            self.is_dirty = true;
            if let Event::Plan(recorded) = event {
                self.is_dirty = false;
                let replayed = self.record.is_whole.then(|| self.plan());
                self.num_calls += 1;
                return Ok(Some(self.replayed(recorded, replayed)));
            }
            if self.record.is_whole {
                self.apply(event)?;
            } else if let Event::Now(after) = event {
                self.now = self.now.saturating_add(after);
            }
            self.num_calls += 1;
        }
        // What came after the last plan may have been the end.
        if std::mem::take(&mut self.is_dirty) && self.record.is_whole {
            let last = self.replayed(Planned::default(), Some(Planned::default()));
            return Ok(Some(last).filter(|last| last.violation.is_some()));
        }
        Ok(None)
    }

    fn replayed(&self, recorded: Planned, replayed: Option<Planned>) -> ReplayedStep {
        let scheduler = &self.scheduler;
        ReplayedStep {
            now: self.now,
            recorded,
            replayed,
            state: [scheduler.num_running(), scheduler.num_waiting(), scheduler.num_free_blocks()],
            violation: scheduler.check_integrity().err(),
        }
    }

    fn plan(&mut self) -> Planned {
        self.planned = self.scheduler.plan();
        Planned::new(self.planned.as_ref(), self.scheduler.decision())
    }

    fn apply(&mut self, event: Event) -> Result<(), RecordError> {
        match event {
            Event::Now(after) => {
                self.now = self.now.saturating_add(after);
                self.scheduler.set_now(self.now);
            }
            Event::Add(place) => self.add(place)?,
            Event::Abort(id) => drop(self.scheduler.abort(SequenceId(id))),
            Event::Expire => drop(self.scheduler.expire()),
            Event::Policy(place) => {
                let policy = self.record.policies.get(place);
                let policy = policy.ok_or_else(|| self.damaged("there is no such policy"))?;
                // One that was refused is refused again.
                let _ = self.scheduler.set_policy(policy.clone());
            }
            Event::Costs(costs) => self.scheduler.set_costs(costs),
            Event::Advance => {
                let batch = self.planned.take();
                let batch = batch.ok_or_else(|| self.damaged("nothing was planned"))?;
                self.scheduler.advance(&batch);
                self.in_flight.push_back(batch);
            }
            Event::Observe(took) => {
                let oldest = self.in_flight.front();
                let oldest = oldest.ok_or_else(|| self.damaged("nothing is in flight"))?;
                self.scheduler.observe(oldest, took);
            }
            Event::Collect => {
                let oldest = self.in_flight.pop_front();
                let oldest = oldest.ok_or_else(|| self.damaged("nothing is in flight"))?;
                self.scheduler.collect(&oldest);
                self.rows = oldest.sampled_rows().map(|row| row.id).collect();
            }
            Event::Commit(count) => self.commit(count)?,
            Event::Damage(kind) => self.damage(kind)?,
            Event::Plan(_) => {}
        }
        Ok(())
    }

    fn add(&mut self, place: usize) -> Result<(), RecordError> {
        let sequence = self.record.sequences.get(place);
        let sequence = sequence.ok_or_else(|| self.damaged("there is no such sequence"))?;
        if sequence.prompt_len > self.record.config.max_model_len {
            return Err(self.damaged("the prompt is too long"));
        }
        if self.scheduler.has_sequence(SequenceId(sequence.id)) {
            return Err(self.damaged("the sequence is there already"));
        }
        self.places.insert(SequenceId(sequence.id), place);
        let added = self.scheduler.add(self.stand_ins.spec(place));
        added.map_err(|_| self.damaged("the sequence does not fit"))
    }

    fn commit(&mut self, count: usize) -> Result<(), RecordError> {
        for _ in 0..count {
            let id = loop {
                let id = self.rows.pop_front();
                let id = id.ok_or_else(|| self.damaged("there is no such row"))?;
                if self.scheduler.has_sequence(id) {
                    break id;
                }
            };
            let place = self.places.get(&id).copied();
            let place = place.ok_or_else(|| self.damaged("there is no such sequence"))?;
            let position = self.scheduler.tokens(id).len();
            self.scheduler.commit(id, self.stand_ins.token(place, position));
        }
        Ok(())
    }

    #[cfg(feature = "damage")]
    fn damage(&mut self, kind: u64) -> Result<(), RecordError> {
        use crate::Damage::{DoubleFree, LeakBlock, ReuseEarly};
        let known = [LeakBlock, DoubleFree, ReuseEarly];
        let damage = known.into_iter().find(|damage| *damage as u64 == kind);
        self.scheduler.damage(damage.ok_or_else(|| self.damaged("there is no such bug"))?);
        Ok(())
    }

    #[cfg(not(feature = "damage"))]
    fn damage(&mut self, _kind: u64) -> Result<(), RecordError> {
        Err(self.damaged("it plants a bug, which this program cannot"))
    }

    fn damaged(&self, what: &'static str) -> RecordError {
        RecordError::Damaged { call: self.num_calls, what }
    }
}
