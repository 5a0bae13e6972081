//! Memory of the KV cache.

use inflight_backend::{Backend, BackendError, KvDtype, KvLayer, KvLayout};

use crate::{LayerGroups, ModelConfig};

/// Bytes that one block takes in the KV cache, keys and values: of all layers together, or of those
/// of one group.
pub fn kv_bytes_per_block(config: &ModelConfig, kv_dtype: KvDtype, block_size: usize) -> usize {
    let layout = KvLayout::new(kv_dtype, config.attention_shape(block_size));
    layout.block_bytes().saturating_mul(2 * LayerGroups::new(config).width())
}

/// Allocates the KV cache: `num_blocks` blocks of `block_size` tokens, of as many layers as a group
/// has. See [`LayerGroups`] for which layer is where.
///
/// # Errors
/// [`BackendError::OutOfMemory`].
pub fn kv_layers<B: Backend>(
    backend: &B,
    config: &ModelConfig,
    num_blocks: usize,
    block_size: usize,
) -> Result<Vec<KvLayer<B>>, BackendError> {
    let layout = backend.kv_layout(config.attention_shape(block_size));
    let bytes = num_blocks.checked_mul(layout.block_bytes());
    let bytes = bytes.ok_or_else(|| {
        let reason = format!("a KV cache of {num_blocks} blocks of {block_size} tokens");
        BackendError::Unsupported(format!("{reason} has more bytes than can be addressed"))
    })?;
    let layer = |_| {
        let keys = backend.alloc_kv("keys", bytes)?;
        Ok(KvLayer { keys, values: backend.alloc_kv("values", bytes)? })
    };
    (0..LayerGroups::new(config).width()).map(layer).collect()
}
