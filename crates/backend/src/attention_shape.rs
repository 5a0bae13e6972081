//! Sizes of attention.

/// Head counts and sizes of an attention layer, and the KV cache's block size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Tokens of a block of the KV cache.
    pub block_size: usize,
}

impl AttentionShape {
    /// Elements of one token's query, key and value heads together.
    pub const fn qkv_len(&self) -> usize {
        (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
    }

    /// Elements of one token's query heads.
    pub const fn q_len(&self) -> usize {
        self.num_heads * self.head_dim
    }
}
