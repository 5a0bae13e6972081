//! The scheduler's state, and what the engine can do to it between batches.

use std::collections::HashMap;
use std::time::Duration;

use inflight_kv_cache::{BlockHash, GroupTables, KvCache, Retention, SwapSpace};

use crate::batch::Batch;
use crate::file_prefixes::FilePrefixes;
use crate::id_map::IdMap;
use crate::lapse::Lapses;
use crate::latency::LatencyControl;
use crate::moves::MoveQueue;
use crate::policy::Order;
use crate::queue::{Rank, WaitingQueue};
use crate::sequence::{Entry, Phase, Sequence, Swapped, final_len};
use crate::state_slot::StateSlots;
use crate::tenant::{Accounts, Tenant};
use crate::{
    AdmissionError, Decision, HostPrefixes, MoveCosts, Policy, SchedulerConfig, SchedulerError,
    SequenceId, SequenceSpec,
};

/// Owns every sequence, its blocks and its state slot, and plans batches.
///
/// See the crate's documentation for the order of calls and the invariants.
#[derive(Debug)]
pub struct Scheduler {
    pub(crate) config: SchedulerConfig,
    pub(crate) policy: Policy,
    /// The latest time that was told.
    pub(crate) now: Duration,
    /// Every sequence that has not ended. Looked up by id and, but for integrity checks, never
    /// walked, so that its order cannot matter.
    pub(crate) sequences: IdMap<Sequence>,
    /// The queue; preempted sequences return to it.
    pub(crate) waiting: WaitingQueue,
    /// Sequences that hold blocks, by rank.
    pub(crate) running: Vec<SequenceId>,
    pub(crate) cache: KvCache,
    pub(crate) swap: SwapSpace,
    pub(crate) moves: MoveQueue,
    /// What giving way costs; `None` until it was measured.
    pub(crate) costs: Option<MoveCosts>,
    /// Blocks that running sequences are about to compute, by their hashes, and who computes them.
    pub(crate) announced: HashMap<BlockHash, SequenceId>,
    pub(crate) state_slots: StateSlots,
    pub(crate) accounts: Accounts,
    pub(crate) lapses: Lapses,
    pub(crate) control: LatencyControl,
    pub(crate) decision: Decision,
    /// Number of the next arrival, or admission where that gives the rank.
    pub(crate) next_number: u64,
    /// Batches launched since the last one with a prompt.
    pub(crate) steps_without_prompt: u64,
    /// Sequences of the present static batch, and whether it takes no more.
    pub(crate) static_batch: (usize, bool),
    /// Number of the latest batch planned.
    pub(crate) planned: u64,
    /// Number of the latest batch launched.
    pub(crate) launched: u64,
    pub(crate) num_preemptions: u64,
    pub(crate) num_swaps: u64,
    pub(crate) host: HostPrefixes,
    pub(crate) file: FilePrefixes,
}

impl Scheduler {
    /// A scheduler with an empty queue and a free cache.
    ///
    /// # Errors
    /// When the limits cannot work together; the message names the fields.
    pub fn new(config: SchedulerConfig) -> Result<Self, SchedulerError> {
        config.validate()?;
        let fits = "the configuration was validated";
        let num_blocks = u32::try_from(config.num_blocks).expect(fits);
        let num_slots = u32::try_from(config.max_num_seqs).expect(fits);
        Ok(Self {
            policy: Policy::default(),
            now: Duration::ZERO,
            sequences: IdMap::default(),
            waiting: WaitingQueue::default(),
            running: Vec::new(),
            cache: KvCache::new(num_blocks, config.memory.prefix_caching),
            swap: SwapSpace::new(u32::try_from(config.memory.num_swap_blocks).expect(fits)),
            moves: MoveQueue::default(),
            costs: None,
            announced: HashMap::new(),
            num_swaps: 0,
            config,
            state_slots: StateSlots::new(num_slots),
            accounts: Accounts::default(),
            lapses: Lapses::default(),
            control: LatencyControl::default(),
            decision: Decision::default(),
            next_number: 0,
            steps_without_prompt: 0,
            static_batch: (0, false),
            planned: 0,
            launched: 0,
            num_preemptions: 0,
            host: HostPrefixes::default(),
            file: FilePrefixes::default(),
        })
    }

    /// Changes what decides, from the next plan on. Sequences that wait or run fall into the new
    /// order.
    ///
    /// # Errors
    /// When the policy does not work with the limits; the message names the field.
    pub fn set_policy(&mut self, policy: Policy) -> Result<(), SchedulerError> {
        policy.validate(&self.config)?;
        let waiting: Vec<SequenceId> = self.waiting.iter().collect();
        for &id in &waiting {
            self.waiting.remove(&self.sequences[&id], &mut self.accounts);
        }
        for sequence in self.sequences.values_mut() {
            let by_priority = policy.order == Order::Priority;
            let priority = if by_priority { sequence.priority } else { 0 };
            sequence.rank = Rank { priority, number: sequence.arrival };
        }
        self.waiting = WaitingQueue::new(policy.order);
        for &id in &waiting {
            self.waiting.insert(id, &self.sequences[&id], &mut self.accounts);
        }
        let mut running = std::mem::take(&mut self.running);
        running.sort_by_key(|&id| self.sequence(id).rank);
        self.running = running;
        self.policy = policy;
        Ok(())
    }

    /// Tells the time, on a clock that never runs backwards. Arrivals, deadlines and time in the
    /// queue are measured by what was told last.
    pub fn set_now(&mut self, now: Duration) {
        self.now = self.now.max(now);
    }

    /// Tells how long a step took, as the sequences in it felt it: from the moment that the step
    /// before had ended, or from its own launch if that was later.
    pub fn observe(&mut self, batch: &Batch, took: Duration) {
        self.control.observe(batch, took);
    }

    /// Whether a sequence of these lengths can run when it has the whole cache for itself.
    ///
    /// `max_tokens` may reach beyond the model's context: the sequence then ends there.
    ///
    /// # Errors
    /// When it can never run; the message names the field and the limit.
    pub fn check_fits(&self, prompt_len: usize, max_tokens: usize) -> Result<(), AdmissionError> {
        self.check_kept(prompt_len, max_tokens, Retention::All)
    }

    /// The same for a sequence of which not all stays in the cache.
    fn check_kept(
        &self,
        prompt_len: usize,
        max_tokens: usize,
        retention: Retention,
    ) -> Result<(), AdmissionError> {
        let SchedulerConfig { max_model_len, block_size, num_blocks, .. } = self.config;
        if prompt_len == 0 {
            return Err(AdmissionError::EmptyPrompt);
        }
        if max_tokens == 0 {
            return Err(AdmissionError::ZeroMaxTokens);
        }
        if prompt_len >= max_model_len {
            return Err(AdmissionError::PromptTooLong { prompt_len, max_model_len });
        }
        // The last token is never an input, so its position needs no place.
        let num_places = final_len(prompt_len, max_tokens, max_model_len) - 1;
        let most = self.config.max_num_batched_tokens;
        let of = |retention: Retention| retention.most_blocks(num_places, most, block_size);
        let others = self.config.other_windows.iter().map(|window| retention.of_group(*window));
        let needed_blocks = of(retention) + others.map(of).sum::<usize>();
        if needed_blocks > num_blocks {
            return Err(AdmissionError::LargerThanCache {
                prompt_len,
                max_tokens,
                needed_blocks,
                num_blocks,
                block_size,
            });
        }
        Ok(())
    }

    /// Puts a sequence in the queue.
    ///
    /// # Errors
    /// See [`check_fits`](Self::check_fits); nothing was added then.
    ///
    /// # Panics
    /// When the id is in use.
    pub fn add(&mut self, spec: SequenceSpec) -> Result<(), AdmissionError> {
        self.check_kept(spec.prompt.len(), spec.max_tokens, spec.retention)?;
        let id = spec.id;
        let spec = SequenceSpec { shares_prompt_of: self.leader_of(&spec), ..spec };
        let arrival = self.take_number();
        let entry = Entry {
            arrival,
            rank: Rank::of_newcomer(self.policy.order, &spec, arrival),
            account: self.accounts.open(&spec.service.tenant),
            now: self.now,
            queue_limit: self.policy.max_queue_time.map(|time| self.now.saturating_add(time)),
        };
        let sequence = Sequence::new(spec, &self.config, entry);
        self.waiting.insert(id, &sequence, &mut self.accounts);
        let previous = self.sequences.insert(id, sequence);
        assert!(previous.is_none(), "sequence {id} was added twice");
        self.watch_lapses(id);
        self.prefetch(id);
        Ok(())
    }

    /// The sequence whose prompt is to be shared, if it is there and the prompt is the same.
    fn leader_of(&self, spec: &SequenceSpec) -> Option<SequenceId> {
        let leader = spec.shares_prompt_of.filter(|_| !spec.probes_prompt)?;
        let leader_is = self.sequences.get(&leader)?;
        let Sequence { tokens, prompt_len, chain, retention, .. } = leader_is;
        let is_same = tokens[..*prompt_len] == spec.prompt
            && *chain.key() == spec.prefix_key
            && *retention == spec.retention;
        is_same.then_some(leader)
    }

    /// Ends a sequence in whatever phase it is and frees all that it holds; false when there is no
    /// such sequence (it may just have ended). Tokens of it that are in flight will be dropped.
    pub fn abort(&mut self, id: SequenceId) -> bool {
        let is_known = self.has_sequence(id);
        if is_known {
            self.remove(id);
        }
        is_known
    }

    /// Whether the sequence has not ended.
    #[must_use]
    pub fn has_sequence(&self, id: SequenceId) -> bool {
        self.sequences.contains_key(&id)
    }

    /// The prompt and all committed tokens of a sequence.
    ///
    /// # Panics
    /// When there is no such sequence.
    #[must_use]
    pub fn tokens(&self, id: SequenceId) -> &[u32] {
        &self.sequence(id).tokens
    }

    /// Number of committed tokens of a sequence after its prompt.
    ///
    /// # Panics
    /// When there is no such sequence.
    #[must_use]
    pub fn num_generated(&self, id: SequenceId) -> usize {
        let sequence = self.sequence(id);
        sequence.tokens.len() - sequence.prompt_len
    }

    /// The blocks of a sequence, of each layer group; empty unless it runs. To be read between
    /// `plan` and `advance`, since `advance` already gives back those of a sequence whose last
    /// token is launched.
    ///
    /// # Panics
    /// When there is no such sequence.
    #[must_use]
    pub fn block_tables(&self, id: SequenceId) -> &GroupTables {
        &self.sequence(id).tables
    }

    /// Whether every sequence has ended and nothing is on its way between host and device.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty() && self.moves.is_empty()
    }

    /// Number of sequences in the queue.
    #[must_use]
    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Number of sequences that are admitted and have not ended, those included that only wait for
    /// tokens in flight.
    #[must_use]
    pub fn num_running(&self) -> usize {
        self.sequences.len() - self.waiting.len()
    }

    /// Number of blocks that nobody needs: free ones, and those that only the prefix cache holds.
    #[must_use]
    pub fn num_free_blocks(&self) -> usize {
        self.cache.num_available()
    }

    /// Number of blocks that only the prefix cache holds.
    #[must_use]
    pub fn num_cached_blocks(&self) -> usize {
        self.cache.num_cached()
    }

    /// Number of blocks of the swap space that sequences can have.
    #[must_use]
    pub fn num_free_swap_blocks(&self) -> usize {
        self.swap.num_available()
    }

    /// What the host does for the prefix cache, since the start.
    #[must_use]
    pub fn host_prefixes(&self) -> HostPrefixes {
        let (num_evicted, num_lost) = self.cache.num_evicted();
        HostPrefixes { num_blocks: self.swap.num_kept(), num_evicted, num_lost, ..self.host }
    }

    /// Number of preemptions whose keys and values moved to the host, since the start.
    #[must_use]
    pub fn num_swaps(&self) -> u64 {
        self.num_swaps
    }

    /// Prompt tokens of a sequence that others had computed when it was first admitted.
    ///
    /// # Panics
    /// When there is no such sequence.
    #[must_use]
    pub fn num_cached_tokens(&self, id: SequenceId) -> usize {
        self.sequence(id).num_cached_tokens.unwrap_or(0)
    }

    /// Tells what giving way costs; the latest counts.
    pub fn set_costs(&mut self, costs: MoveCosts) {
        self.costs = Some(costs);
    }

    /// Number of times that a sequence had to give its blocks back, since the start.
    #[must_use]
    pub fn num_preemptions(&self) -> u64 {
        self.num_preemptions
    }

    /// What the latest plan decided, and why.
    #[must_use]
    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    /// What decides beside the limits.
    #[must_use]
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Tenants that have sequences or had much service lately, with their service in units: 10 for
    /// a prompt's token, 1 for one that the prefix cache had, 20 for a generated one.
    pub fn tenants(&self) -> impl Iterator<Item = (&Tenant, u64)> {
        self.accounts.iter()
    }

    /// The limits it works under.
    #[must_use]
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    pub(crate) fn sequence(&self, id: SequenceId) -> &Sequence {
        self.sequences.get(&id).unwrap_or_else(|| panic!("there is no sequence {id}"))
    }

    pub(crate) fn sequence_mut(&mut self, id: SequenceId) -> &mut Sequence {
        self.sequences.get_mut(&id).unwrap_or_else(|| panic!("there is no sequence {id}"))
    }

    /// Forgets a sequence and frees all that it holds.
    pub(crate) fn remove(&mut self, id: SequenceId) {
        match self.sequence(id).phase {
            Phase::Waiting => self.waiting.remove(&self.sequences[&id], &mut self.accounts),
            Phase::Running(_) => self.release(id, Phase::Finishing),
            Phase::Finishing => {}
        }
        self.forget_lapses(id);
        let Some(ended) = self.sequences.remove(&id) else { return };
        self.accounts.close(ended.account);
        for block in ended.swapped.iter().flat_map(Swapped::blocks) {
            self.swap.free(block);
        }
    }

    /// The next number in the order of arrivals and admissions.
    pub(crate) fn take_number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number - 1
    }

    /// Takes a running sequence's blocks and state slot, leaving it in another phase.
    pub(crate) fn release(&mut self, id: SequenceId, next: Phase) {
        let sequence = self.sequences.get_mut(&id).expect("running sequences have a record");
        let Phase::Running(slot) = std::mem::replace(&mut sequence.phase, next) else {
            panic!("sequence {id} does not run");
        };
        sequence.turn_is_due = false;
        self.moves.cancel_copies(id, &mut self.cache);
        for hash in &sequence.chain.hashes()[sequence.tables.first().num_cached()..] {
            if self.announced.get(hash) == Some(&id) {
                self.announced.remove(hash);
            }
        }
        sequence.tables.release(&mut self.cache);
        self.state_slots.free(slot);
        self.running.retain(|&other| other != id);
    }
}
