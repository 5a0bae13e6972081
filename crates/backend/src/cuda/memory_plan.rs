//! Dividing a GPU's memory: what weights leave, less what steps need, is the KV cache's.

use std::fmt;

use crate::BackendError;

/// What the driver, cuBLASLt's kernels, captured graphs and trials of matrix products take besides
/// buffers, in bytes: about half of it was seen on an H200.
const OVERHEAD_BYTES: usize = 768 << 20;

/// How a GPU's memory is divided, in bytes. Made when the weights are loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// All there is.
    pub total: usize,
    /// Left to others, as the utilisation asks.
    pub unused: usize,
    /// In use already: weights, and whatever else runs on the GPU.
    pub weights: usize,
    /// What steps need: activations, logits, sampling state, graphs.
    pub working: usize,
    /// The KV cache's.
    pub kv_cache: usize,
}

impl MemoryPlan {
    /// Divides `total` bytes, of which `free` are free, using at most the fraction `utilization`;
    /// steps need buffers of `working` bytes.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] if `utilization` is no fraction or nothing is left.
    pub fn new(
        (free, total): (usize, usize),
        utilization: f64,
        working: usize,
    ) -> Result<Self, BackendError> {
        if !(utilization > 0.0 && utilization <= 1.0) {
            let reason = format!("a GPU memory utilization of {utilization} is not in (0, 1]");
            return Err(BackendError::Unsupported(reason));
        }
        let unused = total - (total as f64 * utilization) as usize;
        let weights = total.saturating_sub(free);
        let working = working.saturating_add(OVERHEAD_BYTES);
        let taken = unused.saturating_add(weights).saturating_add(working);
        match total.checked_sub(taken) {
            Some(kv_cache) => Ok(Self { total, unused, weights, working, kv_cache }),
            None => {
                let [weights, working, total] = [weights, working, total].map(gib);
                Err(BackendError::Unsupported(format!(
                    "no GPU memory is left for the KV cache: weights take {weights:.1} GiB, steps \
                     {working:.1} GiB of {total:.1} GiB, of which {utilization} may be used"
                )))
            }
        }
    }

    /// Blocks of the KV cache that fit.
    pub fn num_blocks(&self, bytes_per_block: usize) -> usize {
        self.kv_cache / bytes_per_block.max(1)
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { total, unused, weights, working, kv_cache } = *self;
        writeln!(f, "GPU memory  {:8.2} GiB", gib(total))?;
        writeln!(f, "  weights   {:8.2} GiB", gib(weights))?;
        writeln!(f, "  steps     {:8.2} GiB", gib(working))?;
        writeln!(f, "  KV cache  {:8.2} GiB", gib(kv_cache))?;
        write!(f, "  unused    {:8.2} GiB", gib(unused))
    }
}

fn gib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: usize = 1 << 30;

    #[test]
    fn the_kv_cache_gets_what_is_left() {
        // 140 GiB, 15 GiB of weights, 90 % to be used, 1.25 GiB of buffers and 0.75 GiB besides.
        let plan = MemoryPlan::new((125 * GIB, 140 * GIB), 0.9, 5 * GIB / 4).unwrap();
        assert_eq!(plan.unused, 14 * GIB);
        assert_eq!((plan.weights, plan.working, plan.kv_cache), (15 * GIB, 2 * GIB, 109 * GIB));
        // Blocks of 16 tokens of an 8B model: 2 MiB.
        assert_eq!(plan.num_blocks(2 << 20), 109 * 512);
        let sum = plan.unused + plan.weights + plan.working + plan.kv_cache;
        assert_eq!(sum, plan.total);
    }

    #[test]
    fn too_little_memory_and_senseless_fractions_are_refused() {
        let error = MemoryPlan::new((3 * GIB, 16 * GIB), 0.8, GIB).unwrap_err().to_string();
        assert!(error.contains("weights take 13.0 GiB"), "{error}");
        for utilization in [0.0, -1.0, 1.1, f64::NAN] {
            assert!(MemoryPlan::new((GIB, GIB), utilization, 0).is_err(), "{utilization}");
        }
    }
}
