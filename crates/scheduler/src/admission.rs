//! Who joins the running sequences, and the blocks that it gets for that.
//!
//! Admission takes blocks for all tokens that a sequence has, so that only decodes ever ask for
//! more, at most one block each, and a prefill once begun is never stuck half way. It begins with
//! what it need not compute:
//!
//! ```text
//!   tokens      [ found by prefix | moved from the host | to compute ]     the prefix cache; what
//!                                                         gave way, or what the host keeps of it
//!   tokens      [ the prompt but its last token         |     1      ]     another output's blocks
//! ```
//!
//! `gate.rs` has the conditions that a policy adds.

use inflight_kv_cache::{BlockId, HostBlockId, OnHost, TableStart};

use crate::batch::Batch;
use crate::decision::HeldBack;
use crate::gate::Terms;
use crate::moves::{BlockMove, MoveOwner};
use crate::plan::Draft;
use crate::policy::Order;
use crate::preemption::LOOKAHEAD;
use crate::scheduler::Scheduler;
use crate::sequence::{Phase, Sequence, Swapped};
use crate::tenant::cost;
use crate::{SequenceId, StateSlot};

/// What a sequence begins with when it is admitted.
struct Beginning {
    /// Of each layer group: blocks that were found, or those of the sequence that has computed the
    /// same prompt.
    starts: Vec<TableStart>,
    /// Of each layer group: blocks that the host keeps, to be fetched behind those.
    fetched: Vec<Vec<HostBlockId>>,
    /// Positions that need no computing.
    num_computed: usize,
}

impl Scheduler {
    /// First chunks for sequences from the front of the queue, while slots, blocks and budget last.
    /// If the first cannot be admitted, the others wait behind it; only who waits for a prefix that
    /// is being computed is overtaken.
    pub(crate) fn plan_admissions(&mut self, draft: &mut Draft) {
        if self.waiting.is_empty() {
            return;
        }
        let mut terms = Terms::new(self);
        while draft.prompt_tokens_left > 0 {
            let Some(id) = self.next_to_admit() else {
                draft.decision.held_back = (!self.waiting.is_empty()).then_some(HeldBack::Prefix);
                return;
            };
            if let Err(reason) = self.try_admit(id, draft, &mut terms) {
                draft.decision.held_back = Some(reason);
                return;
            }
            draft.decision.num_admitted += 1;
            if self.sequence(id).num_loading == 0 {
                let len = self.prompt_share(id, draft, 1 + self.waiting.len());
                if len > 0 {
                    self.push_prompt(id, len, draft);
                }
            }
        }
        draft.decision.held_back = (!self.waiting.is_empty()).then_some(HeldBack::Tokens);
    }

    /// Who joins next. A tenant that has nothing running goes before sequences that gave way, if
    /// theirs had more service.
    pub(crate) fn next_to_admit(&self) -> Option<SequenceId> {
        let waits = |id| self.waits_for_prefix(id);
        let next = self.waiting.next(&self.accounts, waits)?;
        if self.policy.order == Order::Fair && self.sequence(next).has_run {
            let service = |id: SequenceId| self.accounts.service(self.sequence(id).account);
            let other = self.waiting.next_by_tenant(&self.accounts, waits);
            let is_needier = |other: &SequenceId| {
                let num_running = self.accounts.num_running(self.sequence(*other).account);
                num_running == 0 && service(*other) < service(next)
            };
            return other.filter(is_needier).or(Some(next));
        }
        Some(next)
    }

    /// Admits a waiting sequence, or says why it cannot join.
    fn try_admit(
        &mut self,
        id: SequenceId,
        draft: &Draft,
        terms: &mut Terms,
    ) -> Result<(), HeldBack> {
        if !self.state_slots.has_free() {
            return Err(HeldBack::Slots);
        }
        if self.probes_left(self.sequence(id), &draft.batch) == 0 {
            return Err(HeldBack::Tokens);
        }
        terms.check(id, self)?;
        let beginning = self.find_beginning(id).ok_or(HeldBack::Blocks)?;
        if !self.can_count_from(id, &beginning, &draft.batch) {
            return Err(HeldBack::Counting);
        }
        let slot = self.state_slots.allocate().expect("one is free");
        self.admit(id, slot, &beginning);
        terms.join(id, self);
        Ok(())
    }

    /// Whether the tokens that a sequence does not compute can be counted in the batch.
    fn can_count_from(&self, id: SequenceId, beginning: &Beginning, batch: &Batch) -> bool {
        let counts = self.sequence(id).counts_tokens;
        self.can_count(if counts { beginning.num_computed } else { 0 }, batch)
    }

    /// What a waiting sequence begins with, if there is room for it now.
    fn find_beginning(&self, id: SequenceId) -> Option<Beginning> {
        let sequence = self.sequence(id);
        // While a token of it is in flight, its input is not known to the host; while blocks of it
        // are, they cannot come back.
        let is_leaving = sequence.swapped.as_ref().is_some_and(|swapped| swapped.num_leaving > 0);
        if sequence.num_pending > 0 || is_leaving {
            return None;
        }
        let beginning = match self.shared_prompt(sequence) {
            Some(shared) => shared,
            None => self.cached_beginning(sequence)?,
        };
        self.has_room_for(sequence, &beginning).then_some(beginning)
    }

    /// What was found on the device and what the host has, unless some of it is on its way there.
    fn cached_beginning(&self, sequence: &Sequence) -> Option<Beginning> {
        let block_size = self.config.block_size;
        let found = self.find_first(sequence);
        let num_usable = self.num_usable(sequence, &found);
        if let Some(swapped) = &sequence.swapped {
            let num_computed = swapped.num_computed;
            if num_computed < num_usable * block_size {
                return Some(self.beginning(sequence, &found, num_usable));
            }
            let first = TableStart::found(found[..num_usable].to_vec(), 0);
            let others = sequence.tables.empty_others(num_computed);
            let starts = [first].into_iter().chain(others).collect();
            return Some(Beginning { starts, fetched: Vec::new(), num_computed });
        }
        let num_blocks = self.find_on_host(sequence, &found, num_usable)?;
        let beginning = self.beginning(sequence, &found, num_blocks);
        let num_fetched = beginning.fetched.iter().map(Vec::len).sum();
        let num_tokens = (num_blocks - num_usable) * block_size;
        let is_better = num_fetched == 0 || self.is_better_fetched(num_fetched, num_tokens);
        Some(if is_better { beginning } else { self.beginning(sequence, &found, num_usable) })
    }

    /// So many blocks of each layer group, as far as a row behind them sees them: what is on the
    /// device, where `found` are the first group's, and the rest from the host.
    fn beginning(&self, sequence: &Sequence, found: &[BlockId], num_blocks: usize) -> Beginning {
        let starts = sequence.tables.found(found, num_blocks, &self.cache);
        let kept = |name| match self.swap.find(&name) {
            OnHost::Kept(block) => block,
            state => panic!("what a sequence begins with is {state:?} on the host"),
        };
        let fetched = (0..).zip(&starts).map(|(group, start)| {
            let names = self.names_behind(sequence, start, (group, num_blocks));
            names.map(kept).collect()
        });
        let fetched = fetched.collect();
        Beginning { starts, fetched, num_computed: num_blocks * self.config.block_size }
    }

    /// The whole prompt but its last token, if the sequence that computes it for both runs.
    fn shared_prompt(&self, sequence: &Sequence) -> Option<Beginning> {
        let leader = sequence.shares_prompt_of?;
        let tables = &self.sequences.get(&leader)?.tables;
        if sequence.retention.cut().is_some() {
            return None;
        }
        let num_computed = sequence.prompt_len - 1;
        let starts = tables.shared(num_computed)?;
        Some(Beginning { starts, fetched: Vec::new(), num_computed })
    }

    /// Whether a waiting sequence can be admitted beside the running ones.
    ///
    /// There must be blocks for all tokens that it has, and then some for each that may need more,
    /// itself included. Without that margin the next decode in need of a block would throw the
    /// newcomer out again; and each time that it was thrown out, the margin doubles. It never
    /// exceeds what all of them can come to need, so a lone sequence always passes: that much is
    /// what [`check_fits`](Self::check_fits) found to fit.
    fn has_room_for(&self, sequence: &Sequence, beginning: &Beginning) -> bool {
        let most = self.config.max_num_batched_tokens;
        let (mut needed, mut num_own) = (0, 0);
        let groups = sequence.tables.most_blocks(sequence.len(), most);
        let lets_go = sequence.tables.lets_go(sequence.final_len - 1);
        for ((start, num_blocks), lets_go) in beginning.starts.iter().zip(groups).zip(lets_go) {
            let num_blocks = num_blocks.max(start.blocks.len());
            // A shared block that is partly filled is copied.
            let num_computed = beginning.num_computed - start.num_dropped;
            let num_full = start.blocks.len().min(num_computed / self.config.block_size);
            let is_available = |block: &&BlockId| self.cache.is_available(**block);
            let num_taken = start.blocks.iter().filter(is_available).count();
            needed += num_blocks - num_full + num_taken;
            // Letting go of what others hold, too, frees nothing for what comes behind it.
            let num_held = num_full.saturating_sub(num_taken);
            num_own += if lets_go { num_blocks - num_held } else { num_blocks };
        }
        let available = self.cache.num_available();
        needed <= available && needed + self.margin(sequence, num_own) <= available
    }

    /// Blocks to leave free when a sequence joins with `num_blocks` that it can reuse.
    fn margin(&self, sequence: &Sequence, num_blocks: usize) -> usize {
        let swaps = self.swap.num_total() > 0;
        let unit = if swaps { LOOKAHEAD.div_ceil(self.config.block_size) } else { 1 };
        let each = (unit * sequence.tables.num_groups()) << sequence.num_preemptions.min(16);
        let others = self.running.iter().map(|&id| {
            let other = self.sequence(id);
            self.most_growth(other, other.tables.held().count()).min(each)
        });
        others.sum::<usize>() + self.most_growth(sequence, num_blocks).min(each)
    }

    /// How many blocks a sequence that has `num_blocks` can come to need. The last token is never
    /// an input, so its position needs no place.
    fn most_growth(&self, sequence: &Sequence, num_blocks: usize) -> usize {
        self.most_blocks(sequence, sequence.final_len - 1).saturating_sub(num_blocks)
    }

    /// Most blocks that a sequence holds at once until it has so many tokens.
    pub(crate) fn most_blocks(&self, sequence: &Sequence, num_tokens: usize) -> usize {
        let most = self.config.max_num_batched_tokens;
        sequence.tables.most_blocks(num_tokens, most).sum()
    }

    /// Moves a waiting sequence to the running ones and reserves blocks for its tokens.
    fn admit(&mut self, id: SequenceId, slot: StateSlot, beginning: &Beginning) {
        let room = "admission checked that the blocks are there";
        self.waiting.remove(&self.sequences[&id], &mut self.accounts);
        if !self.sequence(id).has_run {
            self.begin_service(id, beginning.num_computed);
        }
        let most = self.config.max_num_batched_tokens;
        let sequence = self.sequences.get_mut(&id).expect("waiting sequences have a record");
        let rank = sequence.rank;
        sequence.tables.adopt(&beginning.starts, &mut self.cache);
        sequence.phase = Phase::Running(slot);
        sequence.is_fresh = true;
        sequence.shares_prompt_of = None;
        sequence.num_computed = beginning.num_computed;
        sequence.num_cached_tokens.get_or_insert(beginning.num_computed);
        let (start, len) = (sequence.num_computed, sequence.len());
        let copies = sequence.tables.make_private(start, &mut self.cache).expect(room);
        sequence.tables.grow(start, (len, most), &mut self.cache).expect(room);
        if let Some(cut) = sequence.retention.cut() {
            sequence.tables.only().reserve_cut(cut.num_kept(), &mut self.cache).expect(room);
        }
        copies.into_iter().for_each(|copy| self.moves.copy(id, copy));
        self.load(id, beginning);
        self.announce_blocks(id);
        let behind = self.running.partition_point(|other| self.sequences[other].rank < rank);
        self.running.insert(behind, id);
    }

    /// A sequence is admitted for the first time: its prompt is put on its tenant's account, and
    /// what others had computed of it counts as little as it costs.
    fn begin_service(&mut self, id: SequenceId, num_cached: usize) {
        self.lift_queue_limit(id);
        let number = self.take_number();
        let is_fair = self.policy.order == Order::Fair;
        let sequence = self.sequence_mut(id);
        sequence.has_run = true;
        if is_fair {
            sequence.rank.number = number;
        }
        let (account, prompt_len) = (sequence.account, sequence.prompt_len);
        let (num_computed, num_cached) = ((prompt_len - num_cached) as u64, num_cached as u64);
        self.accounts.charge(account, cost::COMPUTED * num_computed + cost::CACHED * num_cached);
    }

    /// Has blocks moved from the host, behind the first ones, which were found on the device: those
    /// of a sequence that came back, or what the host keeps of a prefix.
    fn load(&mut self, id: SequenceId, beginning: &Beginning) {
        let sequence = self.sequences.get_mut(&id).expect("waiting sequences have a record");
        let first = &beginning.starts[0];
        let num_before = first.end(self.config.block_size);
        let swapped = sequence.swapped.take();
        let on_host: Vec<&[HostBlockId]> = match &swapped {
            None => beginning.fetched.iter().map(Vec::as_slice).collect(),
            // More than it had was found.
            Some(swapped) if swapped.num_computed < beginning.num_computed => Vec::new(),
            Some(Swapped { groups, .. }) => {
                let behind = groups[0].get(num_before..).unwrap_or_default();
                [behind].into_iter().chain(groups[1..].iter().map(Vec::as_slice)).collect()
            }
        };
        let starts = sequence.tables.iter().zip(&beginning.starts);
        for ((table, start), on_host) in starts.zip(on_host) {
            let pairs = table.blocks()[start.blocks.len()..].iter().zip(on_host);
            for (&device, &host) in pairs.rev() {
                let block = BlockMove { owner: MoveOwner::Sequence(id), device, host };
                self.moves.swap_in(block, (&mut self.cache, &mut self.swap));
                sequence.num_loading += 1;
                sequence.num_arriving += 1;
            }
        }
        self.host.num_fetched += beginning.fetched.iter().map(Vec::len).sum::<usize>() as u64;
        // From here on the moves hold what is still to be read.
        swapped.iter().flat_map(Swapped::blocks).for_each(|block| self.swap.free(block));
    }
}
