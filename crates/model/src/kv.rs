//! Memory of the KV cache.

use inflight_backend::{Backend, BackendError, Dtype, KvLayer};

use crate::ModelConfig;

/// Bytes that one token takes in the KV cache of all layers together.
pub fn kv_bytes_per_token(config: &ModelConfig, kv_dtype: Dtype) -> usize {
    let elements = 2 * config.num_layers * config.kv_len();
    elements / kv_dtype.block_len() * kv_dtype.block_bytes()
}

/// Allocates the KV cache of every layer: `num_blocks` blocks of `block_size` tokens.
///
/// # Errors
/// [`BackendError::OutOfMemory`].
pub fn kv_layers<B: Backend>(
    backend: &B,
    config: &ModelConfig,
    num_blocks: usize,
    block_size: usize,
) -> Result<Vec<KvLayer<B>>, BackendError> {
    let num_tokens = num_blocks.checked_mul(block_size);
    let len = num_tokens.and_then(|tokens| tokens.checked_mul(config.kv_len()));
    let len = len.ok_or_else(|| {
        let reason = format!("a KV cache of {num_blocks} blocks of {block_size} tokens");
        BackendError::Unsupported(format!("{reason} has more elements than can be addressed"))
    })?;
    let layer = |_| {
        let keys = backend.alloc_kv("keys", len)?;
        Ok(KvLayer { keys, values: backend.alloc_kv("values", len)? })
    };
    (0..config.num_layers).map(layer).collect()
}
