//! Host memory for requests that gave way, and for cold prefixes.

use anyhow::{Result, ensure};
use inflight_engine::{EngineConfig, Preemption};
use inflight_model::ModelConfig;

use crate::args::MemoryArgs;

/// What is taken unless told otherwise, in bytes.
const USUAL_BYTES: u64 = 4 << 30;
/// At most this share of the machine's memory is taken unless told otherwise.
const USUAL_SHARE: u64 = 8;
/// What one batch moves in each direction at most, in bytes: a millisecond of PCIe 5, so that
/// inputs and outputs of steps do not wait long behind it.
const MOST_MOVED_BYTES: usize = 64 << 20;

/// Bytes of host memory that the engine may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostBytes {
    /// For requests that give way.
    pub(crate) swap: usize,
    /// For cold prefixes.
    pub(crate) cache: usize,
}

pub(crate) fn resolve_host_bytes(args: &MemoryArgs, memory_bytes: u64) -> Result<HostBytes> {
    let usual = USUAL_BYTES.min(memory_bytes / USUAL_SHARE);
    let swap = match args.swap_space {
        Some(gib) => bytes(gib, "--swap-space")?,
        None => usize::try_from(usual)?,
    };
    let cache = args.host_cache.map_or(Ok(0), |gib| bytes(gib, "--host-cache"))?;
    ensure!(
        cache == 0 || args.prefix_caching(),
        "--host-cache keeps what --enable-prefix-caching finds, which is switched off"
    );
    ensure!(
        cache as u64 <= memory_bytes,
        "--host-cache is {:.1} GiB, but {:.1} GiB of memory are available",
        cache as f64 / f64::from(1 << 30),
        memory_bytes as f64 / f64::from(1 << 30)
    );
    Ok(HostBytes { swap, cache })
}

fn bytes(gib: f64, flag: &str) -> Result<usize> {
    let bytes = gib * f64::from(1 << 30);
    ensure!(gib >= 0.0 && bytes < 2_f64.powi(60), "{flag} is {gib}; it must not be negative");
    Ok(bytes as usize)
}

/// Gives an engine whose KV cache has its size the blocks of host memory that can be of use.
///
/// For requests that give way: none if nobody ever has to, and at most one for every token that may
/// have to. Cold prefixes have what was asked for; both share all of it.
pub(crate) fn give_host_memory(
    engine: &mut EngineConfig,
    model: &ModelConfig,
    bytes: HostBytes,
    block_bytes: usize,
) {
    let most = engine.blocks_per_sequence(model).saturating_mul(engine.max_num_seqs);
    let memory = &mut engine.memory;
    let is_of_use = memory.preemption != Preemption::Recompute && most > engine.num_blocks;
    let block_bytes = block_bytes.max(1);
    let for_swap = if is_of_use { (bytes.swap / block_bytes).min(most) } else { 0 };
    let for_cache = bytes.cache / block_bytes;
    memory.num_swap_blocks = for_swap + for_cache;
    memory.keeps_cold_prefixes = for_cache > 0;
    memory.max_moved_blocks = (MOST_MOVED_BYTES / block_bytes).max(1);
}
