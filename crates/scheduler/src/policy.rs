//! How batches are composed and who goes first: what a user may choose.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{SchedulerConfig, SchedulerError};

/// What decides beside the limits. Unlike them it may change between any two plans.
///
/// The default is the best throughput: prompts in chunks beside the decodes, first come first
/// served, admitted as soon as there is room.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Policy {
    /// When sequences may join.
    pub batching: Batching,
    /// Who shares a batch with whom.
    pub mixing: Mixing,
    /// Who goes first.
    pub order: Order,
    /// When prompts may hold up decodes.
    pub gate: Gate,
    /// Most tokens of prompts in a batch; `None`: all that the token budget leaves.
    pub max_batch_prefill_tokens: Option<usize>,
    /// Most tokens that running sequences may come to have, all together, prompts and everything
    /// they may generate: nobody is then ever preempted. `None`: blocks are given out as they are
    /// needed, which lets far more sequences run.
    pub max_batch_total_tokens: Option<usize>,
    /// What the plans aim at beside throughput.
    pub targets: Targets,
    /// Longest time in the queue before a first token is computed; `None`: no limit.
    pub max_queue_time: Option<Duration>,
}

/// When sequences may join those that run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Batching {
    /// At every step.
    ///
    /// # Source
    /// Yu et al., "Orca", 2022, section 3.2.
    #[default]
    Continuous,
    /// When the last sequence of the batch has ended, as before Orca: for comparison. Each member
    /// reserves what it may come to need. Prompts are computed before the batch's first decode.
    ///
    /// A member that has ended leaves no row behind, so this is faster than padding it to the end
    /// would be.
    Static {
        /// Most sequences of a batch.
        batch_size: usize,
    },
}

/// Who shares a batch with whom.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mixing {
    /// Chunks of prompts fill what the decodes leave of the token budget: no decode sits out.
    ///
    /// # Source
    /// Agrawal et al., "Sarathi-Serve", 2024, section 4.
    #[default]
    Chunked,
    /// Prompts have batches of their own, and those come first: first tokens come soonest, and
    /// decodes wait for as long as prompts come and find room.
    PrefillFirst,
    /// Prompts have batches of their own, and only when the [`Gate`] opens or nobody decodes.
    DecodeFirst,
}

/// Who goes first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// Whoever came first.
    #[default]
    Fcfs,
    /// The lowest priority number, then whoever came first; the others give way when blocks lack.
    /// Higher numbers starve for as long as lower ones come.
    Priority,
    /// The tenant that got the least service so far.
    ///
    /// # Source
    /// Sheng et al., "Fairness in Serving Large Language Models", 2024, section 4 (VTC).
    Fair,
}

/// When waiting prompts may hold up decodes.
///
/// # Source
/// text-generation-inference, `backends/v3/src/backend.rs` and `docs/source/reference/launcher.md`:
/// the meaning of its two flags. There they are without effect on models that chunk prompts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Gate {
    /// Prompts wait until there are this many for each running sequence. 0: they never wait.
    pub waiting_served_ratio: f64,
    /// They wait for so many steps without a prompt at most. 0: as many as it takes.
    pub max_waiting_tokens: u64,
}

impl Gate {
    /// What text-generation-inference does unless told otherwise.
    pub const USUAL: Self = Self { waiting_served_ratio: 0.3, max_waiting_tokens: 20 };
}

/// Latencies to stay within. Without any, plans aim at throughput alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Targets {
    /// Time between two tokens of a running sequence, for all but one of a hundred. Bounds prompts
    /// in each batch and the sequences that run.
    pub itl: Option<Duration>,
    /// Time from a request's arrival to its first token. Spreads prompt tokens over those who wait,
    /// by need; where both cannot be met, the time between tokens is kept.
    pub ttft: Option<Duration>,
}

impl Policy {
    /// Whether prompts and decodes may share a batch, now that all flags are considered.
    pub(crate) fn effective_mixing(&self) -> Mixing {
        match self.batching {
            Batching::Continuous => self.mixing,
            Batching::Static { .. } => Mixing::PrefillFirst,
        }
    }

    /// Checks that it can work within `limits`.
    pub(crate) fn validate(&self, limits: &SchedulerConfig) -> Result<(), SchedulerError> {
        let zero = |field| Err(SchedulerError::ZeroLimit { field });
        if self.batching == (Batching::Static { batch_size: 0 }) {
            return zero("static batch size");
        }
        if self.max_batch_prefill_tokens == Some(0) {
            return zero("max_batch_prefill_tokens");
        }
        let targets = [
            ("target_itl", self.targets.itl),
            ("target_ttft", self.targets.ttft),
            ("max_queue_time", self.max_queue_time),
        ];
        for (field, target) in targets {
            if target == Some(Duration::ZERO) {
                return zero(field);
            }
        }
        if self.targets.itl.is_some() && self.effective_mixing() != Mixing::Chunked {
            return Err(SchedulerError::TargetNeedsChunks);
        }
        let ratio = self.gate.waiting_served_ratio;
        if !(ratio.is_finite() && ratio >= 0.0) {
            return Err(SchedulerError::BadRatio { ratio });
        }
        let largest = limits.max_model_len.min(limits.num_blocks * limits.block_size);
        match self.max_batch_total_tokens {
            Some(max_batch_total_tokens) if max_batch_total_tokens < largest => {
                Err(SchedulerError::TotalBelowOne { max_batch_total_tokens, largest })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryConfig, Preemption};

    #[test]
    fn each_bad_choice_is_named() {
        let limits = SchedulerConfig {
            other_windows: Vec::new(),
            max_num_seqs: 4,
            max_num_batched_tokens: 8,
            max_model_len: 100,
            block_size: 16,
            num_blocks: 5,
            memory: MemoryConfig {
                prefix_caching: false,
                preemption: Preemption::Recompute,
                num_swap_blocks: 0,
                keeps_cold_prefixes: false,
                max_moved_blocks: 0,
            },
        };
        let check = |damage: fn(&mut Policy), expected: &str| {
            let mut policy = Policy::default();
            assert_eq!(policy.validate(&limits), Ok(()));
            damage(&mut policy);
            let message = policy.validate(&limits).unwrap_err().to_string();
            assert!(message.starts_with(expected), "{message}");
        };
        check(|p| p.batching = Batching::Static { batch_size: 0 }, "static batch size must be");
        check(|p| p.max_batch_prefill_tokens = Some(0), "max_batch_prefill_tokens must be");
        check(|p| p.targets.itl = Some(Duration::ZERO), "target_itl must be");
        check(|p| p.targets.ttft = Some(Duration::ZERO), "target_ttft must be");
        check(
            |p| {
                p.targets.itl = Some(Duration::from_millis(5));
                p.mixing = Mixing::DecodeFirst;
            },
            "target_itl needs continuous batching",
        );
        check(|p| p.max_queue_time = Some(Duration::ZERO), "max_queue_time must be");
        check(|p| p.gate.waiting_served_ratio = f64::NAN, "waiting_served_ratio (NaN) must be");
        check(|p| p.gate.waiting_served_ratio = -0.1, "waiting_served_ratio (-0.1) must be");
        // Five blocks of 16: the longest sequence that can run has 80 tokens.
        check(|p| p.max_batch_total_tokens = Some(79), "max_batch_total_tokens (79) must be at");
    }
}
