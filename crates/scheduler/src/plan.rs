//! Chooses the rows of the next batch: who decodes, who prefills, who is admitted, who gives way.
//!
//! ```text
//!   token budget  [ one token each: decodes | chunks of running prefills | chunks of admitted ]
//!   blocks          grow, newest gives way    reserved at admission        all or not admitted
//! ```
//!
//! `admission.rs` says who may join and takes blocks for it, `preemption.rs` who gives way.

use crate::SequenceId;
use crate::batch::{Batch, Row, RowInputs};
use crate::scheduler::Scheduler;
use crate::sequence::{Phase, Sequence};

impl Scheduler {
    /// Plans the next batch; `None` when there is nothing to do until more is added or committed.
    ///
    /// The plan counts only once it is launched: until [`advance`](Self::advance) is called with
    /// it, another call makes a new plan in its place.
    pub fn plan(&mut self) -> Option<Batch> {
        let mut batch = Batch::new(self.planned + 1);
        self.plan_swaps();
        self.plan_single_tokens(&mut batch);
        self.plan_prefills(&mut batch);
        self.plan_admissions(&mut batch);
        batch.moves = self.moves.next(self.config.memory.max_moved_blocks);
        if batch.rows.is_empty() && batch.moves.is_empty() {
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
            let sequence = self.sequence(id);
            let is_next = sequence.num_uncomputed() == 1 && self.can_run(sequence, batch);
            if is_next && self.make_room(id) {
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
            let sequence = self.sequence(id);
            if sequence.num_uncomputed() > 1 && self.can_run(sequence, batch) {
                self.push_row(id, len, batch);
            }
        }
    }

    /// Whether a running sequence's keys and values are in place, and the tokens that it does not
    /// compute can be counted.
    fn can_run(&self, sequence: &Sequence, batch: &Batch) -> bool {
        sequence.num_loading == 0 && self.can_count(sequence.num_uncounted(), batch)
    }

    /// Whether a row that leaves so many tokens to be counted fits the batch. Alone it always does.
    pub(crate) fn can_count(&self, num_uncounted: usize, batch: &Batch) -> bool {
        batch.num_uncounted + num_uncounted <= self.config.max_model_len
    }

    pub(crate) fn budget_left(&self, batch: &Batch) -> usize {
        self.config.max_num_batched_tokens - batch.num_tokens
    }

    /// Adds a row of the sequence's next `len` tokens.
    pub(crate) fn push_row(&self, id: SequenceId, len: usize, batch: &mut Batch) {
        let sequence = self.sequence(id);
        let Phase::Running(state_slot) = sequence.phase else {
            panic!("sequence {id} is planned but does not run");
        };
        let start = sequence.num_computed;
        let context_len = start + len;
        let is_known = context_len <= sequence.tokens.len();
        assert!(is_known || len == 1, "only a sequence's very next token can be in flight");
        let block_size = self.config.block_size;
        for position in (start..context_len).step_by(block_size).chain([context_len - 1]) {
            // What arrives from the host is held by its move, too.
            let is_shared =
                sequence.num_arriving == 0 && sequence.table.is_shared(position, &self.cache);
            assert!(!is_shared, "sequence {id} would write to a block that it shares");
        }
        let num_uncounted = sequence.num_uncounted();
        batch.num_tokens += len;
        batch.num_uncounted += num_uncounted;
        batch.rows.push(Row {
            id,
            state_slot,
            start,
            len,
            inputs: if is_known { RowInputs::Known } else { RowInputs::Pending },
            context_len,
            samples: context_len == sequence.len(),
            fresh: sequence.is_fresh,
            num_uncounted,
            prompt_len: sequence.prompt_len,
        });
    }
}
