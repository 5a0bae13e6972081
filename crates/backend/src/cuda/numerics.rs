//! How a GPU computes where there is a choice: what its results' last bits depend on.

use inflight_kernels::KvNumbers;
pub use inflight_kernels::ops::decode_attention::Softmax;

use crate::{BackendError, KvDtype};

/// The choices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numerics {
    /// Element type of the KV cache: Bf16, Fp8, Int8 or Int4.
    pub kv_dtype: KvDtype,
    /// How rows of one new token weigh what they see.
    pub softmax: Softmax,
    /// Whether a token's numbers never depend on its batch or on how its prompt was cut, to the
    /// last bit: every product and all attention by one method each, whatever the number of rows.
    /// Slower.
    pub batch_invariant: bool,
    /// Whether a prefix that many rows share is read once for all of them.
    pub cascade: bool,
}

impl Default for Numerics {
    fn default() -> Self {
        Self {
            kv_dtype: KvDtype::Bf16,
            softmax: Softmax::Online,
            batch_invariant: false,
            cascade: false,
        }
    }
}

impl Numerics {
    /// Whether shared prefixes are read once. Which rows share some depends on the batch.
    pub(super) fn cascades(&self) -> bool {
        self.cascade && !self.batch_invariant
    }

    /// The KV cache's numbers as kernels name them.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`]: no kernel has them.
    pub(super) fn kv_numbers(&self) -> Result<KvNumbers, BackendError> {
        match self.kv_dtype {
            KvDtype::Bf16 => Ok(KvNumbers::Bf16),
            KvDtype::Fp8 => Ok(KvNumbers::Fp8),
            KvDtype::Int8 => Ok(KvNumbers::Int8),
            KvDtype::Int4 => Ok(KvNumbers::Int4),
            other @ (KvDtype::F32 | KvDtype::F16) => {
                Err(BackendError::Unsupported(format!("a KV cache of {other} on a GPU")))
            }
        }
    }
}
