//! The engine's frozen configuration.

use inflight_backend::{
    Dtype, HistoryShape, OutputLayout, SharedPrefixes, StepCapacity, late::late_words,
};
use inflight_model::{LayerGroups, ModelConfig};
use inflight_scheduler::{MemoryConfig, SchedulerConfig};

use crate::{KvKeep, KvTerms, RequestLimits};

/// What the engine is told once, when it starts. Every value is resolved: no `auto`, no -1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// Whether batch N+1 is planned and launched while batch N computes.
    pub overlap: bool,
    /// Most sequences in a batch. Each costs sampling state of one word per vocabulary entry.
    pub max_num_seqs: usize,
    /// Most tokens in a batch: prefill chunks and decode rows together. Larger prefills faster and
    /// makes running sequences wait longer for their next token.
    pub max_num_batched_tokens: usize,
    /// Most tokens of a sequence.
    pub max_model_len: usize,
    /// Tokens of a block of the KV cache.
    pub block_size: usize,
    /// Blocks of the KV cache.
    pub num_blocks: usize,
    /// What is kept in it, and how sequences give way when it is full.
    pub memory: MemoryConfig,
    /// What requests keep in it that do not say.
    pub kv_keep: KvKeep,
    /// Most requests running and waiting; over it callers are refused at once.
    pub max_outstanding: usize,
}

impl EngineConfig {
    /// Bytes of device memory that an engine takes besides weights and KV cache, on a device whose
    /// activations are of type `activations`.
    pub fn working_bytes(&self, model: &ModelConfig, activations: Dtype) -> usize {
        let capacity = self.step_capacity(model);
        let outputs = OutputLayout { max_rows: self.output_rows() };
        // One set of inputs unpacked, and in both slots inputs and outputs.
        let num_late = late_words(self.max_num_seqs, model.vocab_size);
        let num_slot_words = capacity.shape().num_words()
            + outputs.num_words()
            + num_late
            // Probes: inputs and outputs.
            + self.probe_capacity().shape().num_words()
            + outputs.num_words()
            + self.history_capacity().num_words();
        let num_unpacked = capacity.shape().num_words() + self.probe_capacity().shape().num_words();
        let num_words = num_unpacked + 2 * num_slot_words;
        // Token counts, and logits with penalties applied.
        let state = (self.max_num_seqs + self.output_rows()) * model.vocab_size;
        inflight_model::scratch_bytes(model, self.scratch_capacity(model), activations)
            .saturating_add(4 * (num_words + state))
    }

    pub(crate) fn scheduler(&self, groups: &LayerGroups) -> SchedulerConfig {
        SchedulerConfig {
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            max_model_len: self.max_model_len,
            block_size: self.block_size,
            num_blocks: self.num_blocks,
            other_windows: groups.other_windows().to_vec(),
            memory: self.memory.clone(),
        }
    }

    pub(crate) fn limits(&self, model: &ModelConfig, cuts_prompts: bool) -> RequestLimits {
        RequestLimits {
            max_model_len: self.max_model_len,
            kv_cache_tokens: self.num_blocks * self.block_size,
            vocab_size: model.vocab_size,
            kv: KvTerms { cuts_prompts, ..self.kv_terms(model) },
        }
    }

    /// Most blocks that a sequence takes at once, if the first of the model's layer groups sees all
    /// that is kept.
    pub fn blocks_per_sequence(&self, model: &ModelConfig) -> usize {
        let terms = KvTerms { widest_window: None, ..self.kv_terms(model) };
        terms.most_blocks(self.max_model_len)
    }

    /// What decides how many tokens a request may have, given what it keeps.
    pub fn kv_terms(&self, model: &ModelConfig) -> KvTerms {
        KvTerms {
            usual: self.kv_keep,
            block_size: self.block_size,
            max_row_len: self.max_num_batched_tokens,
            ..KvTerms::of(model)
        }
    }

    /// Most tokens that a step counts without computing them.
    pub(crate) fn history_capacity(&self) -> HistoryShape {
        HistoryShape { num_tokens: self.max_model_len, num_rows: self.max_num_seqs }
    }

    /// Rows of logits, and of outputs: for all sequences, and for all probes of a step.
    pub(crate) fn output_rows(&self) -> usize {
        SchedulerConfig::max_probes_of(self.max_num_seqs, self.max_num_batched_tokens)
    }

    /// What a step's activations have room for.
    pub(crate) fn scratch_capacity(&self, model: &ModelConfig) -> StepCapacity {
        StepCapacity { max_rows: self.output_rows(), ..self.step_capacity(model) }
    }

    /// What a step's probes have room for: no tokens of their own, but rows that are sampled.
    pub(crate) fn probe_capacity(&self) -> StepCapacity {
        let max_rows = self.output_rows();
        StepCapacity {
            max_tokens: 1,
            max_rows,
            max_blocks: 1,
            max_bias: max_rows,
            num_more_groups: 0,
            max_prefixes: 0,
        }
    }

    pub(crate) fn step_capacity(&self, model: &ModelConfig) -> StepCapacity {
        let terms = KvTerms { usual: KvKeep::All, widest_window: None, ..self.kv_terms(model) };
        let blocks_per_sequence = terms.most_blocks(self.max_model_len);
        StepCapacity {
            max_tokens: self.max_num_batched_tokens,
            max_rows: self.max_num_seqs,
            max_blocks: self.max_num_seqs * blocks_per_sequence.min(self.num_blocks),
            max_bias: self.max_num_seqs * RequestLimits::MAX_LOGIT_BIAS,
            num_more_groups: terms.other_windows.as_slice().len(),
            max_prefixes: SharedPrefixes::MAX,
        }
    }
}
