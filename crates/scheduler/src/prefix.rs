//! What the prefix cache is told, and who waits for what others compute.

use inflight_kv_cache::{BlockHash, BlockId};

use crate::SequenceId;
use crate::scheduler::Scheduler;
use crate::sequence::{Phase, Sequence};

impl Scheduler {
    /// Lets others find the full blocks of a sequence whose tokens are known and whose keys and
    /// values are launched: whoever reads them does so in a later batch, on the same stream.
    pub(crate) fn cache_blocks(&mut self, id: SequenceId) {
        if !self.config.memory.prefix_caching {
            return;
        }
        let sequence = self.sequences.get_mut(&id).expect("only called for living sequences");
        let Sequence { tokens, chain, tables, retention, num_computed, num_arriving, .. } =
            sequence;
        chain.extend(tokens);
        if *num_arriving > 0 || !matches!(sequence.phase, Phase::Running(_)) {
            return;
        }
        let num_before = tables.first().num_found();
        let num_exact = retention.num_exact().min(*num_computed);
        tables.cache_full_blocks(num_exact, chain, tokens, &mut self.cache);
        // Whether or not they can be found: nobody needs to wait for them any more.
        let num_computed_blocks = *num_computed / self.config.block_size;
        let computed = chain.hashes().iter().take(num_computed_blocks).skip(num_before);
        for hash in computed {
            if self.announced.get(hash) == Some(&id) {
                self.announced.remove(hash);
            }
        }
    }

    /// Announces the blocks that a sequence, just admitted, is going to compute.
    pub(crate) fn announce_blocks(&mut self, id: SequenceId) {
        let sequence = &self.sequences[&id];
        let most = sequence.retention.num_exact() / self.config.block_size;
        let hashes = sequence.chain.hashes().iter().take(most);
        for &hash in hashes.skip(sequence.tables.first().num_found()) {
            self.announced.entry(hash).or_insert(id);
        }
    }

    /// Whether a waiting sequence had better wait a little longer, as a running one is computing
    /// what both begin with. Others may overtake it meanwhile.
    pub(crate) fn waits_for_prefix(&self, id: SequenceId) -> bool {
        let sequence = self.sequence(id);
        let leader = sequence.shares_prompt_of.and_then(|leader| self.sequences.get(&leader));
        let is_computing = |leader: &Sequence| {
            let is_incomplete = leader.num_computed < leader.prompt_len || leader.num_arriving > 0;
            matches!(leader.phase, Phase::Running(_)) && is_incomplete
        };
        if leader.is_some_and(is_computing) {
            return true;
        }
        if sequence.probes_prompt {
            return false;
        }
        if self.waits_for_file() && self.waits_for_host(sequence) {
            return true;
        }
        if self.announced.is_empty() {
            return false;
        }
        let is_announced = |hash: &BlockHash| self.announced.contains_key(hash);
        if sequence.missing.get().as_ref().is_some_and(is_announced) {
            return true;
        }
        let num_found = self.find_prefix(sequence).len();
        let most = self.most_found(sequence);
        let missing = sequence.chain.hashes().iter().take(most).nth(num_found);
        sequence.missing.set(missing.copied());
        missing.is_some_and(is_announced)
    }

    /// The blocks that a waiting sequence need not compute, of the first layer group; all groups
    /// have what is needed of theirs.
    pub(crate) fn find_prefix(&self, sequence: &Sequence) -> Vec<BlockId> {
        let mut found = self.find_first(sequence);
        found.truncate(self.num_usable(sequence, &found));
        found
    }

    /// The blocks of the first group that a waiting sequence begins with and that are on the
    /// device, whether or not other groups have what goes with them. Its last token it always
    /// computes, and if its prompt is probed all of them.
    pub(crate) fn find_first(&self, sequence: &Sequence) -> Vec<BlockId> {
        if sequence.probes_prompt {
            return Vec::new();
        }
        self.cache.find(&sequence.chain, &sequence.tokens, self.most_found(sequence))
    }

    /// How many of these blocks a sequence can begin with if nothing is moved from the host.
    pub(crate) fn num_usable(&self, sequence: &Sequence, found: &[BlockId]) -> usize {
        sequence.tables.num_usable(found, found.len(), |_, _| false, &self.cache)
    }

    /// Most blocks that a sequence can begin with.
    pub(crate) fn most_found(&self, sequence: &Sequence) -> usize {
        (sequence.len().min(sequence.retention.most_found()) - 1) / self.config.block_size
    }
}
