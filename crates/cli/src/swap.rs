//! Host memory for requests that gave way.

use anyhow::{Result, ensure};
use inflight_engine::{EngineConfig, Preemption};

use crate::args::MemoryArgs;

/// What is taken unless told otherwise, in bytes.
const USUAL_BYTES: u64 = 4 << 30;
/// At most this share of the machine's memory is taken unless told otherwise.
const USUAL_SHARE: u64 = 8;
/// What one batch moves in each direction at most, in bytes: a millisecond of PCIe 5, so that
/// inputs and outputs of steps do not wait long behind it.
const MOST_MOVED_BYTES: usize = 64 << 20;

/// Bytes of host memory that may be taken.
pub(crate) fn resolve_swap_bytes(args: &MemoryArgs, memory_bytes: u64) -> Result<usize> {
    let Some(gib) = args.swap_space else {
        return Ok(usize::try_from(USUAL_BYTES.min(memory_bytes / USUAL_SHARE))?);
    };
    let bytes = gib * f64::from(1 << 30);
    ensure!(gib >= 0.0 && bytes < 2_f64.powi(60), "--swap-space is {gib}; it must not be negative");
    Ok(bytes as usize)
}

/// Gives an engine whose KV cache has its size the blocks of host memory that can be of use: none
/// if nobody ever has to give way, and at most one for every token that may have to.
pub(crate) fn give_swap_space(engine: &mut EngineConfig, bytes: usize, block_bytes: usize) {
    let most = engine.max_model_len.div_ceil(engine.block_size).saturating_mul(engine.max_num_seqs);
    let memory = &mut engine.memory;
    let is_of_use = memory.preemption != Preemption::Recompute && most > engine.num_blocks;
    let block_bytes = block_bytes.max(1);
    memory.num_swap_blocks = if is_of_use { (bytes / block_bytes).min(most) } else { 0 };
    memory.max_moved_blocks = (MOST_MOVED_BYTES / block_bytes).max(1);
}
