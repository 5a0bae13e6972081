//! How the KV cache's memory is used: what is kept, and how sequences give way.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Rules for the KV cache, fixed for a scheduler's life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryConfig {
    /// Whether full blocks are kept, while there is room, for later sequences that begin with the
    /// same tokens. Costs a hash per block; on unless outputs must not depend on what came before.
    pub prefix_caching: bool,
    /// How a sequence gives way when blocks run out. Those that keep cold prefixes go by it, too:
    /// [`Preemption::Swap`] has all that is found moved, otherwise it is what was measured to be
    /// faster.
    pub preemption: Preemption,
    /// Blocks of host memory for sequences that gave way. Default 0: they are always recomputed.
    pub num_swap_blocks: usize,
    /// Whether what is about to be evicted from the prefix cache is copied to those of the host's
    /// blocks that no sequence needs, and comes back when a prompt begins with it. Costs a SHA-256
    /// per block.
    pub keeps_cold_prefixes: bool,
    /// Most blocks that one batch moves in each direction: more free memory sooner, and may hold up
    /// a batch's inputs and outputs, which use the same streams. From the host come more where
    /// steps were measured to take long enough to hide that.
    pub max_moved_blocks: usize,
}

impl Default for MemoryConfig {
    /// Prefixes are cached, nothing is swapped.
    fn default() -> Self {
        Self {
            prefix_caching: true,
            preemption: Preemption::Auto,
            num_swap_blocks: 0,
            keeps_cold_prefixes: false,
            max_moved_blocks: 32,
        }
    }
}

/// How a sequence gives way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Preemption {
    /// By whichever is faster for it, as measured.
    Auto,
    /// It drops its keys and values and computes them again.
    Recompute,
    /// Its keys and values move to the host and back, while there is room.
    Swap,
}

/// What giving way costs, measured by the engine.
///
/// # Units
/// Nanoseconds of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoveCosts {
    /// Computing one token of a prompt.
    pub token_ns: u64,
    /// Moving one block to the host.
    pub swap_out_ns: u64,
    /// Moving one block from the host.
    pub swap_in_ns: u64,
}

impl MoveCosts {
    /// Whether moving `num_blocks` there and back takes less time than computing `num_tokens`.
    #[must_use]
    pub fn swap_is_faster(&self, num_blocks: usize, num_tokens: usize) -> bool {
        let moving = self.swap_out_ns.saturating_add(self.swap_in_ns);
        moving.saturating_mul(num_blocks as u64) < self.token_ns.saturating_mul(num_tokens as u64)
    }

    /// Whether moving `num_blocks` from the host, in no less time than `steps` take, is over before
    /// `num_tokens` are computed.
    #[must_use]
    pub fn fetch_is_faster(&self, num_blocks: usize, steps: Duration, num_tokens: usize) -> bool {
        let moving = self.swap_in_ns.saturating_mul(num_blocks as u64);
        let waiting = u64::try_from(steps.as_nanos()).unwrap_or(u64::MAX);
        moving.max(waiting) < self.token_ns.saturating_mul(num_tokens as u64)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::MoveCosts;

    #[test]
    fn the_faster_way_is_chosen() {
        // 8B on an H200: 2 MiB a block at 50 GB/s are 42 µs each way, a token takes 30 µs.
        let costs = MoveCosts { token_ns: 30_000, swap_out_ns: 42_000, swap_in_ns: 42_000 };
        assert!(costs.swap_is_faster(10, 160));
        assert!(!costs.swap_is_faster(10, 28), "28 tokens take as long as ten blocks");
        assert!(!MoveCosts { token_ns: 0, ..costs }.swap_is_faster(1, 16));
        let step = Duration::from_millis(10);
        assert!(costs.fetch_is_faster(10, Duration::ZERO, 160));
        assert!(!costs.fetch_is_faster(10, step, 160), "they are computed in 4.8 ms");
        assert!(costs.fetch_is_faster(100, step, 1600));
    }
}
