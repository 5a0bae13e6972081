//! Chooses the rows of the next batch: who decodes, who prefills, who is admitted, who gives way.
//!
//! ```text
//!   token budget  [ one token each: decodes | chunks of running prefills | chunks of admitted ]
//!   blocks          grow, newest gives way    reserved at admission        all or not admitted
//! ```
//!
//! Admission takes blocks for all tokens that a sequence has, so that only decodes ever ask for
//! more, at most one block each, and a prefill once begun is never stuck half way.

use inflight_kv_cache::blocks_for;

use crate::batch::{Batch, Row, RowInputs};
use crate::scheduler::Scheduler;
use crate::sequence::Phase;
use crate::{SequenceId, StateSlot};

impl Scheduler {
    /// Plans the next batch; `None` when there is nothing to do until more is added or committed.
    ///
    /// The plan counts only once it is launched: until [`advance`](Self::advance) is called with
    /// it, another call makes a new plan in its place.
    pub fn plan(&mut self) -> Option<Batch> {
        let mut batch = Batch { number: self.planned + 1, rows: Vec::new(), num_tokens: 0 };
        self.plan_single_tokens(&mut batch);
        self.plan_prefills(&mut batch);
        self.plan_admissions(&mut batch);
        if batch.rows.is_empty() {
            return None;
        }
        self.planned = batch.number;
        Some(batch)
    }

    /// A row for every running sequence that needs one more token: all decodes, and prefills at
    /// their last token. The budget always has room for them, since it is not below `max_num_seqs`.
    fn plan_single_tokens(&mut self, batch: &mut Batch) {
        // The list shrinks from its end while victims give way, so it is indexed afresh each time.
        let mut i = 0;
        while let Some(&id) = self.running.get(i) {
            if self.sequence(id).num_uncomputed() == 1 && self.make_room(id) {
                self.push_row(id, 1, batch);
            }
            i += 1;
        }
    }

    /// Chunks for the running sequences that are further behind, the oldest first, as the budget
    /// lasts. Their blocks were reserved at admission.
    fn plan_prefills(&mut self, batch: &mut Batch) {
        for i in 0..self.running.len() {
            let id = self.running[i];
            let len = self.sequence(id).num_uncomputed().min(self.budget_left(batch));
            if len == 0 {
                return;
            }
            if self.sequence(id).num_uncomputed() > 1 {
                self.push_row(id, len, batch);
            }
        }
    }

    /// First chunks for sequences from the front of the queue, while slots, blocks and budget last.
    /// Nobody overtakes: if the first cannot be admitted, the others wait behind it.
    fn plan_admissions(&mut self, batch: &mut Batch) {
        if self.waiting.is_empty() || self.budget_left(batch) == 0 {
            return;
        }
        let mut num_growing = self.running.iter().filter(|&&id| self.can_grow(id)).count();
        while let Some(&id) = self.waiting.front()
            && self.budget_left(batch) > 0
            && self.has_room_for(id, num_growing)
            && let Some(slot) = self.state_slots.allocate()
        {
            self.admit(id, slot);
            num_growing += usize::from(self.can_grow(id));
            let len = self.sequence(id).num_uncomputed().min(self.budget_left(batch));
            self.push_row(id, len, batch);
        }
    }

    /// Whether a waiting sequence can be admitted beside running ones of which `num_growing` may
    /// still need another block.
    ///
    /// There must be blocks for all tokens that it has, and then one for each that may need one,
    /// itself included. Without that margin the next decode in need of a block would throw the
    /// newcomer out again. A lone sequence always passes, since its margin is part of what
    /// [`check_fits`](Self::check_fits) found to fit.
    fn has_room_for(&self, id: SequenceId, num_growing: usize) -> bool {
        let sequence = self.sequence(id);
        let num_blocks = blocks_for(sequence.len(), self.config.block_size);
        let own_margin = sequence.outgrows(num_blocks * self.config.block_size);
        let needed = num_blocks + num_growing + usize::from(own_margin);
        // While a token of it is in flight, its input is not known to the host.
        sequence.num_pending == 0 && needed <= self.pool.num_free()
    }

    /// Whether a running sequence may still need another block.
    fn can_grow(&self, id: SequenceId) -> bool {
        let sequence = self.sequence(id);
        sequence.outgrows(sequence.table.capacity())
    }

    /// Moves the first waiting sequence to the running ones and reserves blocks for its tokens.
    fn admit(&mut self, id: SequenceId, slot: StateSlot) {
        self.waiting.pop_front();
        self.running.push(id);
        let sequence = self.sequences.get_mut(&id).expect("waiting sequences have a record");
        sequence.phase = Phase::Running(slot);
        sequence.is_fresh = true;
        let num_tokens = sequence.len();
        let grown = sequence.table.grow_to(num_tokens, &mut self.pool);
        grown.expect("admission checked that the blocks are free");
    }

    /// Gives a running sequence the block that its next token needs, if need be at the cost of
    /// newer ones. False when it is the newest itself and had to give way.
    fn make_room(&mut self, id: SequenceId) -> bool {
        loop {
            let sequence = self.sequences.get_mut(&id).expect("running sequences have a record");
            if sequence.table.grow_to(sequence.num_computed + 1, &mut self.pool).is_ok() {
                return true;
            }
            assert!(self.running.len() > 1, "sequence {id} was admitted but does not fit alone");
            if self.preempt_newest() == id {
                return false;
            }
        }
    }

    /// Takes all blocks from the newest running sequence and returns it to the front of the queue.
    /// It keeps its tokens, and computes their keys and values again when it comes back.
    ///
    /// That cannot be in the same plan: it needs as many blocks as it gave, or one more if it gave
    /// way to itself, and no others are free, or nobody would have had to give way.
    fn preempt_newest(&mut self) -> SequenceId {
        let id = *self.running.last().expect("only called while sequences run");
        self.release(id, Phase::Waiting);
        self.sequence_mut(id).num_computed = 0;
        self.waiting.push_front(id);
        self.num_preemptions += 1;
        id
    }

    fn budget_left(&self, batch: &Batch) -> usize {
        self.config.max_num_batched_tokens - batch.num_tokens
    }

    /// Adds a row of the sequence's next `len` tokens.
    fn push_row(&self, id: SequenceId, len: usize, batch: &mut Batch) {
        let sequence = self.sequence(id);
        let Phase::Running(state_slot) = sequence.phase else {
            panic!("sequence {id} is planned but does not run");
        };
        let start = sequence.num_computed;
        let context_len = start + len;
        let is_known = context_len <= sequence.tokens.len();
        assert!(is_known || len == 1, "only a sequence's very next token can be in flight");
        batch.num_tokens += len;
        batch.rows.push(Row {
            id,
            state_slot,
            start,
            len,
            inputs: if is_known { RowInputs::Known } else { RowInputs::Pending },
            context_len,
            samples: context_len == sequence.len(),
            fresh: sequence.is_fresh,
            prompt_len: sequence.prompt_len,
        });
    }
}
