//! Rotary position embedding, and writing keys and values to the KV cache.

use crate::{Budget, DevicePtr, Kernel, KernelSpec, KvShape, Launch, Source};

/// Normalises (if asked) and rotates queries in place; normalises and rotates keys and writes them
/// and the values to the cache. A token whose slot is `u32::MAX` writes nothing to the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RopeAndCache {
    /// Heads are even, at most 512 elements.
    pub cache: KvShape,
    /// Whether pairs are neighbours or half a head apart.
    pub interleaved: bool,
    /// RMSNorm of every query and key head before rotation.
    pub qk_norm: bool,
}

/// Arguments of [`RopeAndCache`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct RopeAndCacheParams {
    /// `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`, bf16.
    pub qkv: DevicePtr,
    /// `[max_positions, rotary_dim]`, f32: cosines, then sines.
    pub rotary_table: DevicePtr,
    /// `[head_dim]`, f32; 0 without norm.
    pub q_norm: DevicePtr,
    /// `[head_dim]`, f32; 0 without norm.
    pub k_norm: DevicePtr,
    /// Strips as in `csrc/kv_cache.cuh`.
    pub keys: DevicePtr,
    /// As `keys`.
    pub values: DevicePtr,
    /// `[num_tokens]`.
    pub positions: DevicePtr,
    /// `[num_tokens]`.
    pub slot_mapping: DevicePtr,
    pub num_tokens: u32,
    pub num_heads: u32,
    pub num_kv_heads: u32,
    /// Even, at most `head_dim`.
    pub rotary_dim: u32,
    pub eps: f32,
    /// Zero.
    pub reserved: u32,
}

impl RopeAndCache {
    /// One warp per head.
    const WARPS: u32 = 8;
}

impl Kernel for RopeAndCache {
    type Params = RopeAndCacheParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source {
                file: "rope_and_cache.cu",
                text: include_str!("../../csrc/rope_and_cache.cu"),
            },
            entry: "rope_and_cache",
            defines: [
                ("WARPS", Self::WARPS),
                ("INTERLEAVED", u32::from(self.interleaved)),
                ("QK_NORM", u32::from(self.qk_norm)),
            ]
            .into_iter()
            .chain(self.cache.defines())
            .collect(),
            dynamic_smem: 0,
            params_bytes: size_of::<RopeAndCacheParams>(),
            budget: Budget { registers: 64, static_smem: Self::WARPS * self.cache.head_dim * 4 },
        }
    }

    fn launch(&self, params: &RopeAndCacheParams) -> Launch {
        let heads = params.num_heads + 2 * params.num_kv_heads;
        Launch {
            grid: [params.num_tokens, heads.div_ceil(Self::WARPS), 1],
            block: [32 * Self::WARPS, 1, 1],
        }
    }
}
