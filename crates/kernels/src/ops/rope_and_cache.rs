//! Rotary position embedding, and writing keys and values to the KV cache.

use crate::{
    Budget, DevicePtr, Kernel, KernelError, KernelSpec, KvNumbers, KvShape, Launch, Source,
};

/// Adds up what a product left in parts, if it did; normalises (if asked) and rotates queries
/// in place; normalises and rotates keys and writes them and the values to the cache. A token
/// whose slot is `u32::MAX` writes nothing to the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RopeAndCache {
    cache: KvShape,
    interleaved: bool,
    qk_norm: bool,
}

/// Arguments of [`RopeAndCache`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct RopeAndCacheParams {
    /// `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`, bf16.
    pub qkv: DevicePtr,
    /// `[num_parts, ...]` of the same, f32, to be added up instead of reading `qkv`; 0 without.
    pub parts: DevicePtr,
    /// Of a token, f32: what is added to parts; 0 without.
    pub bias: DevicePtr,
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
    /// At most `head_dim`, as given to [`RopeAndCache::new`].
    pub rotary_dim: u32,
    pub eps: f32,
    pub num_parts: u32,
    /// 1 if a rotation of this step was enqueued before: `positions` and `slot_mapping` are then
    /// read before the kernel in front has ended.
    pub is_settled: u32,
    /// Zero.
    pub reserved: u32,
}

/// How pairs of a head's elements are turned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotation {
    /// Elements that are.
    pub dim: u32,
    /// Whether pairs are neighbours or half of `dim` apart.
    pub interleaved: bool,
    /// RMSNorm of every query and key head before.
    pub qk_norm: bool,
}

impl RopeAndCache {
    const THREADS: u32 = 128;
    /// Elements of a head that a lane has.
    const ELEMENTS: u32 = 16;

    /// The specialisation for such heads.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] if lanes cannot share heads and what is turned evenly.
    pub fn new(cache: KvShape, rotation: Rotation) -> Result<Self, KernelError> {
        const NAME: &str = "rope_and_cache";
        cache.check(NAME)?;
        let Rotation { dim, interleaved, qk_norm } = rotation;
        if dim.is_multiple_of(Self::ELEMENTS) && dim <= cache.head_dim {
            return Ok(Self { cache, interleaved, qk_norm });
        }
        let reason = format!(
            "{dim} of a head's {} elements are turned: it takes multiples of {}",
            cache.head_dim,
            Self::ELEMENTS
        );
        Err(KernelError::Unsupported { kernel: NAME, reason })
    }

    /// Lanes that share a head.
    const fn lanes(&self) -> u32 {
        (self.cache.head_dim / Self::ELEMENTS).next_power_of_two()
    }
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
                ("THREADS", Self::THREADS),
                ("LANES", self.lanes()),
                ("INTERLEAVED", u32::from(self.interleaved)),
                ("QK_NORM", u32::from(self.qk_norm)),
            ]
            .into_iter()
            .chain(self.cache.defines())
            .collect(),
            dynamic_smem: 0,
            params_bytes: size_of::<RopeAndCacheParams>(),
            budget: Budget {
                registers: 96,
                // Where lanes trade numbers.
                static_smem: match self.cache.numbers {
                    KvNumbers::Int4 => Self::THREADS / self.lanes() * self.cache.head_dim * 4,
                    KvNumbers::Bf16 | KvNumbers::Fp8 | KvNumbers::Int8 => 0,
                },
            },
        }
    }

    fn launch(&self, params: &RopeAndCacheParams) -> Launch {
        let heads = params.num_heads + 2 * params.num_kv_heads;
        Launch {
            grid: [params.num_tokens, (heads * self.lanes()).div_ceil(Self::THREADS), 1],
            block: [Self::THREADS, 1, 1],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_share_heads_and_what_is_turned_evenly() {
        let new = |head_dim, dim| {
            let cache = KvShape { numbers: KvNumbers::Bf16, head_dim, block_size: 16 };
            RopeAndCache::new(cache, Rotation { dim, interleaved: false, qk_norm: false })
        };
        for (head_dim, dim, lanes) in [(64, 64, 4), (96, 48, 8), (128, 128, 8), (256, 64, 16)] {
            assert_eq!(new(head_dim, dim).unwrap().lanes(), lanes);
        }
        for (head_dim, dim) in [(80, 20), (64, 80)] {
            let error = new(head_dim, dim).unwrap_err().to_string();
            assert!(error.contains(&format!("{dim} of a head's {head_dim}")), "{error}");
        }
    }
}
