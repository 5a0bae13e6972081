//! Figures of the KV cache: what fits, what is kept, what moves, and that nothing is lost.

use std::sync::atomic::Ordering;

use inflight_engine::EngineStats;

use super::exposition::Exposition;

/// What the KV cache's memory would hold with numbers of one type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvCapacity {
    /// Name of the type, as `--kv-cache-dtype` has it.
    pub dtype: String,
    /// Bytes of a token in all layers, its share of scales included, rounded up.
    pub token_bytes: usize,
    /// Tokens that fit.
    pub num_tokens: usize,
    /// Whether this is the type in use.
    pub is_used: bool,
}

/// Writes them all.
pub(super) fn memory_figures(out: &mut Exposition, stats: &EngineStats, fits: &[KvCapacity]) {
    let of = |value: fn(&KvCapacity) -> usize| {
        fits.iter().map(move |fit| (fit.dtype.as_str(), value(fit) as f64))
    };
    let help = "Tokens that the KV cache's memory would hold with numbers of each type.";
    out.gauges("inflight_kv_cache_tokens", help, "dtype", of(|fit| fit.num_tokens));
    let help = "Bytes of a token in the KV cache with numbers of each type.";
    out.gauges("inflight_kv_cache_token_bytes", help, "dtype", of(|fit| fit.token_bytes));
    let help = "1 for the type of the KV cache's numbers.";
    out.gauges("inflight_kv_cache_dtype", help, "dtype", of(|fit| usize::from(fit.is_used)));

    let memory = &stats.memory;
    let size = |cell: &std::sync::atomic::AtomicUsize| cell.load(Ordering::Relaxed) as f64;
    let count = |cell: &std::sync::atomic::AtomicU64| cell.load(Ordering::Relaxed) as f64;
    let cached = size(&stats.num_cached_blocks);
    out.gauge("inflight_kv_cache_prefix_blocks", "Blocks kept only to be found again.", cached);
    let help = "Blocks that nobody will give back, of device and host: 0, or there is a bug.";
    out.gauge("inflight_kv_cache_leaked_blocks", help, size(&memory.num_leaked_blocks));
    let evicted = count(&memory.num_evicted);
    let help = "Blocks of prefixes evicted from the device.";
    out.counter("inflight_kv_cache_evicted_blocks_total", help, evicted);
    if size(&memory.num_host_blocks) == 0.0 {
        return;
    }
    let blocks = size(&memory.num_host_blocks);
    out.gauge("inflight_host_blocks", "Blocks of host memory for the KV cache.", blocks);
    let free = size(&stats.num_free_swap_blocks);
    let help = "Blocks of the host that requests which give way can have.";
    out.gauge("inflight_host_available_blocks", help, free);
    let help = "Blocks of the host that keep a prefix.";
    out.gauge("inflight_host_prefix_blocks", help, size(&memory.num_host_prefix_blocks));
    for (name, help, cell) in [
        (
            "inflight_host_kept_blocks_total",
            "Blocks of prefixes kept by the host.",
            &memory.num_kept,
        ),
        (
            "inflight_host_fetched_blocks_total",
            "Blocks that prompts began with and the host had: its hits.",
            &memory.num_fetched,
        ),
        (
            "inflight_host_lost_blocks_total",
            "Blocks of prefixes evicted before they were copied.",
            &memory.num_lost,
        ),
    ] {
        out.counter(name, help, count(cell));
    }
    let help = "Blocks of prefixes in the cache file.";
    out.gauge("inflight_file_prefix_blocks", help, count(&memory.num_file_blocks));
    let help = "Blocks read from the cache file.";
    out.counter("inflight_file_read_blocks_total", help, count(&memory.num_read));
    let bytes = size(&memory.block_bytes);
    let moved = [("out", &memory.num_moved_out), ("in", &memory.num_moved_in)];
    let moved = moved.map(|(way, blocks)| (way, bytes * count(blocks)));
    let help = "Bytes of the KV cache moved to the host and from it.";
    out.counters("inflight_host_moved_bytes_total", help, "way", moved);
}
