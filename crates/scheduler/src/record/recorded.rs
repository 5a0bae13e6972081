//! A scheduler that keeps its calls.

use std::collections::{HashMap, VecDeque};
use std::ops::Deref;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::event::{Event, Planned};
use super::sequences::SequenceRecord;
use crate::{
    AdmissionError, Batch, Commit, FinishReason, Lapse, MoveCosts, Policy, Scheduler,
    SchedulerConfig, SchedulerError, SequenceId, SequenceSpec, Tenant,
};

/// A [`Scheduler`] whose calls are kept. It can be looked at as a scheduler, and is told things by
/// the methods of the same names.
#[derive(Debug)]
pub struct Recorded {
    scheduler: Scheduler,
    now: Duration,
    /// Forgotten one after the other; the newest is written to.
    logs: VecDeque<Vec<u8>>,
    is_whole: bool,
    policies: Vec<Policy>,
    sequences: Vec<SequenceRecord>,
    /// Places of those that have not ended.
    places: HashMap<SequenceId, usize>,
    tenants: HashMap<Tenant, u64>,
    num_sequence_bytes: usize,
    /// Commits that were not written yet.
    num_commits: usize,
}

/// What a scheduler was told and decided.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Of this layout: 1.
    pub version: u32,
    /// Whether it goes back to the start, so that it can be done again.
    pub is_whole: bool,
    /// The scheduler's limits.
    pub config: SchedulerConfig,
    /// Policies that it had.
    pub policies: Vec<Policy>,
    /// Sequences that it had.
    pub sequences: Vec<SequenceRecord>,
    /// Its calls, in hexadecimal digits.
    pub log: String,
}

impl Record {
    /// The layout that this program writes and reads.
    pub const VERSION: u32 = 1;
}

impl Recorded {
    /// Most bytes that are kept.
    pub const MAX_BYTES: usize = 16 << 20;
    /// Calls are forgotten in pieces of this size.
    const LOG_BYTES: usize = Self::MAX_BYTES / 4;
    /// Most bytes of sequences, and of calls.
    const MOST_SEQUENCE_BYTES: usize = Self::MAX_BYTES / 2;

    /// A new scheduler's.
    ///
    /// # Errors
    /// As [`Scheduler::new`].
    pub fn new(config: SchedulerConfig) -> Result<Self, SchedulerError> {
        Ok(Self {
            scheduler: Scheduler::new(config)?,
            now: Duration::ZERO,
            logs: VecDeque::from([Vec::new()]),
            is_whole: true,
            policies: Vec::new(),
            sequences: Vec::new(),
            places: HashMap::new(),
            tenants: HashMap::new(),
            num_sequence_bytes: 0,
            num_commits: 0,
        })
    }

    /// All that was kept. Costs a pass over it.
    #[must_use]
    pub fn record(&mut self) -> Record {
        self.flush_commits();
        let mut numbers: HashMap<u64, u64> = HashMap::new();
        let mut sequences = self.sequences.clone();
        for block in sequences.iter_mut().flat_map(|sequence| &mut sequence.blocks) {
            let next = numbers.len() as u64 + 1;
            *block = *numbers.entry(*block).or_insert(next);
        }
        let digits =
            |byte: &u8| [byte >> 4, byte & 15].map(|digit| b"0123456789abcdef"[digit as usize]);
        let log = self.logs.iter().flatten().flat_map(digits).map(char::from).collect();
        Record {
            version: Record::VERSION,
            is_whole: self.is_whole,
            config: self.scheduler.config().clone(),
            policies: self.policies.clone(),
            sequences,
            log,
        }
    }

    /// The scheduler, to be told of a file's blocks. What a file has is not kept, so from here on
    /// the record can be looked at, but not done again.
    pub fn with_file(&mut self) -> &mut Scheduler {
        self.is_whole = false;
        &mut self.scheduler
    }

    /// [`Scheduler::set_policy`].
    ///
    /// # Errors
    /// The same.
    pub fn set_policy(&mut self, policy: Policy) -> Result<(), SchedulerError> {
        self.write(Event::Policy(self.policies.len()));
        self.policies.push(policy.clone());
        self.scheduler.set_policy(policy)
    }

    /// [`Scheduler::set_now`].
    pub fn set_now(&mut self, now: Duration) {
        let after = now.saturating_sub(self.now);
        if !after.is_zero() {
            self.now = now;
            self.write(Event::Now(after));
        }
        self.scheduler.set_now(now);
    }

    /// [`Scheduler::set_costs`].
    pub fn set_costs(&mut self, costs: MoveCosts) {
        self.write(Event::Costs(costs));
        self.scheduler.set_costs(costs);
    }

    /// [`Scheduler::add`].
    ///
    /// # Errors
    /// The same; nothing is kept of the sequence then.
    pub fn add(&mut self, spec: SequenceSpec) -> Result<(), AdmissionError> {
        let id = spec.id;
        let tenant = self.number_of(&spec.service.tenant);
        let mut record = SequenceRecord::new(&spec, tenant);
        self.scheduler.add(spec)?;
        if !self.is_whole {
            return Ok(());
        }
        let sequence = self.scheduler.sequence(id);
        record.blocks = sequence.chain.hashes().iter().map(|hash| hash.to_bits()).collect();
        record.shares_prompt_of = sequence.shares_prompt_of.map(|leader| leader.0);
        self.write(Event::Add(self.sequences.len()));
        self.places.insert(id, self.sequences.len());
        self.num_sequence_bytes += size_of::<SequenceRecord>() + 8 * record.blocks.len();
        self.sequences.push(record);
        self.forget_if_too_much();
        Ok(())
    }

    /// [`Scheduler::abort`].
    pub fn abort(&mut self, id: SequenceId) -> bool {
        self.write(Event::Abort(id.0));
        self.places.remove(&id);
        self.scheduler.abort(id)
    }

    /// [`Scheduler::expire`].
    pub fn expire(&mut self) -> Vec<(SequenceId, Lapse)> {
        let expired = self.scheduler.expire();
        if !expired.is_empty() {
            self.write(Event::Expire);
        }
        for (id, _) in &expired {
            self.places.remove(id);
        }
        expired
    }

    /// [`Scheduler::plan`].
    pub fn plan(&mut self) -> Option<Batch> {
        let batch = self.scheduler.plan();
        let planned = Planned::new(batch.as_ref(), self.scheduler.decision());
        self.write(Event::Plan(planned));
        batch
    }

    /// [`Scheduler::advance`].
    pub fn advance(&mut self, batch: &Batch) {
        self.write(Event::Advance);
        self.scheduler.advance(batch);
    }

    /// [`Scheduler::observe`], of the oldest batch in flight.
    pub fn observe(&mut self, batch: &Batch, took: Duration) {
        self.write(Event::Observe(took));
        self.scheduler.observe(batch, took);
    }

    /// [`Scheduler::collect`], of the oldest batch in flight.
    pub fn collect(&mut self, batch: &Batch) {
        self.write(Event::Collect);
        self.scheduler.collect(batch);
    }

    /// [`Scheduler::commit`], for every sampled row of the batch collected last whose sequence is
    /// there, in order.
    pub fn commit(&mut self, id: SequenceId, token: u32) -> Option<Commit> {
        self.num_commits += 1;
        let place = self.places.get(&id).copied();
        if let Some(place) = place {
            self.note_full_block(id, token, place);
        }
        let commit = self.scheduler.commit(id, token);
        if let (Some(place), Some(commit)) = (place, &commit)
            && let Some(finish) = commit.finish
        {
            let is_stop = matches!(finish, FinishReason::Stop { .. });
            let before = commit.num_generated - 1;
            self.sequences[place].stopped_after = is_stop.then_some(before);
            self.places.remove(&id);
        }
        commit
    }

    /// Plants a bug.
    #[cfg(feature = "damage")]
    pub fn damage(&mut self, damage: crate::Damage) -> bool {
        let is_done = self.scheduler.damage(damage);
        if is_done {
            self.write(Event::Damage(damage as u64));
        }
        is_done
    }

    /// Notes the block that a token fills.
    fn note_full_block(&mut self, id: SequenceId, token: u32, place: usize) {
        let Self { scheduler, sequences, .. } = self;
        if !scheduler.has_sequence(id) {
            return;
        }
        let sequence = scheduler.sequence(id);
        if !scheduler.config().memory.prefix_caching {
            return;
        }
        let block_size = sequence.chain.block_size();
        let start = sequence.tokens.len() / block_size * block_size;
        let is_full = sequence.tokens.len() + 1 - start == block_size;
        if is_full && sequence.chain.hashes().len() == start / block_size {
            let block: Vec<u32> = sequence.tokens[start..].iter().copied().chain([token]).collect();
            sequences[place].blocks.push(sequence.chain.hash_after(&block).to_bits());
            self.num_sequence_bytes += 8;
        }
    }

    fn number_of(&mut self, tenant: &Tenant) -> Option<u64> {
        tenant.name()?;
        let next = self.tenants.len() as u64;
        if !self.is_whole {
            return None;
        }
        Some(*self.tenants.entry(tenant.clone()).or_insert(next))
    }

    fn write(&mut self, event: Event) {
        self.flush_commits();
        let log = self.logs.back_mut().expect("there is always one");
        event.write(log);
        if log.len() >= Self::LOG_BYTES {
            self.logs.push_back(Vec::new());
            self.forget_if_too_much();
        }
    }

    fn flush_commits(&mut self) {
        let count = std::mem::take(&mut self.num_commits);
        if count > 0 {
            let log = self.logs.back_mut().expect("there is always one");
            Event::Commit(count).write(log);
        }
    }

    /// Beyond the limit only plans are kept, and only the latest.
    fn forget_if_too_much(&mut self) {
        let is_too_much = self.num_sequence_bytes > Self::MOST_SEQUENCE_BYTES;
        if self.logs.len() > 2 || is_too_much {
            self.is_whole = false;
            self.sequences = Vec::new();
            self.places = HashMap::new();
            self.tenants = HashMap::new();
            self.num_sequence_bytes = 0;
        }
        while self.logs.len() > 2 {
            self.logs.pop_front();
        }
    }
}

impl Deref for Recorded {
    type Target = Scheduler;

    fn deref(&self) -> &Scheduler {
        &self.scheduler
    }
}
