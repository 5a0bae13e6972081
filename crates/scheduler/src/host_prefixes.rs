//! The host as the prefix cache's second tier: cold blocks are copied there before they are evicted
//! and come back when a prompt begins with them.
//!
//! ```text
//!   device   oldest [ kept | kept | being copied ] mark [ .. | .. ] newest, tables' blocks
//!                      │ evicted: nothing is lost           │
//!   host     [ kept | kept | being filled | .. ]            ▼ no copy yet: lost
//!                      │ a prompt begins with it
//!   device             └──► blocks of the sequence, filled before its first row
//! ```
//!
//! Every layer group's blocks are kept, each by a name of its own; of a group with a window a
//! prompt needs the last ones only. What of a group is on the device comes first, the rest from
//! the host.
//!
//! Copies are begun well before blocks are missed, as many as one batch may move, so that whoever
//! takes a block never waits for one. A block under copy is nobody else's until the batch that
//! carries the copy was collected.

use std::time::Duration;

use inflight_kv_cache::{BlockId, BlockName, OnHost, TableStart};

use crate::Preemption;
use crate::policy::Batching;
use crate::scheduler::Scheduler;
use crate::sequence::Sequence;

/// What the host does for the prefix cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostPrefixes {
    /// Blocks of the host that keep a prefix now.
    pub num_blocks: usize,
    /// Blocks that were copied to the host.
    pub num_kept: u64,
    /// Blocks that prompts began with and that came from the host.
    pub num_fetched: u64,
    /// Blocks that came to the host from a file.
    pub num_read: u64,
    /// Blocks of the prefix cache that were evicted from the device.
    pub num_evicted: u64,
    /// Those of them of which no copy had been made.
    pub num_lost: u64,
}

/// Of the blocks that are looked at to be copied, so many may be on the host already for each that
/// is not: a bound on the work of one plan.
const MOST_KNOWN: usize = 8;

impl Scheduler {
    /// Begins to copy cold blocks to the host, until those that can go without loss are half of the
    /// pool or a quarter of what the host has, whichever is less; all there are, where a file is to
    /// have them.
    pub(crate) fn keep_cold_prefixes(&mut self) {
        let memory = &self.config.memory;
        if !memory.keeps_cold_prefixes {
            return;
        }
        let enough = (self.config.num_blocks / 2).min(memory.num_swap_blocks / 4).max(1);
        let enough = if self.keeps_all() { usize::MAX } else { enough };
        let mut quota = memory.max_moved_blocks.saturating_sub(self.moves.num_to_leave());
        let mut num_offers = MOST_KNOWN * quota;
        while quota > 0
            && num_offers > 0
            && self.cache.num_expendable() < enough
            && self.swap.has_room()
            && let Some((device, name)) = self.cache.offer()
        {
            num_offers -= 1;
            if let Some(host) = self.swap.keep(name) {
                self.moves.keep(device, host, (&mut self.cache, &mut self.swap));
                self.host.num_kept += 1;
                quota -= 1;
            }
        }
    }

    /// How many blocks a waiting sequence begins with if those that `found` on the device lacks
    /// come from the host, where `num_usable` need none of it. `None`: more are still on their way
    /// there, and nothing else is to be moved.
    pub(crate) fn find_on_host(
        &self,
        sequence: &Sequence,
        found: &[BlockId],
        num_usable: usize,
    ) -> Option<usize> {
        // A static batch computes all prompts before its first decode: nobody waits for a move. All
        // of a prompt that is probed is computed.
        let is_static = matches!(self.policy.batching, Batching::Static { .. });
        let has_all = num_usable == self.most_found(sequence) || self.swap.num_kept() == 0;
        if is_static || sequence.probes_prompt || has_all {
            return Some(num_usable);
        }
        let num_kept = self.num_kept(sequence, found);
        let is_waiting = num_kept == num_usable && self.num_known(sequence, found) > num_kept;
        (!is_waiting).then_some(num_kept)
    }

    /// How many blocks a sequence begins with by what is on the device and what the host keeps.
    pub(crate) fn num_kept(&self, sequence: &Sequence, found: &[BlockId]) -> usize {
        let is_kept = |name: &BlockName| matches!(self.swap.find(name), OnHost::Kept(_));
        self.num_beginning(sequence, found, is_kept)
    }

    /// The same, with what is on its way to the host.
    pub(crate) fn num_known(&self, sequence: &Sequence, found: &[BlockId]) -> usize {
        let is_known = |name: &BlockName| self.swap.find(name) != OnHost::Missing;
        self.num_beginning(sequence, found, is_known)
    }

    /// How many blocks a sequence can begin with if what is not on the device can come from
    /// elsewhere where `is_elsewhere` says so.
    pub(crate) fn num_beginning(
        &self,
        sequence: &Sequence,
        found: &[BlockId],
        is_elsewhere: impl Fn(&BlockName) -> bool,
    ) -> usize {
        let names = sequence.chain.names();
        let behind = names.iter().take(self.most_found(sequence)).skip(found.len());
        let num_first = found.len() + behind.take_while(|name| is_elsewhere(name)).count();
        let is_elsewhere = |group, index: usize| {
            names.get(index).is_some_and(|name| is_elsewhere(&name.of_group(group)))
        };
        sequence.tables.num_usable(found, num_first, is_elsewhere, &self.cache)
    }

    /// Names of what is to be moved for a sequence to begin with `num_blocks` blocks, behind what
    /// each layer group finds on the device.
    pub(crate) fn names_behind(
        &self,
        sequence: &Sequence,
        start: &TableStart,
        (group, num_blocks): (usize, usize),
    ) -> impl Iterator<Item = BlockName> {
        let names = sequence.chain.names().iter().take(num_blocks);
        names.skip(start.end(self.config.block_size)).map(move |name| name.of_group(group))
    }

    /// Whether so many blocks should be moved from the host instead of computing `num_tokens`
    /// tokens: if that was measured to be faster, as it is with sequences that gave way.
    pub(crate) fn is_better_fetched(&self, num_blocks: usize, num_tokens: usize) -> bool {
        let costs = self.costs.filter(|_| self.config.memory.preemption != Preemption::Swap);
        let Some(costs) = costs else { return true };
        // Beside others, a sequence waits for as many steps as carry its blocks.
        let step_s = self.control.mean_step_s().filter(|_| !self.running.is_empty());
        let num_steps = num_blocks.div_ceil(self.most_moved_in());
        let steps = Duration::from_secs_f64(step_s.unwrap_or(0.0) * num_steps as f64);
        costs.fetch_is_faster(num_blocks, steps, num_tokens)
    }

    /// Most blocks that the next batch moves from the host: what takes a step and a seventh, as
    /// both were measured, so that the inputs of the batch behind it are not late.
    pub(crate) fn most_moved_in(&self) -> usize {
        let least = self.config.memory.max_moved_blocks.max(1);
        let (Some(costs), Some(step_s)) = (self.costs, self.control.mean_step_s()) else {
            return least;
        };
        let hidden = 1.15 * step_s * 1e9 / costs.swap_in_ns.max(1) as f64;
        (hidden as usize).clamp(least, MOST_HIDDEN * least)
    }
}

/// However long steps take, one moves no more than this multiple of `max_moved_blocks`.
const MOST_HIDDEN: usize = 16;
