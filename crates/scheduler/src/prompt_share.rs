//! How many tokens of a batch each prompt gets.
//!
//! Without a target for the time to the first token the first prompt gets all it can use, then the
//! next: fewest prompts are under way, and none waits for one behind it. With a target each first
//! gets what it needs to be done in time, so that a long prompt does not make all behind it late;
//! what is left goes to the first again.

use crate::SequenceId;
use crate::plan::Draft;
use crate::scheduler::Scheduler;

/// A prompt that is late anyway still gets this much.
const LEAST_SHARE: usize = 16;

impl Scheduler {
    /// Tokens that a prompt gets at first, being one of `num_prompts` that are still to be served.
    pub(crate) fn prompt_share(&self, id: SequenceId, draft: &Draft, num_prompts: usize) -> usize {
        let left = draft.prompt_tokens_left;
        let num_uncomputed = self.sequence(id).num_uncomputed();
        let room = self.sequence(id).room();
        // Who needs most of it cannot make the others late, too.
        let most = if num_prompts > 1 { left / 2 } else { left };
        let needed = match self.num_steps_to_target(id) {
            None => num_uncomputed,
            Some(0) => (left / num_prompts.max(1)).max(LEAST_SHARE),
            Some(num_steps) => num_uncomputed.div_ceil(num_steps).min(most).max(LEAST_SHARE),
        };
        let probes_left = self.probes_left(self.sequence(id), &draft.batch);
        let most = left.min(room).min(probes_left);
        let len = self.sequence(id).row_len(needed.min(num_uncomputed).min(most));
        if len > 0 || most == 0 {
            return len;
        }
        // Those that decide over a cut are computed together, whatever a policy leaves for prompts.
        let least = self.sequence(id).row_len(num_uncomputed.min(room));
        let fits = draft.batch.num_tokens + least <= self.config.max_num_batched_tokens;
        if fits { least } else { 0 }
    }

    /// Steps of the usual length until the sequence's first token is due; `None` without a target,
    /// while no step was timed, and after the first token.
    fn num_steps_to_target(&self, id: SequenceId) -> Option<usize> {
        let sequence = self.sequence(id);
        let target = self.policy.targets.ttft?;
        let step_s = self.control.mean_step_s()?;
        if sequence.len() > sequence.prompt_len {
            return None;
        }
        let due = sequence.arrived_at.saturating_add(target);
        Some((due.saturating_sub(self.now).as_secs_f64() / step_s) as usize)
    }

    /// Gives the tokens that are left to the prompts that can use more, the first one first.
    pub(crate) fn top_up(&self, draft: &mut Draft) {
        if self.policy.targets.ttft.is_none() {
            return;
        }
        for row in &mut draft.batch.rows {
            let sequence = self.sequence(row.id);
            let probes_left = if sequence.num_probes(1) > 0 {
                self.config.max_probes() - draft.batch.num_probes
            } else {
                usize::MAX
            };
            let end = sequence.len().min(sequence.num_computed + sequence.room());
            let more = end - row.context_len;
            let more = more.min(draft.prompt_tokens_left).min(probes_left);
            let more = sequence.row_len(row.len + more).saturating_sub(row.len);
            row.len += more;
            row.context_len += more;
            row.samples = row.context_len == sequence.len();
            draft.batch.num_tokens += more;
            draft.batch.num_probes += sequence.num_probes(more);
            draft.prompt_tokens_left -= more;
        }
    }
}
