//! The engine thread.

mod collect;
mod outside;
mod score;

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc::{self, Receiver, TryRecvError},
    },
    time::Duration,
};

use inflight_backend::{
    Backend, BackendError, HistoryInputs, LateWriter, OutputLayout, PrefixRule, SamplingRow,
    StepInputs, StepShape,
};
use inflight_kv_cache::PrefixKey;
use inflight_model::Decoder;
use inflight_scheduler::{Batch, Moves, SequenceId, SequenceSpec, Service, record::Recorded};

pub use score::Scores;
pub(crate) use score::told;

use crate::{
    EngineConfig, EngineError, EngineHandle, EngineSnapshot, EngineStats, FinishReason, Pooling,
    RequestId, StepRecord,
    black_box::BlackBox,
    block_mover::{BlockMover, CostMeter},
    file_tier::FileTier,
    grammar_workers::GrammarWorkers,
    handle::{Command, Submission},
    io_slot::{IoSlotId, IoSlots},
    late,
    live_requests::{LiveRequest, LiveRequests},
    probes::{Probe, ProbeInputs, Probing, Stretch},
    runner::{self, ModelRunner, StepSlots},
    staging::{self, Staged},
    trace::TraceClock,
};

/// Sole owner of scheduler, IO slots and streams. Nothing is locked.
pub struct Engine<B: Backend> {
    pub(crate) backend: B,
    config: EngineConfig,
    inbox: Receiver<Command>,
    draining: bool,
    pub(crate) scheduler: BlackBox,
    requests: LiveRequests,
    grammars: GrammarWorkers,
    runner: ModelRunner<B>,
    pub(crate) mover: BlockMover<B>,
    costs: CostMeter,
    pub(crate) files: Option<FileTier>,
    streams: Streams<B>,
    io: IoSlots<B>,
    /// Launched and not yet collected, oldest first: at most two.
    in_flight: VecDeque<InFlight>,
    inputs: StepInputs,
    /// When the device is told of prefixes that rows share.
    prefix_rule: Option<PrefixRule>,
    history: HistoryInputs,
    probes: ProbeInputs,
    outputs: OutputLayout,
    clock: TraceClock<B>,
    /// When the latest step ended: the host had its outputs.
    last_step_end: Duration,
    stats: Arc<EngineStats>,
}

/// The three streams. Events order them; the default stream is never used.
struct Streams<B: Backend> {
    h2d: B::Stream,
    compute: B::Stream,
    d2h: B::Stream,
}

/// A batch that the device has and the host has not collected.
struct InFlight {
    io: IoSlotId,
    batch: Batch,
    draw: Draw,
    /// Sequences whose rows cannot be drawn before the token before is known: sampling is enqueued
    /// when it is.
    late: Vec<SequenceId>,
    /// Whose prompts' tokens it tells of.
    probed: Vec<Stretch>,
    is_drawn: bool,
    record: StepRecord,
}

/// How a batch's tokens are drawn and brought back.
#[derive(Clone, Copy)]
struct Draw {
    step: StepShape,
    /// Some row has a rule that looks at the whole distribution.
    is_unusual: bool,
    num_output_words: usize,
    probing: Probing,
}

impl<B: Backend> Engine<B> {
    /// Allocates every buffer that steps need. Later only preparing allocates, in
    /// [`Engine::prepare`] or while idle: graphs, and operands to try products with.
    ///
    /// # Errors
    /// [`EngineError`] if the limits do not work together or memory does not suffice.
    pub fn new(
        backend: B,
        decoder: Decoder<B>,
        config: EngineConfig,
    ) -> Result<(Self, EngineHandle), EngineError> {
        let scheduler = BlackBox::new(Recorded::new(config.scheduler(decoder.groups()))?);
        let (commands, inbox) = mpsc::sync_channel(4 * config.max_outstanding + 16);
        let stats = Arc::new(EngineStats::default());
        let streams = Streams {
            h2d: backend.create_stream("h2d")?,
            compute: backend.create_stream("compute")?,
            d2h: backend.create_stream("d2h")?,
        };
        let clock = TraceClock::start(&backend, &streams.compute)?;
        let handle = EngineHandle {
            commands,
            limits: config.limits(decoder.config(), backend.cuts_prompts()),
            outstanding: Arc::new(AtomicUsize::new(0)),
            max_outstanding: config.max_outstanding,
            next_id: Arc::new(AtomicU64::new(0)),
            stats: Arc::clone(&stats),
            clock: clock.clock().clone(),
        };
        let model = decoder.config().clone();
        let num_more_groups = decoder.groups().other_windows().len();
        let runner = ModelRunner::new(&backend, decoder, &config)?;
        let kv = runner.kv_blocks(&backend);
        // Groups of layers keep different blocks of one context.
        let prefix_rule = backend.prefix_rule(model.attention_shape(config.block_size));
        let prefix_rule = prefix_rule.filter(|_| num_more_groups == 0);
        let mut engine = Self {
            prefix_rule,
            mover: BlockMover::new(&backend, kv, config.memory.num_swap_blocks)?,
            costs: CostMeter::default(),
            files: None,
            grammars: GrammarWorkers::start(model.vocab_size)?,
            runner,
            io: IoSlots::new(&backend, &config, &model)?,
            clock,
            outputs: OutputLayout { max_rows: config.output_rows() },
            backend,
            config,
            inbox,
            draining: false,
            scheduler,
            requests: LiveRequests::default(),
            streams,
            in_flight: VecDeque::with_capacity(2),
            last_step_end: Duration::ZERO,
            inputs: StepInputs::of_groups(num_more_groups),
            history: HistoryInputs::default(),
            probes: ProbeInputs::default(),
            stats,
        };
        engine.measure_moves()?;
        engine.stats.memory.begin(engine.mover.block_bytes(), engine.config.memory.num_swap_blocks);
        let shares = engine.prefix_rule.is_some();
        engine.runner.plan_preparations(&engine.backend, &engine.io.ids(), shares);
        engine.publish_stats();
        Ok((engine, handle))
    }

    /// Has the device prepare for every shape of step now. Otherwise it does so while it is idle,
    /// and at the latest when a step needs it.
    ///
    /// # Errors
    /// [`EngineError::Backend`] if the device is lost.
    pub fn prepare(&mut self) -> Result<(), EngineError> {
        while self.prepare_next()? {}
        Ok(())
    }

    /// Serves until told to drain, or until every handle is gone.
    ///
    /// # Errors
    /// [`EngineError::Backend`] if the device is lost; every request has had its final message.
    pub fn run(mut self) -> Result<(), EngineError> {
        let result = self.serve();
        if let Err(error) = &result {
            self.fail(error);
        }
        result
    }

    fn serve(&mut self) -> Result<(), EngineError> {
        loop {
            if self.is_idle() && !self.scheduler.has_cold_blocks() {
                if self.draining {
                    while self.write_files()? {}
                    return Ok(());
                }
                match self.next_command()? {
                    Some(command) => self.apply(command),
                    None => return Ok(()),
                }
            }
            self.step()?;
        }
    }

    /// Waits for a command and prepares the device meanwhile. `None`: every handle is gone.
    fn next_command(&mut self) -> Result<Option<Command>, EngineError> {
        loop {
            match self.inbox.try_recv() {
                Ok(command) => return Ok(Some(command)),
                Err(TryRecvError::Disconnected) => return Ok(None),
                Err(TryRecvError::Empty) => {}
            }
            if !self.prepare_next()? && !self.write_files()? {
                return Ok(self.inbox.recv().ok());
            }
        }
    }

    fn prepare_next(&mut self) -> Result<bool, EngineError> {
        Ok(self.runner.prepare_next(&self.backend, &self.io, &self.streams.compute)?)
    }

    /// Whether there is nothing to do until somebody asks for something.
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_idle() && self.in_flight.is_empty()
    }

    /// One turn: while the device computes batch N, build and enqueue N+1, then collect N.
    ///
    /// ```text
    /// host     admit  plan N+1  stage N+1     collect N    admit  plan N+2 ...
    /// h2d                            [N+1]
    /// compute  ------------ N -----------------|------------ N+1 ------------
    /// d2h                                       [N]
    /// ```
    ///
    /// [`Engine::run`] does this over and over; a simulation looks at the scheduler in between.
    ///
    /// # Errors
    /// [`EngineError::Backend`] if the device is lost: [`Engine::fail`] is to follow.
    pub fn step(&mut self) -> Result<(), EngineError> {
        self.exchange_files(false)?;
        let ((), admit) = self.timed(Self::admit);
        let (batch, plan) = self.timed(|engine| engine.scheduler.plan());
        let decision = *self.scheduler.decision();
        let record = StepRecord { admit, plan, decision, ..StepRecord::default() };
        let mut keep = 0; // nothing to overlap with: drain
        if let Some(batch) = batch {
            let flight = self.launch(batch, record)?;
            self.in_flight.push_back(flight);
            keep = usize::from(self.config.overlap); // overlap off: the same loop, depth one
        } else {
            let stuck = self.in_flight.is_empty() && !self.scheduler.is_idle();
            assert!(!stuck || self.scheduler.waits_for_file(), "work that can never be planned");
            self.exchange_files(stuck)?;
        }
        self.draw_if_due()?;
        while self.in_flight.len() > keep {
            let oldest = self.in_flight.pop_front().expect("length was just checked");
            self.collect(oldest)?;
            self.draw_if_due()?;
        }
        self.publish_stats();
        Ok(())
    }

    /// Inbox to waiting queue, aborts, deadlines; never blocks.
    fn admit(&mut self) {
        self.scheduler.set_now(self.clock.now());
        while let Ok(command) = self.inbox.try_recv() {
            self.apply(command);
        }
        for (id, lapse) in self.scheduler.expire() {
            self.requests.finish(id, FinishReason::Lapsed(lapse));
        }
    }

    fn apply(&mut self, command: Command) {
        match command {
            Command::Submit(submission) => self.accept(*submission),
            Command::Abort(RequestId(id)) => self.end(SequenceId(id), FinishReason::Aborted),
            Command::Tune(tuning) => {
                let tuned = self.scheduler.set_policy(tuning.policy);
                tuned.expect("experiments use policies that work");
                self.config.overlap = tuning.overlap;
            }
            Command::Inspect(client) => {
                // Whoever asked may have gone.
                let _ = client.try_send(EngineSnapshot::of(&self.scheduler));
            }
            Command::Record(client) => {
                let _ = client.try_send(self.scheduler.record());
            }
            Command::Drain => self.draining = true,
        }
    }

    fn accept(&mut self, submission: Submission) {
        let id = SequenceId(submission.id.0);
        let submitted = self.clock.at(submission.submitted);
        self.scheduler.set_now(self.clock.now());
        let (spec, max_tokens, retention) = submission.request.into_spec();
        let probe = match (spec.prompt_logprobs, spec.pooling) {
            (Some(num_top), _) => Some(Probe::logprobs(num_top)),
            (None, Some(Pooling::Mean)) => Some(Probe::mean()),
            (None, _) => None,
        };
        let sequence = SequenceSpec {
            probes_prompt: probe.is_some(),
            max_tokens,
            min_tokens: spec.min_tokens,
            stop_token_ids: spec.stop_token_ids.clone(),
            counts_tokens: spec.sampling.needs_token_counts(),
            service: Service {
                priority: spec.priority,
                tenant: spec.tenant,
                deadline: spec.timeout.map(|timeout| submitted.saturating_add(timeout)),
            },
            prefix_key: PrefixKey { salt: spec.cache_salt.map(Into::into), ..PrefixKey::default() },
            shares_prompt_of: spec.shares_prompt_of.map(|leader| SequenceId(leader.0)),
            retention,
            ..SequenceSpec::new(id, spec.prompt)
        };
        if let Err(error) = self.scheduler.add(sequence) {
            return submission.client.finish(FinishReason::Failed(error.to_string()));
        }
        self.clock.note_accepted(submission.id, submitted);
        let request = LiveRequest {
            client: submission.client,
            sampling: spec.sampling,
            min_tokens: spec.min_tokens,
            stop_token_ids: spec.stop_token_ids,
            grammar: spec.grammar.map(|grammar| self.grammars.begin(id, grammar)),
            pooling: spec.pooling,
            probe,
            output_row: None,
        };
        self.requests.insert(id, request);
    }

    /// Ends a sequence before its time, in any phase: what it holds is free at once, and what the
    /// device still computes for it is dropped at collection.
    fn end(&mut self, id: SequenceId, reason: FinishReason) {
        self.scheduler.abort(id);
        self.requests.finish(id, reason);
    }

    /// Stages in the free IO slot and enqueues h2d, compute and d2h, or of the latter two what need
    /// not wait for late inputs. Returns without waiting.
    fn launch(&mut self, batch: Batch, mut record: StepRecord) -> Result<InFlight, EngineError> {
        let id = self.io.advance(); // free: the batch before the latest was collected
        let ((step, late), stage) = self.timed(|engine| engine.stage(id, &batch));
        let draw = Draw {
            step,
            is_unusual: self.inputs.sampling.iter().any(SamplingRow::is_unusual),
            num_output_words: self.num_output_words(),
            probing: self.probes.probing(),
        };
        let probed = self.probes.stretches.clone();
        let is_drawn = late.is_empty();
        let pools = batch
            .sampled_rows()
            .any(|row| self.requests.get_mut(row.id).pooling == Some(Pooling::LastToken));
        let (enqueued, launch) = self.timed(|engine| {
            engine.enqueue_forward(id, step, &batch)?;
            if pools {
                engine.enqueue_states(id, step)?;
            }
            if is_drawn {
                return engine.enqueue_draw(id, draw, &batch.moves);
            }
            engine.backend.record(&engine.io.get(id).forward_done, &engine.streams.compute)
        });
        enqueued?;
        self.scheduler.advance(&batch); // lengths move now, token values in `collect`
        record.batch = batch.number;
        (record.num_rows, record.num_tokens) = (step.num_rows, step.num_tokens);
        record.num_sampled = step.num_sampled;
        (record.stage, record.launch) = (stage, launch);
        (record.launched_as, record.allocated) = self.runner.last_launch();
        self.clock.note_rows(&mut record, &batch);
        let computed = step.num_tokens as u64;
        self.stats.num_steps.fetch_add(1, Ordering::Relaxed);
        self.stats.note_progress();
        self.stats.num_computed_tokens.fetch_add(computed, Ordering::Relaxed);
        let spared = self.inputs.prefixes.num_spared_tokens() as u64;
        self.stats.num_cascaded_tokens.fetch_add(spared, Ordering::Relaxed);
        Ok(InFlight { io: id, batch, draw, late, probed, is_drawn, record })
    }

    /// Gives the sequences whose rows are late, too.
    fn stage(&mut self, id: IoSlotId, batch: &Batch) -> (StepShape, Vec<SequenceId>) {
        let Self { inputs, history, probes, .. } = self;
        let into = Staged { inputs, history, probes };
        let late = staging::stage(batch, &self.scheduler, &mut self.requests, into);
        if let Some(rule) = self.prefix_rule {
            self.inputs.find_prefixes(rule, self.config.block_size);
        }
        let io = self.io.get_mut(id);
        if !self.probes.stretches.is_empty() {
            self.backend.write_host(&mut io.host_probes, |words| self.probes.inputs.pack(words));
        }
        self.backend.write_host(&mut io.host_history, |words| self.history.pack(words));
        (self.backend.write_host(&mut io.host_inputs, |words| self.inputs.pack(words)), late)
    }

    fn enqueue_forward(
        &mut self,
        id: IoSlotId,
        step: StepShape,
        batch: &Batch,
    ) -> Result<(), BackendError> {
        let moves = &batch.moves;
        if let Some(checks) = &mut self.mover.checks {
            checks.look_at(batch, &self.scheduler);
        }
        let (backend, io, streams) = (&self.backend, self.io.get(id), &self.streams);
        let (previous, history) = (self.io.before(id), self.history.shape());
        backend.record(&io.h2d.started, &streams.h2d)?;
        let num_words = step.num_words();
        backend.copy_to_device(&io.host_inputs, &io.device_inputs, num_words, &streams.h2d)?;
        if history.num_rows > 0 {
            let (host, device) = (&io.host_history, &io.device_history);
            backend.copy_to_device(host, device, history.num_words(), &streams.h2d)?;
        }
        if !self.probes.stretches.is_empty() {
            let (host, device) = (&io.host_probes, &io.device_probes);
            let num_words = self.probes.inputs.shape().num_words();
            backend.copy_to_device(host, device, num_words, &streams.h2d)?;
        }
        backend.record(&io.h2d.done, &streams.h2d)?;
        if !moves.swap_in.is_empty() {
            // For rows of the next batch, over blocks that the previous one may still use.
            backend.wait(&previous.compute.done, &streams.h2d)?;
            self.mover.swap_in(backend, moves, &io.swap_in, &streams.h2d)?;
        }
        if !moves.swap_out.is_empty() {
            // The stream has waited for the previous batch's outputs, and so for all it computed.
            self.mover.swap_out(backend, moves, &io.swap_out, &streams.d2h)?;
        }

        backend.wait(&io.h2d.done, &streams.compute)?;
        backend.record(&io.compute.started, &streams.compute)?;
        self.mover.verify(backend, &streams.compute)?;
        self.mover.copy(backend, moves, &streams.compute)?;
        self.runner.turn_blocks(backend, &batch.turns, &streams.compute)?;
        self.runner.count_history(backend, io, history, &streams.compute)?;
        let cuts = runner::cuts(batch);
        let has_probes = !self.probes.stretches.is_empty();
        let slots = StepSlots { id, io, previous, cuts: &cuts, has_probes };
        self.runner.forward(backend, &slots, step, &streams.compute)?;
        self.mover.note(backend, &streams.compute)
    }

    fn enqueue_states(&self, id: IoSlotId, step: StepShape) -> Result<(), BackendError> {
        let compute = &self.streams.compute;
        self.runner.copy_states(&self.backend, self.io.get(id), step, compute)
    }

    fn enqueue_draw(
        &mut self,
        id: IoSlotId,
        draw: Draw,
        moves: &Moves,
    ) -> Result<(), BackendError> {
        let Draw { step, is_unusual, num_output_words, probing } = draw;
        let (backend, io, streams) = (&self.backend, self.io.get(id), &self.streams);
        let slots =
            StepSlots { id, io, previous: self.io.before(id), cuts: &[], has_probes: false };
        self.runner.sample(backend, &slots, step, is_unusual, &streams.compute)?;
        if probing.shape.num_sampled > 0 {
            self.runner.probe(backend, &slots, probing, &streams.compute)?;
        }
        backend.record(&io.compute.done, &streams.compute)?;

        backend.wait(&io.compute.done, &streams.d2h)?;
        backend.record(&io.d2h.started, &streams.d2h)?;
        let (outputs, host) = (&io.device_outputs, &io.host_outputs);
        backend.copy_to_host(outputs, host, num_output_words, &streams.d2h)?;
        if probing.wants_logprobs {
            let (outputs, host) = (&io.device_probe_outputs, &io.host_probe_outputs);
            backend.copy_to_host(outputs, host, self.outputs.num_words(), &streams.d2h)?;
        }
        if !moves.swap_in.is_empty() {
            // What is collected is done: the moves on this stream, and those on the other.
            backend.wait(&io.swap_in.done, &streams.d2h)?;
        }
        backend.record(&io.d2h.done, &streams.d2h)
    }

    /// Enqueues the sampling of the one batch in flight if it waits for late inputs: with all
    /// batches before it collected, the tokens that they depend on are known. The device computes
    /// its forward pass meanwhile.
    fn draw_if_due(&mut self) -> Result<(), EngineError> {
        if self.in_flight.len() != 1 || self.in_flight[0].is_drawn {
            return Ok(());
        }
        let mut flight = self.in_flight.pop_front().expect("there is one");
        let (drawn, late) = self.timed(|engine| engine.draw_late(&flight));
        drawn?;
        flight.record.late = late;
        flight.is_drawn = true;
        self.in_flight.push_back(flight);
        Ok(())
    }

    fn draw_late(&mut self, flight: &InFlight) -> Result<(), BackendError> {
        let (id, late) = (flight.io, &flight.late[..]);
        let ended = late::settle(late, &self.scheduler, &mut self.requests, &self.grammars);
        for (sequence, reason) in ended {
            self.end(sequence, reason);
        }
        let Self { backend, io, scheduler, requests, streams, .. } = self;
        let num_words = backend.write_host(&mut io.get_mut(id).host_late, |words| {
            let mut writer = LateWriter::new(words, late.len());
            late::write(late, scheduler, requests, &mut writer);
            writer.num_words()
        });
        let slot = io.get(id);
        backend.copy_to_device(&slot.host_late, &slot.device_late, num_words, &streams.h2d)?;
        backend.record(&slot.late_ready, &streams.h2d)?;
        backend.wait(&slot.late_ready, &streams.compute)?;
        self.enqueue_draw(id, flight.draw, &flight.batch.moves)
    }

    /// Tokens and their logprobs always; the likeliest tokens only if some row asked for them.
    fn num_output_words(&self) -> usize {
        let asked = |row: &SamplingRow| row.top_logprobs.is_some_and(|n| n > 0);
        if self.inputs.sampling.iter().any(asked) {
            self.outputs.num_words()
        } else {
            self.outputs.num_token_words()
        }
    }

    fn timed<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> (T, crate::Span) {
        let start = self.clock.now();
        let result = work(self);
        (result, crate::Span { start, end: self.clock.now() })
    }

    fn publish_stats(&self) {
        self.stats.publish(&self.scheduler, self.mover.num_moved);
    }
}
