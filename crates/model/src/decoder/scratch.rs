//! Buffers of activations, used by one step after the other.

use inflight_backend::{Backend, BackendError, Dtype, StepCapacity};

use crate::ModelConfig;

/// Activations of a forward pass, on the device. Only the compute stream touches them.
#[derive(Clone)]
pub struct Scratch<B: Backend> {
    /// State between layers, `[max_tokens, hidden_size]`.
    pub(super) hidden: B::Buffer,
    /// What attention or the feed-forward network gives, `[max_tokens, hidden_size]`, where it is
    /// normed before it joins the state.
    pub(super) branch: Option<B::Buffer>,
    /// Normed state, `[max(max_tokens, max_rows), hidden_size]`.
    pub(super) normed: B::Buffer,
    /// Queries, keys and values, `[max_tokens, qkv_len]`.
    pub(super) qkv: B::Buffer,
    /// Attention before its output matrix, `[max_tokens, q_len]`.
    pub(super) attended: B::Buffer,
    /// Both halves of the feed-forward network, `[max_tokens, 2 * ffn_size]`.
    pub(super) gate_up: B::Buffer,
    /// Their product, `[max_tokens, ffn_size]`.
    pub(super) ffn: B::Buffer,
    /// State of the sampled tokens, `[max_rows, hidden_size]`.
    pub(super) sampled: B::Buffer,
    /// Logits of the sampled tokens, `[max_rows, vocab_size]`.
    pub(super) logits: B::Buffer,
}

impl<B: Backend> Scratch<B> {
    /// Buffers for the largest step.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`].
    pub fn new(
        backend: &B,
        config: &ModelConfig,
        capacity: StepCapacity,
    ) -> Result<Self, BackendError> {
        let (tokens, rows) = (capacity.max_tokens, capacity.max_rows);
        let alloc = |label, rows: usize, len: usize| {
            backend.alloc_activations(label, rows.saturating_mul(len))
        };
        let alloc_f32 =
            |label, rows: usize, len: usize| backend.alloc_f32(label, rows.saturating_mul(len));
        Ok(Self {
            hidden: alloc_f32("hidden", tokens, config.hidden_size)?,
            branch: match config.style.post_norms {
                true => Some(alloc_f32("branch", tokens, config.hidden_size)?),
                false => None,
            },
            normed: alloc("normed", tokens.max(rows), config.hidden_size)?,
            qkv: alloc("qkv", tokens, config.qkv_len())?,
            attended: alloc("attended", tokens, config.q_len())?,
            gate_up: alloc("gate_up", tokens, 2 * config.ffn_size)?,
            ffn: alloc("ffn", tokens, config.ffn_size)?,
            sampled: alloc_f32("sampled", rows, config.hidden_size)?,
            logits: alloc_f32("logits", rows, config.vocab_size)?,
        })
    }

    /// State of the last step's sampled tokens, not normed, `[max_rows, hidden_size]`, f32.
    pub fn sampled(&self) -> &B::Buffer {
        &self.sampled
    }

    /// Logits of the last step's sampled tokens, `[max_rows, vocab_size]`.
    pub fn logits(&self) -> &B::Buffer {
        &self.logits
    }
}

/// Bytes that [`Scratch::new`] takes on a device whose activations are of type `activations`.
pub fn scratch_bytes(config: &ModelConfig, capacity: StepCapacity, activations: Dtype) -> usize {
    let (tokens, rows) = (capacity.max_tokens, capacity.max_rows);
    let wide = config.qkv_len() + config.q_len() + 3 * config.ffn_size;
    let narrow = tokens.max(rows).saturating_mul(config.hidden_size);
    let activation_len = tokens.saturating_mul(wide).saturating_add(narrow);
    let num_states = if config.style.post_norms { 2 } else { 1 };
    let f32_len = tokens
        .saturating_mul(num_states * config.hidden_size)
        .saturating_add(rows.saturating_mul(config.hidden_size + config.vocab_size));
    let bytes = |len: usize, dtype: Dtype| len.saturating_mul(dtype.block_bytes());
    bytes(activation_len, activations).saturating_add(bytes(f32_len, Dtype::F32))
}
