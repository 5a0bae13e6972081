//! Conditions that a policy sets for joining, beside room.

use crate::SequenceId;
use crate::decision::HeldBack;
use crate::policy::{Batching, Mixing};
use crate::scheduler::Scheduler;
use crate::sequence::Sequence;
use crate::step_model::StepLoad;

/// What one plan's admissions are held to. Sums over running sequences are made once a plan, and
/// only if something asks for them.
#[derive(Debug)]
pub(crate) struct Terms {
    gate_is_open: bool,
    /// Tokens that running sequences may come to have.
    total_tokens: usize,
    /// Blocks that they may come to hold.
    total_blocks: usize,
    /// One decode of every running sequence.
    decodes: StepLoad,
    num_rows: usize,
}

impl Terms {
    pub(crate) fn new(scheduler: &Scheduler) -> Self {
        let policy = &scheduler.policy;
        let mut terms = Self {
            gate_is_open: policy.mixing == Mixing::DecodeFirst || scheduler.is_gate_open(),
            total_tokens: 0,
            total_blocks: 0,
            decodes: StepLoad::default(),
            num_rows: 0,
        };
        let is_static = matches!(policy.batching, Batching::Static { .. });
        let is_asked = policy.max_batch_total_tokens.is_some() || policy.targets.itl.is_some();
        if is_static || is_asked {
            for &id in &scheduler.running {
                terms.count(scheduler.sequence(id), scheduler);
            }
        }
        terms
    }

    /// Whether the policy lets a waiting sequence join.
    pub(crate) fn check(&self, id: SequenceId, scheduler: &mut Scheduler) -> Result<(), HeldBack> {
        let sequence = scheduler.sequence(id);
        let (len, has_run) = (sequence.len(), sequence.has_run);
        let total_tokens = self.total_tokens + scheduler.most_tokens(sequence);
        let total_blocks = self.total_blocks + scheduler.most_blocks_ever(sequence);
        if let Batching::Static { batch_size } = scheduler.policy.batching {
            let (num_members, is_closed) = scheduler.static_batch;
            if is_closed || num_members >= batch_size {
                return Err(HeldBack::StaticBatch);
            }
            if total_blocks > scheduler.config.num_blocks {
                return Err(HeldBack::TotalTokens);
            }
        }
        // Who ran before has waited already.
        if !self.gate_is_open && !has_run {
            return Err(HeldBack::Gate);
        }
        // One alone has no more tokens than that, though it may reserve more places.
        let most_tokens = scheduler.policy.max_batch_total_tokens;
        if self.num_rows > 0 && most_tokens.is_some_and(|most| total_tokens > most) {
            return Err(HeldBack::TotalTokens);
        }
        if let Some(target) = scheduler.policy.targets.itl
            && self.num_rows > 0
            && !scheduler.control.has_room_for_row(target, &self.decodes, len)
        {
            return Err(HeldBack::ItlTarget);
        }
        Ok(())
    }

    /// Counts a sequence that joins.
    pub(crate) fn join(&mut self, id: SequenceId, scheduler: &mut Scheduler) {
        scheduler.static_batch.0 += 1;
        self.count(scheduler.sequence(id), scheduler);
    }

    fn count(&mut self, sequence: &Sequence, scheduler: &Scheduler) {
        self.total_tokens += scheduler.most_tokens(sequence);
        self.total_blocks += scheduler.most_blocks_ever(sequence);
        self.decodes.add_row(sequence.len(), 1, true);
        self.num_rows += 1;
    }
}

impl Scheduler {
    /// Whether waiting prompts may hold up decodes now.
    pub(crate) fn is_gate_open(&self) -> bool {
        let gate = self.policy.gate;
        if gate.waiting_served_ratio == 0.0 || self.running.is_empty() {
            return true;
        }
        let max_steps = gate.max_waiting_tokens;
        if max_steps > 0 && self.steps_without_prompt >= max_steps {
            return true;
        }
        let is_decode = |id: &&SequenceId| self.sequence(**id).num_uncomputed() == 1;
        let num_decodes = self.running.iter().filter(is_decode).count();
        let num_prompts = self.waiting.len() + self.running.len() - num_decodes;
        let wanted = (num_decodes as f64 * gate.waiting_served_ratio).floor();
        num_prompts as f64 >= wanted || self.is_first_token_pressing()
    }

    /// Whether whoever is next has spent half of the time that its first token may take.
    fn is_first_token_pressing(&self) -> bool {
        let Some(target) = self.policy.targets.ttft else { return false };
        let waited =
            self.next_to_admit().map(|id| self.now.saturating_sub(self.sequence(id).arrived_at));
        waited.is_some_and(|waited| waited >= target / 2)
    }

    /// Tokens that a sequence may come to hold in the KV cache: whole blocks where they are
    /// reserved, as in a static batch. Its last token is never an input and needs no place.
    fn most_tokens(&self, sequence: &Sequence) -> usize {
        let (num_places, block_size) = (sequence.final_len - 1, self.config.block_size);
        let places_held = self.most_blocks_ever(sequence) * block_size;
        match self.policy.batching {
            Batching::Continuous => num_places.min(places_held),
            Batching::Static { .. } => num_places.next_multiple_of(block_size).min(places_held),
        }
    }

    /// Blocks that a sequence may come to hold, of all layer groups.
    fn most_blocks_ever(&self, sequence: &Sequence) -> usize {
        self.most_blocks(sequence, sequence.final_len - 1)
    }
}
