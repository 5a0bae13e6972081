//! What becomes of the KV cache's blocks, in figures.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use inflight_scheduler::{HostPrefixes, Scheduler};

/// Steps from one search for leaks to the next while the engine works.
const STEPS_PER_SEARCH: u64 = 32;

/// Figures of the prefix cache and of the host's memory, published once a step.
#[derive(Debug, Default)]
pub struct MemoryStats {
    /// Blocks that nobody will ever give back, of the device and of the host: 0, or there is a bug.
    /// Looked for when the engine is idle, and now and then while it works.
    pub num_leaked_blocks: AtomicUsize,
    /// Bytes of a block of the KV cache in all layers.
    pub block_bytes: AtomicUsize,
    /// Blocks of the host's memory.
    pub num_host_blocks: AtomicUsize,
    /// Those of them that keep a prefix.
    pub num_host_prefix_blocks: AtomicUsize,
    /// Blocks of prefixes that were copied to the host.
    pub num_kept: AtomicU64,
    /// Blocks that prompts began with and that came from the host.
    pub num_fetched: AtomicU64,
    /// Blocks of prefixes that the file has.
    pub num_file_blocks: AtomicU64,
    /// Blocks that came to the host from the file.
    pub num_read: AtomicU64,
    /// Blocks of prefixes that were evicted from the device.
    pub num_evicted: AtomicU64,
    /// Those of them of which no copy had been made.
    pub num_lost: AtomicU64,
    /// Blocks that moved to the host, whosever they were.
    pub num_moved_out: AtomicU64,
    /// Blocks that moved from the host, whosever they were.
    pub num_moved_in: AtomicU64,
}

impl MemoryStats {
    /// Notes what never changes.
    pub(crate) fn begin(&self, block_bytes: usize, num_host_blocks: usize) {
        self.block_bytes.store(block_bytes, Ordering::Relaxed);
        self.num_host_blocks.store(num_host_blocks, Ordering::Relaxed);
    }

    /// Takes over the scheduler's figures; `moved` are blocks moved to the host and from it.
    pub(crate) fn publish(&self, scheduler: &Scheduler, moved: [u64; 2], num_steps: u64) {
        let HostPrefixes { num_blocks, num_kept, num_fetched, num_read, num_evicted, num_lost } =
            scheduler.host_prefixes();
        self.num_host_prefix_blocks.store(num_blocks, Ordering::Relaxed);
        for (cell, count) in [
            (&self.num_kept, num_kept),
            (&self.num_fetched, num_fetched),
            (&self.num_read, num_read),
            (&self.num_file_blocks, scheduler.num_file_blocks() as u64),
            (&self.num_evicted, num_evicted),
            (&self.num_lost, num_lost),
            (&self.num_moved_out, moved[0]),
            (&self.num_moved_in, moved[1]),
        ] {
            cell.store(count, Ordering::Relaxed);
        }
        if scheduler.is_idle() || num_steps.is_multiple_of(STEPS_PER_SEARCH) {
            let num_leaked = scheduler.num_leaked_blocks();
            let before = self.num_leaked_blocks.swap(num_leaked, Ordering::Relaxed);
            if num_leaked > before {
                tracing::error!(num_leaked, "blocks of the KV cache are lost: this is a bug");
            }
        }
    }
}
