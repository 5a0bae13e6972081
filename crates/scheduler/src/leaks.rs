//! Blocks that nobody will ever give back.

use crate::scheduler::Scheduler;

impl Scheduler {
    /// References to blocks, of the device and of the host, that no table, cache or move has: each
    /// keeps a block from ever being free again, so it must be 0. Costs a look at every sequence,
    /// not at every block.
    ///
    /// References that are missing count as well: they free a block that somebody still uses.
    #[must_use]
    pub fn num_leaked_blocks(&self) -> usize {
        let in_tables = self.sequences.values().map(|sequence| sequence.tables.held().count());
        let swapped = self.sequences.values().filter_map(|sequence| sequence.swapped.as_ref());
        let on_host: usize = swapped.map(|swapped| swapped.blocks().count()).sum();
        let (by_moves, host_by_moves) = self.moves.num_references();
        let held = in_tables.sum::<usize>() + by_moves + self.cache.num_findable();
        let held_on_host = on_host + host_by_moves + self.swap.num_kept();
        self.cache.num_references().abs_diff(held)
            + self.swap.num_references().abs_diff(held_on_host)
    }
}
