//! Chooses the rows of the next batch: who decodes, who prefills, who is admitted, who gives way.
//!
//! ```text
//!   token budget  [ one token each: decodes | chunks of running prefills | chunks of admitted ]
//!   blocks          grow, last gives way      reserved at admission        all or not admitted
//! ```
//!
//! Prompts and decodes share a batch or take turns, as the policy has it. `admission.rs` says who
//! may join and takes blocks for it, `preemption.rs` who gives way, `prompt_share.rs` how many
//! tokens each prompt gets.

use inflight_kv_cache::GroupTables;

use crate::SequenceId;
use crate::batch::{Batch, BlockTurn, PromptCut, Row, RowInputs};
use crate::decision::{Decision, HeldBack, LimitedBy, Share};
use crate::policy::{Batching, Mixing, Order};
use crate::scheduler::Scheduler;
use crate::sequence::{Phase, Sequence};
use crate::step_model::StepLoad;

/// A batch in the making.
#[derive(Debug)]
pub(crate) struct Draft {
    pub(crate) batch: Batch,
    /// Prompt tokens that may still be added.
    pub(crate) prompt_tokens_left: usize,
    pub(crate) decision: Decision,
}

impl Scheduler {
    /// Plans the next batch; `None` when there is nothing to do until more is added or committed.
    ///
    /// The plan counts only once it is launched: until [`advance`](Self::advance) is called with
    /// it, another call makes a new plan in its place.
    pub fn plan(&mut self) -> Option<Batch> {
        let batch = Batch::new(self.planned + 1);
        let mut draft = Draft { batch, prompt_tokens_left: 0, decision: Decision::default() };
        let preemptions_before = self.num_preemptions;
        if self.running.is_empty() {
            self.static_batch = (0, false);
        }
        self.make_way();
        self.plan_swaps();
        self.plan_slides();
        self.plan_rows(&mut draft);
        let Draft { mut batch, mut decision, .. } = draft;
        batch.cuts = self.cuts(&batch);
        self.keep_cold_prefixes();
        let most_moved_in = self.most_moved_in();
        batch.moves = self.moves.next(self.config.memory.max_moved_blocks, most_moved_in);
        let is_empty = batch.rows.is_empty() && batch.moves.is_empty();
        decision.batch = self.planned + u64::from(!is_empty);
        decision.num_preempted = (self.num_preemptions - preemptions_before) as usize;
        decision.num_single = batch.rows.iter().filter(|row| row.len == 1).count();
        decision.num_chunks = batch.rows.len() - decision.num_single;
        decision.predicted = self.control.predict(&batch);
        self.decision = decision;
        if is_empty {
            return None;
        }
        self.planned = batch.number;
        Some(batch)
    }

    /// The prompts that end in the batch and are to be cut there.
    fn cuts(&self, batch: &Batch) -> Vec<PromptCut> {
        let cut = |(row, planned): (usize, &Row)| {
            let sequence = self.sequence(planned.id);
            let cut = sequence.cut_at(planned.context_len)?;
            let blocks = sequence.tables.first().reserved().to_vec();
            Some(PromptCut { row, num_observed: cut.num_observed(), blocks })
        };
        batch.rows.iter().enumerate().filter_map(cut).collect()
    }

    fn plan_rows(&mut self, draft: &mut Draft) {
        let prompts_first = match self.policy.effective_mixing() {
            Mixing::Chunked => {
                self.plan_single_tokens(draft);
                return self.plan_prompts(draft, Share::Both);
            }
            Mixing::PrefillFirst => true,
            Mixing::DecodeFirst => self.is_gate_open(),
        };
        if prompts_first {
            self.plan_prompts(draft, Share::Prompts);
        }
        if draft.batch.rows.is_empty() {
            draft.decision.share = Share::Decodes;
            self.plan_single_tokens(draft);
        }
        if draft.batch.rows.is_empty() && !prompts_first {
            self.plan_prompts(draft, Share::Prompts);
        }
    }

    /// A row for every running sequence that needs one more token: all decodes, and prefills at
    /// their last token. The budget has room for them, since it is not below `max_num_seqs`, but
    /// for those that are younger than a prompt's end that needs more than they would leave.
    fn plan_single_tokens(&mut self, draft: &mut Draft) {
        let only_prompts = self.forms_static_batch();
        let (end, left_for_end) = self.undivided_end();
        // The list shrinks from its end while victims give way, so it is indexed afresh each time.
        let mut i = 0;
        while let Some(&id) = self.running.get(i) {
            let sequence = self.sequence(id);
            let is_next = sequence.num_uncomputed() == 1
                && (!only_prompts || sequence.is_in_prompt())
                && self.can_run(sequence, &draft.batch);
            let left = self.config.max_num_batched_tokens - draft.batch.num_tokens;
            let is_in_the_way = i > end && left <= left_for_end;
            if is_next && !is_in_the_way && self.make_room(id) {
                self.push_row(id, 1, &mut draft.batch);
            }
            i += 1;
        }
    }

    /// Of the running prompts whose next row cannot be divided, since it decides over a cut, the
    /// oldest: its place among those that run, and the row's tokens.
    fn undivided_end(&self) -> (usize, usize) {
        let running = self.running.iter().map(|&id| self.sequence(id)).enumerate();
        let mut present = running.filter(|(_, sequence)| sequence.num_loading == 0);
        let end = present.find_map(|(i, sequence)| Some((i, sequence.undivided_len()?)));
        end.unwrap_or_default()
    }

    /// Whether a static batch still takes members and one of them has some of its prompt to go, for
    /// which other outputs of its request may wait: decodes begin when all are there.
    fn forms_static_batch(&self) -> bool {
        matches!(self.policy.batching, Batching::Static { .. })
            && !self.static_batch.1
            && self.running.iter().any(|&id| self.sequence(id).is_in_prompt())
    }

    /// Chunks of running prefills, then of sequences that join.
    fn plan_prompts(&mut self, draft: &mut Draft, share: Share) {
        draft.decision.share = share;
        self.limit_prompts(draft);
        self.plan_prefills(draft);
        self.plan_admissions(draft);
        self.top_up(draft);
        let is_formed =
            !matches!(draft.decision.held_back, Some(HeldBack::Tokens | HeldBack::Prefix));
        if matches!(self.policy.batching, Batching::Static { .. }) && is_formed {
            self.static_batch.1 = !self.running.is_empty();
        }
    }

    /// How many prompt tokens the batch may have, given the decodes that it has.
    fn limit_prompts(&mut self, draft: &mut Draft) {
        let mut limit = self.config.max_num_batched_tokens - draft.batch.num_tokens;
        draft.decision.limited_by = LimitedBy::Budget;
        if let Some(most) = self.policy.max_batch_prefill_tokens
            && most < limit
        {
            limit = most;
            draft.decision.limited_by = LimitedBy::PrefillTokens;
        }
        if let Some(target) = self.policy.targets.itl
            && !draft.batch.rows.is_empty()
            && let Some(start) = self.next_prompt_start()
        {
            let decodes = StepLoad::of(&draft.batch);
            let within = self.control.prefill_limit(target, &decodes, start, limit);
            if within < limit {
                limit = within;
                draft.decision.limited_by = LimitedBy::ItlTarget;
            }
        }
        draft.prompt_tokens_left = limit;
        draft.decision.prefill_limit = limit;
    }

    /// Positions computed of the prompt that is next; `None` when there is no prompt.
    fn next_prompt_start(&self) -> Option<usize> {
        let mut running = self.running.iter().map(|&id| self.sequence(id));
        let prefill = running.find(|sequence| sequence.num_uncomputed() > 1);
        let start = prefill.map(|sequence| sequence.num_computed);
        start.or_else(|| (!self.waiting.is_empty()).then_some(0))
    }

    /// Chunks for the running sequences that are further behind, in order, as the budget lasts.
    /// Their blocks were reserved at admission.
    fn plan_prefills(&mut self, draft: &mut Draft) {
        let is_prefill = |id: &SequenceId| self.sequence(*id).num_uncomputed() > 1;
        let mut ids: Vec<SequenceId> = self.running.iter().copied().filter(is_prefill).collect();
        if self.policy.order == Order::Fair {
            ids.sort_by_key(|&id| self.accounts.service(self.sequence(id).account));
        }
        for (i, &id) in ids.iter().enumerate() {
            let sequence = self.sequence(id);
            if !sequence.has_room() || !self.can_run(sequence, &draft.batch) {
                continue;
            }
            let num_prompts = ids.len() - i + self.waiting.len();
            if draft.prompt_tokens_left == 0 {
                return;
            }
            let len = self.prompt_share(id, draft, num_prompts);
            if len > 0 {
                self.push_prompt(id, len, draft);
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

    /// How many of a sequence's next tokens a batch has room for, if it probes them.
    pub(crate) fn probes_left(&self, sequence: &Sequence, batch: &Batch) -> usize {
        let left = self.config.max_probes() - batch.num_probes;
        if sequence.num_probes(1) > 0 { left } else { usize::MAX }
    }

    /// Adds a row of a prompt's next `len` tokens.
    pub(crate) fn push_prompt(&self, id: SequenceId, len: usize, draft: &mut Draft) {
        // Those that decide over a cut may need more than was left.
        draft.prompt_tokens_left = draft.prompt_tokens_left.saturating_sub(len);
        self.push_row(id, len, &mut draft.batch);
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
        let block_size = self.config.block_size;
        for position in (start..context_len).step_by(block_size).chain([context_len - 1]) {
            // What arrives from the host is held by its move, too.
            let is_shared = sequence.num_arriving == 0
                && sequence.tables.iter().any(|table| table.is_shared(position, &self.cache));
            assert!(!is_shared, "sequence {id} would write to a block that it shares");
        }
        let num_uncounted = sequence.num_uncounted();
        let num_dropped = sequence.tables.first().num_dropped();
        if sequence.turn_is_due {
            batch.turns.extend(turns(&sequence.tables));
        }
        batch.num_tokens += len;
        batch.num_uncounted += num_uncounted;
        batch.num_probes += sequence.num_probes(len);
        batch.rows.push(Row {
            id,
            state_slot,
            start,
            len,
            inputs: if is_known { RowInputs::Known } else { RowInputs::Pending },
            context_len,
            num_dropped,
            samples: context_len == sequence.len(),
            fresh: sequence.is_fresh,
            num_uncounted,
            prompt_len: sequence.prompt_len,
        });
    }
}

/// Sinks' blocks whose keys are to turn, of every layer group.
fn turns(tables: &GroupTables) -> impl Iterator<Item = BlockTurn> {
    tables.iter().enumerate().flat_map(|(group, table)| {
        let by = table.num_dropped();
        table.turned().map(move |copy| BlockTurn { copy, by, group })
    })
}
