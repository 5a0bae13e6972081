//! The engine's loop without a real device: plan, launch, advance, collect, at depth one or two.
//!
//! It checks every batch against what it knows from outside, and the scheduler's integrity after
//! every call.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::time::Duration;

use inflight_scheduler::{
    Batch, Batching, Decision, FinishReason, Lapse, Policy, Row, Scheduler, SchedulerConfig,
    SequenceId,
};

use crate::device::{Device, MoveTime, StagedRow};
use crate::workload::{Identity, Lengths};

/// Moments of a turn at which an abort may come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    BeforePlan,
    /// Staged and launched, but `advance` was not called yet.
    Launched,
    Advanced,
    /// After the first commit of a collected batch.
    MidCollect,
}

/// What comes from outside in one turn.
#[derive(Debug, Clone, Default)]
pub(crate) struct Turn {
    pub(crate) adds: Vec<Lengths>,
    /// Which sequence, as an index into all added so far.
    pub(crate) aborts: Vec<(Moment, usize)>,
}

/// What is known of one added sequence.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) lengths: Lengths,
    identity: Identity,
    /// Tokens committed.
    pub(crate) tokens: Vec<u32>,
    pub(crate) finish: Option<FinishReason>,
    pub(crate) is_aborted: bool,
    deadline: Option<Duration>,
    queue_limit: Option<Duration>,
    /// Whether it was admitted.
    has_run: bool,
    /// Tokens of its prompt that were in some row.
    num_probed: usize,
    /// Length that the sequence has when all launched rows are collected.
    launched_len: usize,
}

impl Record {
    pub(crate) fn has_ended(&self) -> bool {
        self.finish.is_some() || self.is_aborted
    }

    /// Whether there is still a row to launch.
    fn is_incomplete(&self, config: &SchedulerConfig) -> bool {
        let Lengths { prompt_len, max_tokens, .. } = self.lengths;
        !self.has_ended() && self.launched_len < (prompt_len + max_tokens).min(config.max_model_len)
    }
}

pub(crate) struct Engine {
    pub(crate) scheduler: Scheduler,
    /// In order of arrival.
    pub(crate) records: BTreeMap<SequenceId, Record>,
    /// Every batch launched.
    pub(crate) batches: Vec<Batch>,
    /// What each of them was planned for.
    pub(crate) decisions: Vec<Decision>,
    now: Duration,
    pub(crate) device: Device,
    in_flight: VecDeque<(Batch, Vec<StagedRow>)>,
    overlap: bool,
    /// Sequences that were refused; kept so that ids stay the same whatever is refused.
    num_refused: u64,
    /// Plans in a row that had no row for the oldest sequence.
    num_waited: usize,
    /// Whether the latest plan admitted somebody for the first time.
    somebody_joined: bool,
}

impl Engine {
    pub(crate) fn new(config: SchedulerConfig, overlap: bool) -> Self {
        Self::with_moves(config, overlap, MoveTime::Late)
    }

    pub(crate) fn with_moves(config: SchedulerConfig, overlap: bool, moves: MoveTime) -> Self {
        Self {
            device: Device::new(&config, moves),
            scheduler: Scheduler::new(config).expect("tests use sound limits"),
            records: BTreeMap::new(),
            batches: Vec::new(),
            decisions: Vec::new(),
            now: Duration::ZERO,
            in_flight: VecDeque::new(),
            overlap,
            num_refused: 0,
            num_waited: 0,
            somebody_joined: false,
        }
    }

    pub(crate) fn with_policy(config: SchedulerConfig, policy: Policy, overlap: bool) -> Self {
        let mut engine = Self::new(config, overlap);
        engine.scheduler.set_policy(policy).expect("tests use sound policies");
        engine
    }

    /// Runs a script, then turns without input until all sequences have ended.
    pub(crate) fn run(&mut self, script: &[Turn]) {
        for turn in script {
            self.turn(turn);
        }
        self.drain();
    }

    /// Turns until nothing is left, of which there can be only so many: by the default policy the
    /// oldest sequence advances each turn, and each is the oldest once; others have somebody
    /// advance, who may lose it again. The last turn may only drop a stray row.
    pub(crate) fn drain(&mut self) {
        let alive = self.records.values().filter(|record| !record.has_ended());
        let max_turns: usize =
            alive.map(|record| record.lengths.prompt_len + record.lengths.max_tokens + 2).sum();
        // Moves take turns in which nobody may be able to run.
        let slack = if self.may_wait() { 20 } else { 1 };
        let max_turns = max_turns * if self.is_default() { slack } else { 4 * slack };
        // Moves that were begun end, though nobody may be left.
        let max_turns = 2 + max_turns + self.scheduler.config().memory.num_swap_blocks;
        for _ in 0..max_turns {
            if self.scheduler.is_idle() && self.in_flight.is_empty() {
                return self.check_idle();
            }
            self.turn(&Turn::default());
        }
        panic!("not idle after {max_turns} turns: {:?}", self.scheduler);
    }

    fn is_default(&self) -> bool {
        *self.scheduler.policy() == Policy::default()
    }

    pub(crate) fn turn(&mut self, turn: &Turn) {
        self.now += Duration::from_millis(1);
        self.scheduler.set_now(self.now);
        for lengths in &turn.adds {
            self.add(lengths.clone());
        }
        self.expire();
        self.abort_at(Moment::BeforePlan, turn);
        let mut keep = 0;
        if let Some(batch) = self.plan() {
            self.launch(batch, turn);
            keep = usize::from(self.overlap);
        }
        while self.in_flight.len() > keep {
            self.collect(turn);
        }
    }

    /// Adds all outputs of a request and gives the first one's id.
    pub(crate) fn add(&mut self, lengths: Lengths) -> SequenceId {
        let first = SequenceId(self.records.len() as u64 + self.num_refused);
        for _ in 0..lengths.n {
            self.add_output(first, lengths.clone());
        }
        first
    }

    fn add_output(&mut self, first: SequenceId, lengths: Lengths) {
        let id = SequenceId(self.records.len() as u64 + self.num_refused);
        let identity = Identity { id, first, lengths: lengths.clone() };
        let result = self.scheduler.add(identity.spec(self.now));
        self.check_integrity();
        let fits = lengths.fits(self.scheduler.config());
        assert_eq!(result.is_ok(), fits, "{lengths:?}: {result:?}");
        if fits {
            let launched_len = lengths.prompt_len;
            let (tokens, finish) = (Vec::new(), None);
            self.device.know(identity.clone());
            let max_queue_time = self.scheduler.policy().max_queue_time;
            let record = Record {
                deadline: lengths.deadline(self.now),
                queue_limit: max_queue_time.map(|time| self.now + time),
                has_run: false,
                num_probed: 0,
                lengths,
                identity,
                tokens,
                finish,
                is_aborted: false,
                launched_len,
            };
            self.records.insert(id, record);
        } else {
            self.num_refused += 1;
        }
    }

    /// Ends whoever has lapsed, and nobody else.
    fn expire(&mut self) {
        let due = |record: &Record, lapse| match lapse {
            Lapse::Deadline => record.deadline.is_some_and(|time| time <= self.now),
            Lapse::QueueTime => {
                !record.has_run && record.queue_limit.is_some_and(|time| time <= self.now)
            }
        };
        for (id, lapse) in self.scheduler.expire() {
            let record = self.records.get_mut(&id).expect("only added sequences lapse");
            assert!(!record.has_ended() && due(record, lapse), "sequence {id} lapsed: {lapse:?}");
            record.is_aborted = true;
        }
        for (id, record) in self.records.iter().filter(|(_, record)| !record.has_ended()) {
            let is_due = due(record, Lapse::Deadline) || due(record, Lapse::QueueTime);
            assert!(!is_due, "sequence {id} is over its time");
        }
        self.check_integrity();
    }

    pub(crate) fn abort(&mut self, id: SequenceId) {
        let record = self.records.get_mut(&id).expect("only added sequences are aborted");
        let was_alive = !record.has_ended();
        record.is_aborted |= was_alive;
        assert_eq!(self.scheduler.has_sequence(id), was_alive);
        assert_eq!(self.scheduler.abort(id), was_alive);
        assert!(!self.scheduler.has_sequence(id));
        self.check_integrity();
    }

    fn abort_at(&mut self, moment: Moment, turn: &Turn) {
        for &(_, index) in turn.aborts.iter().filter(|abort| abort.0 == moment) {
            let added: Vec<SequenceId> = self.records.keys().copied().collect();
            if let Some(&id) = added.get(index % added.len().max(1)) {
                self.abort(id);
            }
        }
    }

    fn plan(&mut self) -> Option<Batch> {
        let preemptions_before = self.scheduler.num_preemptions();
        let batch = self.scheduler.plan();
        self.check_integrity();
        self.somebody_joined = false;
        for (&id, record) in self.records.iter_mut().filter(|(_, record)| !record.has_ended()) {
            let runs = !self.scheduler.block_tables(id).first().blocks().is_empty();
            self.somebody_joined |= runs && !record.has_run;
            record.has_run |= runs;
        }
        let num_preempted = self.scheduler.num_preemptions() - preemptions_before;
        self.check_progress(batch.as_ref(), num_preempted);
        if let Some(batch) = &batch {
            self.check_limits(batch);
        }
        batch
    }

    fn launch(&mut self, batch: Batch, turn: &Turn) {
        let staged = batch.rows.iter().map(|row| StagedRow::stage(row, &self.scheduler)).collect();
        self.abort_at(Moment::Launched, turn);
        self.scheduler.advance(&batch);
        self.check_integrity();
        for row in &batch.rows {
            let record = self.records.get_mut(&row.id).expect("rows belong to added ones");
            record.launched_len += usize::from(row.samples);
            record.num_probed = record.num_probed.max(row.context_len);
        }
        self.batches.push(batch.clone());
        self.decisions.push(*self.scheduler.decision());
        self.in_flight.push_back((batch, staged));
        self.abort_at(Moment::Advanced, turn);
    }

    fn collect(&mut self, turn: &Turn) {
        let (batch, staged) = self.in_flight.pop_front().expect("only called with one in flight");
        let outputs = self.device.run(&staged, &batch).to_vec();
        self.scheduler.collect(&batch);
        self.check_integrity();
        assert!(batch.sampled_rows().map(|row| row.id).eq(outputs.iter().map(|output| output.0)));
        for (i, (id, token)) in outputs.into_iter().enumerate() {
            self.commit(id, token);
            if i == 0 {
                self.abort_at(Moment::MidCollect, turn);
            }
        }
        self.scheduler.observe(&batch, step_time(&batch));
    }

    fn commit(&mut self, id: SequenceId, token: u32) {
        let commit = self.scheduler.commit(id, token);
        self.check_integrity();
        let record = self.records.get_mut(&id).expect("rows belong to added sequences");
        let Some(commit) = commit else {
            return assert!(record.has_ended(), "a token of sequence {id} was dropped");
        };
        assert!(!record.has_ended(), "sequence {id} got a token after its end");
        record.tokens.push(commit.token);
        record.finish = commit.finish;
        assert_eq!(commit.token, token);
        assert_eq!(commit.num_generated, record.tokens.len());
        assert_eq!(commit.prompt_len, record.lengths.prompt_len);
        assert_eq!(self.scheduler.has_sequence(id), commit.finish.is_none());
    }

    fn check_integrity(&self) {
        assert_eq!(self.scheduler.num_leaked_blocks(), 0);
        if let Err(violation) = self.scheduler.check_integrity() {
            panic!("{violation}: {:?}", self.scheduler);
        }
    }

    /// Whether sequences sit out for blocks that move, or for a prefix that another one computes.
    fn may_wait(&self) -> bool {
        let memory = &self.scheduler.config().memory;
        let has_outputs = self.records.values().any(|record| record.lengths.n > 1);
        memory.num_swap_blocks > 0 || memory.prefix_caching || has_outputs
    }

    /// Whether a prompt's end that cannot be divided may find no room beside all decodes; then
    /// younger ones stand back.
    fn may_stand_back(&self) -> bool {
        let SchedulerConfig { max_num_batched_tokens, max_num_seqs, .. } = *self.scheduler.config();
        let cuts = self.records.values().filter_map(|record| record.lengths.retention.cut());
        let longest = cuts.map(|cut| cut.num_observed()).max().unwrap_or(1);
        max_num_batched_tokens + 1 < max_num_seqs + longest
    }

    /// There is a batch whenever a sequence still needs one, the oldest such sequence is in it, and
    /// nobody that decodes sits out but those that were preempted.
    fn check_progress(&mut self, batch: Option<&Batch>, num_preempted: u64) {
        let config = self.scheduler.config();
        let oldest = self.records.iter().find(|(_, record)| record.is_incomplete(config));
        let rows: HashSet<SequenceId> =
            batch.iter().flat_map(|batch| &batch.rows).map(|row| row.id).collect();
        let decision = self.scheduler.decision();
        assert_eq!(decision.num_preempted as u64, num_preempted);
        if !self.is_default() {
            // Whoever gave way cannot come back before its token in flight has.
            let may_pause = oldest.is_none() || !self.in_flight.is_empty();
            return assert!(batch.is_some() || may_pause, "nobody has a row: {decision:?}");
        }
        match oldest {
            Some((id, _)) if !rows.contains(id) => {
                // All its blocks leave and come back, so many with a batch.
                let memory = &config.memory;
                let moves = 2 * memory.num_swap_blocks.div_ceil(memory.max_moved_blocks);
                let waits = self.may_wait() && self.num_waited < 100 + moves;
                assert!(waits, "sequence {id}, the oldest, sits out");
                self.num_waited += 1;
            }
            Some(_) => self.num_waited = 0,
            None => assert!(rows.is_empty(), "nobody needs a row"),
        }
        if config.memory.num_swap_blocks > 0 {
            return;
        }
        let Some(previous) = self.batches.last() else { return };
        if self.may_stand_back() {
            return;
        }
        let decodes = |row: &&Row| self.records[&row.id].is_incomplete(config);
        let decoding = previous.sampled_rows().filter(decodes);
        let num_missing = decoding.filter(|row| !rows.contains(&row.id)).count() as u64;
        assert!(num_missing <= num_preempted, "a decode sits out: {batch:?} after {previous:?}");
    }

    /// Limits of a batch, and what a row says of itself.
    fn check_limits(&self, batch: &Batch) {
        let config = self.scheduler.config();
        assert_eq!(batch.num_tokens, batch.rows.iter().map(|row| row.len).sum::<usize>());
        assert!(batch.num_tokens <= config.max_num_batched_tokens);
        assert!(!batch.rows.is_empty() || !batch.moves.is_empty());
        assert!(batch.rows.len() <= config.max_num_seqs);
        let most_moves = config.memory.max_moved_blocks;
        assert!(batch.moves.swap_out.len() <= most_moves);
        // From the host come more, once steps were measured to hide it.
        assert!(batch.moves.swap_in.len() <= 16 * most_moves);
        let num_uncounted: usize = batch.rows.iter().map(|row| row.num_uncounted).sum();
        assert_eq!(num_uncounted, batch.num_uncounted);
        assert!(num_uncounted <= config.max_model_len);
        assert!(batch.num_probes <= config.max_probes());
        assert_eq!(batch.num_sampled(), batch.sampled_rows().count());
        let ids: HashSet<_> = batch.rows.iter().map(|row| row.id).collect();
        let slots: HashSet<_> = batch.rows.iter().map(|row| row.state_slot).collect();
        assert_eq!((ids.len(), slots.len()), (batch.rows.len(), batch.rows.len()));
        self.check_policy(batch);
        for row in &batch.rows {
            let record = &self.records[&row.id];
            assert!(record.is_incomplete(config), "sequence {} needs no row", row.id);
            assert!(row.len > 0 && row.state_slot.index() < config.max_num_seqs);
            assert_eq!(row.prompt_len, record.lengths.prompt_len);
            assert!(row.fresh || row.start > 0, "position 0 is the first");
            let counts = record.lengths.counts_tokens && row.fresh;
            assert_eq!(row.num_uncounted, if counts { row.start } else { 0 });
            assert_eq!(row.samples, row.context_len == record.launched_len);
            let probes = record.lengths.probes_prompt;
            assert!(!probes || row.start <= record.num_probed, "a prompt's token was not computed");
        }
    }

    /// What the policy promises, and what the decision says of the batch.
    fn check_policy(&self, batch: &Batch) {
        let (policy, decision) = (self.scheduler.policy(), self.scheduler.decision());
        let chunks = || batch.rows.iter().filter(|row| row.len > 1);
        // Of a prompt's end that decides over a cut no policy can have less.
        let is_cut = |(i, _): &(usize, &Row)| batch.cuts.iter().any(|cut| cut.row == *i);
        let divisible = batch.rows.iter().enumerate().filter(|row| !is_cut(row));
        let num_prompt_tokens: usize =
            divisible.map(|(_, row)| row.len).filter(|len| *len > 1).sum();
        assert!(num_prompt_tokens <= decision.prefill_limit, "{decision:?}");
        let most = policy.max_batch_prefill_tokens.unwrap_or(usize::MAX);
        assert!(decision.num_chunks == 0 || decision.prefill_limit <= most);
        assert_eq!(decision.num_chunks, chunks().count());
        assert_eq!(decision.num_single + decision.num_chunks, batch.rows.len());
        assert_eq!(decision.batch, batch.number);
        let most_places =
            |row: &Row| self.records[&row.id].lengths.most_places(self.scheduler.config());
        let total: usize = batch.rows.iter().map(most_places).sum();
        assert!(policy.max_batch_total_tokens.is_none_or(|most| total <= most), "{total}");
        if let Batching::Static { batch_size } = policy.batching {
            assert!(batch.rows.len() <= batch_size);
            assert_eq!(self.scheduler.num_preemptions(), 0, "its memory is reserved");
            let has_decoded = |record: &Record| {
                record.is_incomplete(self.scheduler.config())
                    && record.launched_len > record.lengths.prompt_len + 1
            };
            let is_running = self.records.values().any(has_decoded);
            assert!(!(self.somebody_joined && is_running), "a static batch was joined: {batch:?}");
        }
    }

    /// Everything is given back, and every sequence yielded what it must.
    fn check_idle(&self) {
        let config = self.scheduler.config();
        assert_eq!(self.scheduler.num_free_blocks(), config.num_blocks);
        assert_eq!(self.scheduler.num_free_swap_blocks(), config.memory.num_swap_blocks);
        assert_eq!((self.scheduler.num_running(), self.scheduler.num_waiting()), (0, 0));
        for (&id, record) in &self.records {
            let (tokens, finish) = record.identity.expected(config);
            if record.is_aborted {
                assert!(tokens.starts_with(&record.tokens), "sequence {id}: {:?}", record.tokens);
            } else {
                assert_eq!((&record.tokens, record.finish), (&tokens, Some(finish)), "{id}");
            }
        }
    }
}

/// A device of 200 µs a step and 10 µs a token, more or less.
fn step_time(batch: &Batch) -> Duration {
    let noise = u64::from(crate::workload::token_at(SequenceId(batch.number), 0));
    Duration::from_micros(200 + noise + 10 * batch.num_tokens as u64)
}
