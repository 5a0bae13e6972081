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
use crate::sequence::Phase;

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
