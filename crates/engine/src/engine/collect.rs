//! What a batch has yielded: its tokens and probes go to their clients, its time to whoever plans.

use std::sync::atomic::Ordering;

use inflight_backend::{Backend, BackendError};
use inflight_scheduler::{Batch, SequenceId};

use super::{Engine, InFlight};
use crate::{
    EngineError, FinishReason, Pooling, StepRecord, TokenUpdate,
    grammar_workers::Progress,
    io_slot::IoSlotId,
    probes::{self, Probe, Stretch},
};

impl<B: Backend> Engine<B> {
    /// The only place where the host waits for the device.
    pub(super) fn collect(&mut self, flight: InFlight) -> Result<(), EngineError> {
        let InFlight { io, batch, probed, mut record, .. } = flight;
        let wait = |engine: &mut Self| engine.backend.synchronize(&engine.io.get(io).d2h.done);
        let (waited, blocked) = self.timed(wait);
        waited?;
        record.blocked = blocked;
        self.stats.note_progress();
        self.note_step_time(&batch, &record);
        let collect = |engine: &mut Self| {
            engine.collect_probes(io, &probed);
            engine.collect_rows(io, &batch);
        };
        record.collect = self.timed(collect).1;
        self.meter(io, &batch)?;
        Ok(self.clock.send(&self.backend, self.io.get(io), record)?)
    }

    /// Tells the scheduler how long the step took, as its sequences felt it.
    fn note_step_time(&mut self, batch: &Batch, record: &StepRecord) {
        let (launched, end) = (record.stage.start, record.blocked.end);
        let took = end.saturating_sub(self.last_step_end.max(launched));
        self.scheduler.observe(batch, took);
        self.last_step_end = end;
    }

    /// Learns what a batch's moves and prompts cost the device, where that decides how sequences
    /// give way.
    fn meter(&mut self, io: IoSlotId, batch: &Batch) -> Result<(), BackendError> {
        if self.config.memory.num_swap_blocks > 0 {
            self.costs.note(&self.backend, self.io.get(io), batch)?;
            self.costs.costs().into_iter().for_each(|costs| self.scheduler.set_costs(costs));
        }
        Ok(())
    }

    /// Moves some blocks, which hold nothing yet, there and back, so that their cost is known
    /// before the first sequence has to give way.
    pub(super) fn measure_moves(&mut self) -> Result<(), BackendError> {
        let memory = &self.config.memory;
        let num = memory.max_moved_blocks.min(memory.num_swap_blocks).min(self.config.num_blocks);
        let (id, streams) = (self.io.ids()[0], &self.streams);
        let streams = [&streams.h2d, &streams.d2h];
        let moves = self.mover.try_moves(&self.backend, num, self.io.get(id), streams)?;
        self.meter(id, &Batch { moves, ..Batch::new(0) })
    }

    fn collect_rows(&mut self, io: IoSlotId, batch: &Batch) {
        self.scheduler.collect(batch);
        for (row, planned) in batch.sampled_rows().enumerate() {
            let id = planned.id;
            if !self.scheduler.has_sequence(id) {
                continue; // a stray row of a sequence that ended, or was aborted
            }
            let update = self.read_update(io, row, id);
            let token = update.token;
            if !self.requests.get_mut(id).allows(token) {
                let reason = "no token that the grammar allows has a finite logit".to_owned();
                self.end(id, FinishReason::Failed(reason));
                continue;
            }
            let Some(commit) = self.scheduler.commit(id, update.token) else { continue };
            let delivered = if let Some(pooling) = self.requests.get_mut(id).pooling {
                let state = self.pooled(pooling, id, (io, row));
                self.requests.get_mut(id).client.send_state(state)
            } else {
                self.stats.num_generated_tokens.fetch_add(1, Ordering::Relaxed);
                self.requests.get_mut(id).client.send(update)
            };
            match (delivered, commit.finish) {
                (Err(_), _) => self.end(id, FinishReason::Aborted),
                (Ok(()), Some(reason)) => self.requests.finish(id, reason.into()),
                (Ok(()), None) => self.follow_grammar(id, token),
            }
        }
    }

    /// Hands on what probes have found of prompts; before the tokens that the batch yields.
    fn collect_probes(&mut self, io: IoSlotId, probed: &[Stretch]) {
        let (at, slot) = (self.outputs, self.io.get(io));
        let mut gone = Vec::new();
        for &stretch in probed {
            let Some(request) = self.requests.find(stretch.id) else { continue };
            let Some(probe) = &mut request.probe else { continue };
            if let Some(num_top) = probe.num_top() {
                let tokens = self.backend.read_host(&slot.host_probe_outputs, |words| {
                    probes::read_logprobs(words, at, stretch, num_top)
                });
                if request.client.send_prompt(tokens).is_err() {
                    gone.push(stretch.id);
                }
                continue;
            }
            for row in stretch.first_row..stretch.first_row + stretch.len {
                probe.add_state(&self.runner.read_probe_state(&self.backend, slot, row));
            }
        }
        gone.into_iter().for_each(|id| self.end(id, FinishReason::Aborted));
    }

    /// The state that a request asked for, now that its prompt is computed; at a sampled row.
    fn pooled(&mut self, pooling: Pooling, id: SequenceId, at: (IoSlotId, usize)) -> Vec<f32> {
        match pooling {
            Pooling::LastToken => self.runner.read_state(&self.backend, self.io.get(at.0), at.1),
            Pooling::Mean => {
                let probe = self.requests.get_mut(id).probe.as_ref();
                probe.map_or_else(Vec::new, Probe::mean_state)
            }
        }
    }

    /// Has a worker find out what may come after `token`.
    fn follow_grammar(&mut self, id: SequenceId, token: u32) {
        let request = self.requests.get_mut(id);
        if let Some(Progress::Known(next)) = request.grammar.take() {
            request.grammar = Some(self.grammars.advance(id, next, token));
        }
    }

    fn read_update(&mut self, io: IoSlotId, row: usize, id: SequenceId) -> TokenUpdate {
        let at = self.outputs;
        let asked = self.requests.get_mut(id).sampling.top_logprobs;
        let num_top = asked.unwrap_or(0) as usize;
        let num_cached_tokens = self.scheduler.num_cached_tokens(id);
        self.backend.read_host(&self.io.get(io).host_outputs, |words| {
            let ids = &words[at.top_ids(row)][..num_top];
            let logprobs = &words[at.top_logprobs(row)][..num_top];
            let pairs = ids.iter().zip(logprobs).map(|(id, bits)| (*id, f32::from_bits(*bits)));
            TokenUpdate {
                token: words[at.token(row)],
                logprob: asked.map(|_| f32::from_bits(words[at.logprob(row)])),
                top_logprobs: pairs.collect(),
                num_cached_tokens,
            }
        })
    }
}
