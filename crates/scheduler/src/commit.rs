//! What follows a plan: the launch moves lengths, the collected tokens end sequences.

use crate::SequenceId;
use crate::batch::Batch;
use crate::scheduler::Scheduler;
use crate::sequence::{Phase, Sequence};
use crate::tenant::cost;

/// Why a sequence ended by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// It generated a stop token.
    Stop {
        /// That token; it is the last one committed.
        token: u32,
    },
    /// It reached `max_tokens` or the model's context.
    Length,
}

/// One token that became part of its sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Commit {
    /// The token.
    pub token: u32,
    /// Why the sequence ended with it, if it did; the scheduler has forgotten the sequence then.
    pub finish: Option<FinishReason>,
    /// Number of tokens generated, this one included.
    pub num_generated: usize,
    /// Tokens of the prompt.
    pub prompt_len: usize,
}

impl Scheduler {
    /// Notes that the latest planned batch was launched: its rows' positions count as computed and
    /// its sampled tokens as pending.
    ///
    /// A sequence whose last token is launched by it gives its blocks and state slot back here, so
    /// that the next plan can already use them.
    ///
    /// # Panics
    /// When `batch` is not the latest plan, or was launched before.
    pub fn advance(&mut self, batch: &Batch) {
        let number = batch.number;
        assert_eq!(number, self.planned, "the batch launched is not the latest plan");
        assert!(number > self.launched, "batch {number} was launched twice");
        self.launched = number;
        let has_prompt = batch.rows.iter().any(|row| row.len > 1 || row.start < row.prompt_len);
        self.steps_without_prompt = if has_prompt { 0 } else { self.steps_without_prompt + 1 };
        self.launch_moves(batch);
        for row in &batch.rows {
            // Aborted since it was planned: nothing is left to move.
            let Some(sequence) = self.sequences.get_mut(&row.id) else { continue };
            assert_eq!(sequence.num_computed, row.start, "row of sequence {} is stale", row.id);
            sequence.num_computed = row.context_len;
            sequence.num_pending += usize::from(row.samples);
            sequence.is_fresh = false;
            sequence.turn_is_due = false;
            if row.samples {
                self.accounts.charge(sequence.account, cost::GENERATED);
            }
            let is_complete = sequence.is_complete();
            self.cache_blocks(row.id);
            self.cut(row.id, row.context_len);
            if is_complete {
                self.release(row.id, Phase::Finishing);
            }
        }
    }

    /// Lets go of a prompt that is cut by the row that was launched. Its blocks are read by that
    /// row alone, before anything of a later batch writes to them.
    fn cut(&mut self, id: SequenceId, context_len: usize) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        if let Some(cut) = sequence.cut_at(context_len) {
            sequence.tables.only().cut(cut.prompt_len(), &mut self.cache);
        }
    }

    /// Takes the token that a launched row yielded. To be called for every sampled row, in the
    /// order of batches and rows.
    ///
    /// `None` when the sequence has ended since: the row was a stray one or the sequence was
    /// aborted, and the token is dropped.
    ///
    /// # Panics
    /// When no sampled row of the sequence is in flight.
    pub fn commit(&mut self, id: SequenceId, token: u32) -> Option<Commit> {
        let sequence = self.sequences.get_mut(&id)?;
        assert!(sequence.num_pending > 0, "sequence {id} has no token in flight");
        sequence.num_pending -= 1;
        sequence.tokens.push(token);
        self.cache_blocks(id);
        let sequence = self.sequence(id);
        let commit = Commit {
            token,
            finish: sequence.finish_reason(token),
            num_generated: sequence.tokens.len() - sequence.prompt_len,
            prompt_len: sequence.prompt_len,
        };
        if commit.finish.is_some() {
            self.remove(id);
        }
        Some(commit)
    }
}

impl Sequence {
    /// Whether the sequence ends with its latest token, and why.
    fn finish_reason(&self, token: u32) -> Option<FinishReason> {
        let num_before = self.tokens.len() - 1 - self.prompt_len;
        if num_before >= self.min_tokens && self.stop_token_ids.contains(&token) {
            return Some(FinishReason::Stop { token });
        }
        (self.tokens.len() >= self.final_len).then_some(FinishReason::Length)
    }
}
