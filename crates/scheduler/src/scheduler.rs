//! The scheduler's state, and what the engine can do to it between batches.

use std::collections::HashMap;

use inflight_kv_cache::{BlockHash, BlockTable, KvCache, SwapSpace, blocks_for};

use crate::moves::MoveQueue;
use crate::queue::WaitingQueue;
use crate::sequence::{Phase, Sequence, final_len};
use crate::state_slot::StateSlots;
use crate::{AdmissionError, MoveCosts, SchedulerConfig, SchedulerError, SequenceId, SequenceSpec};

/// Owns every sequence, its blocks and its state slot, and plans batches.
///
/// See the crate's documentation for the order of calls and the invariants.
#[derive(Debug)]
pub struct Scheduler {
    pub(crate) config: SchedulerConfig,
    /// Every sequence that has not ended. Looked up by id and, but for integrity checks, never
    /// walked, so that its order cannot matter.
    pub(crate) sequences: HashMap<SequenceId, Sequence>,
    /// The queue; preempted sequences return to it.
    pub(crate) waiting: WaitingQueue,
    /// Sequences that hold blocks, in order of arrival.
    pub(crate) running: Vec<SequenceId>,
    pub(crate) cache: KvCache,
    pub(crate) swap: SwapSpace,
    pub(crate) moves: MoveQueue,
    /// What giving way costs; `None` until it was measured.
    pub(crate) costs: Option<MoveCosts>,
    /// Blocks that running sequences are about to compute, by their hashes, and who computes them.
    pub(crate) announced: HashMap<BlockHash, SequenceId>,
    pub(crate) state_slots: StateSlots,
    /// Arrival number of the next sequence.
    pub(crate) next_arrival: u64,
    /// Number of the latest batch planned.
    pub(crate) planned: u64,
    /// Number of the latest batch launched.
    pub(crate) launched: u64,
    pub(crate) num_preemptions: u64,
    pub(crate) num_swaps: u64,
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
            sequences: HashMap::new(),
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
            next_arrival: 0,
            planned: 0,
            launched: 0,
            num_preemptions: 0,
        })
    }

    /// Whether a sequence of these lengths can run when it has the whole cache for itself.
    ///
    /// `max_tokens` may reach beyond the model's context: the sequence then ends there.
    ///
    /// # Errors
    /// When it can never run; the message names the field and the limit.
    pub fn check_fits(&self, prompt_len: usize, max_tokens: usize) -> Result<(), AdmissionError> {
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
        let needed_blocks = blocks_for(num_places, block_size);
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
        self.check_fits(spec.prompt.len(), spec.max_tokens)?;
        let id = spec.id;
        let sequence = Sequence::new(spec, &self.config, self.next_arrival);
        self.next_arrival += 1;
        self.waiting.insert(id, &sequence);
        let previous = self.sequences.insert(id, sequence);
        assert!(previous.is_none(), "sequence {id} was added twice");
        Ok(())
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

    /// The blocks of a sequence; empty unless it runs. To be read between `plan` and `advance`,
    /// since `advance` already gives back those of a sequence whose last token is launched.
    ///
    /// # Panics
    /// When there is no such sequence.
    #[must_use]
    pub fn block_table(&self, id: SequenceId) -> &BlockTable {
        &self.sequence(id).table
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

    /// Number of blocks of the swap space that nobody holds.
    #[must_use]
    pub fn num_free_swap_blocks(&self) -> usize {
        self.swap.num_free()
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
            Phase::Waiting => self.waiting.remove(&self.sequences[&id]),
            Phase::Running(_) => self.release(id, Phase::Finishing),
            Phase::Finishing => {}
        }
        let ended = self.sequences.remove(&id);
        for block in ended.and_then(|sequence| sequence.swapped).into_iter().flat_map(|s| s.blocks)
        {
            self.swap.free(block);
        }
    }

    /// Takes a running sequence's blocks and state slot, leaving it in another phase.
    pub(crate) fn release(&mut self, id: SequenceId, next: Phase) {
        let sequence = self.sequences.get_mut(&id).expect("running sequences have a record");
        let Phase::Running(slot) = std::mem::replace(&mut sequence.phase, next) else {
            panic!("sequence {id} does not run");
        };
        self.moves.cancel_copies(id, &mut self.cache);
        for hash in &sequence.chain.hashes()[sequence.table.num_cached()..] {
            if self.announced.get(hash) == Some(&id) {
                self.announced.remove(hash);
            }
        }
        sequence.table.release(&mut self.cache);
        self.state_slots.free(slot);
        self.running.retain(|&other| other != id);
    }
}
