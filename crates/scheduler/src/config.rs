//! The limits a scheduler works under.

use serde::{Deserialize, Serialize};

use crate::{MemoryConfig, SchedulerError};

/// So many prompt tokens of a batch may be probed at least, however few sequences run.
const LEAST_MAX_PROBES: usize = 16;

/// Limits of one scheduler, fixed for its life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedulerConfig {
    /// Most sequences that run at once, and most rows of a batch. Each costs one set of sampling
    /// state on the device.
    pub max_num_seqs: usize,
    /// Token budget: most tokens of a batch. Larger makes prefills faster and each step longer,
    /// which every running decode feels. At least `max_num_seqs`.
    pub max_num_batched_tokens: usize,
    /// Most tokens of a sequence, prompt and generated ones together.
    pub max_model_len: usize,
    /// Tokens in one block of the KV cache.
    pub block_size: usize,
    /// Blocks of the KV cache. May hold less than one sequence of `max_model_len`; requests that
    /// need more are refused.
    pub num_blocks: usize,
    /// The model's layer groups behind the first, each with block tables of its own over the same
    /// blocks: how far back its layers look; `None`: on everything. The first group looks back the
    /// furthest; how far says each sequence's retention.
    #[serde(default)]
    pub other_windows: Vec<Option<usize>>,
    /// What is kept in it, and how sequences give way.
    pub memory: MemoryConfig,
}

impl SchedulerConfig {
    /// Most prompt tokens of a batch that are probed: there is room for so many rows of logits.
    #[must_use]
    pub fn max_probes(&self) -> usize {
        Self::max_probes_of(self.max_num_seqs, self.max_num_batched_tokens)
    }

    /// The same for these limits.
    #[must_use]
    pub fn max_probes_of(max_num_seqs: usize, max_num_batched_tokens: usize) -> usize {
        max_num_seqs.max(LEAST_MAX_PROBES.min(max_num_batched_tokens))
    }

    /// Checks that the limits work together.
    pub(crate) fn validate(&self) -> Result<(), SchedulerError> {
        let positive = [
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("max_model_len", self.max_model_len),
            ("block_size", self.block_size),
            ("num_blocks", self.num_blocks),
        ];
        for (field, value) in positive {
            if value == 0 {
                return Err(SchedulerError::ZeroLimit { field });
            }
        }
        let Self { max_num_seqs, max_num_batched_tokens, block_size, num_blocks, .. } = *self;
        if u32::try_from(max_num_seqs).is_err() {
            return Err(SchedulerError::TooManySequences { max_num_seqs });
        }
        if max_num_batched_tokens < max_num_seqs {
            return Err(SchedulerError::BudgetBelowSequences {
                max_num_batched_tokens,
                max_num_seqs,
            });
        }
        let MemoryConfig { num_swap_blocks, max_moved_blocks, .. } = self.memory;
        if u32::try_from(num_swap_blocks).is_err() {
            return Err(SchedulerError::SwapSpaceTooLarge { num_swap_blocks });
        }
        if num_swap_blocks > 0 && max_moved_blocks == 0 {
            return Err(SchedulerError::ZeroLimit { field: "max_moved_blocks" });
        }
        let places = num_blocks.checked_mul(block_size);
        if places.is_none_or(|places| u32::try_from(places).is_err()) {
            return Err(SchedulerError::CacheTooLarge { num_blocks, block_size });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::SchedulerConfig;
    use crate::{MemoryConfig, Preemption};

    #[test]
    fn each_bad_limit_is_named() {
        let good = SchedulerConfig {
            max_num_seqs: 4,
            max_num_batched_tokens: 4,
            max_model_len: 1,
            block_size: 16,
            num_blocks: 1,
            other_windows: Vec::new(),
            memory: MemoryConfig {
                prefix_caching: true,
                preemption: Preemption::Auto,
                num_swap_blocks: 1,
                keeps_cold_prefixes: false,
                max_moved_blocks: 1,
            },
        };
        assert_eq!(good.validate(), Ok(()));
        let check = |damage: fn(&mut SchedulerConfig), expected: &str| {
            let mut config = good.clone();
            damage(&mut config);
            let message = config.validate().unwrap_err().to_string();
            assert!(message.starts_with(expected), "{message}");
        };
        check(|c| c.max_num_seqs = 0, "max_num_seqs must be at least 1");
        check(|c| c.max_num_batched_tokens = 0, "max_num_batched_tokens must be at least 1");
        check(|c| c.max_model_len = 0, "max_model_len must be at least 1");
        check(|c| c.block_size = 0, "block_size must be at least 1");
        check(|c| c.num_blocks = 0, "num_blocks must be at least 1");
        check(|c| c.max_num_batched_tokens = 3, "max_num_batched_tokens (3) must be at least");
        check(|c| c.max_num_seqs = 1 << 32, "max_num_seqs (4294967296) must fit 32 bits");
        check(|c| c.memory.max_moved_blocks = 0, "max_moved_blocks must be at least 1");
        check(|c| c.memory.num_swap_blocks = 1 << 32, "num_swap_blocks (4294967296) must fit");
        check(|c| c.num_blocks = 1 << 28, "num_blocks (268435456) times block_size (16) must");
        check(|c| c.num_blocks = usize::MAX, "num_blocks (18446744073709551615) times");
    }
}
