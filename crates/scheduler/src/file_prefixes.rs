//! A file as the prefix cache's third tier, as far as it is book-keeping: which blocks it has,
//! which are to be read ahead of need, which are to be written.
//!
//! ```text
//!   host kept ──► to write ──(engine, in the background)──► file has it
//!   file has it, a request begins with it ──► to read ──(the same)──► host kept ──► device
//! ```
//!
//! Whoever waits for blocks that are being read is overtaken by others.

use std::collections::{HashSet, VecDeque};

use inflight_kv_cache::{BlockName, HostBlockId, OnHost};

use crate::SequenceId;
use crate::scheduler::Scheduler;
use crate::sequence::Sequence;

/// Blocks that wait to be written, at most: more are left to the next time that they are kept.
const MOST_WRITES: usize = 4096;

/// What the file has, and what is to be done with it.
#[derive(Debug, Default)]
pub(crate) struct FilePrefixes {
    /// `None`: there is no file.
    known: Option<HashSet<BlockName>>,
    reads: Vec<FileBlock>,
    writes: VecDeque<FileBlock>,
    num_reading: usize,
}

/// A block of the host, and the name of what it has or is to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct FileBlock {
    pub name: BlockName,
    pub host: HostBlockId,
}

impl Scheduler {
    /// Uses a file that has these blocks.
    pub fn use_file(&mut self, names: impl IntoIterator<Item = BlockName>) {
        self.file.known = Some(names.into_iter().collect());
    }

    /// Asks for what the file has of a sequence that has just come, as far as the host has room.
    pub(crate) fn prefetch(&mut self, id: SequenceId) {
        let Some(known) = &self.file.known else { return };
        let sequence = &self.sequences[&id];
        if sequence.probes_prompt {
            return; // all of it is computed
        }
        let found = self.find_first(sequence);
        let can_come =
            |name: &BlockName| known.contains(name) || self.swap.find(name) != OnHost::Missing;
        let num_blocks = self.num_beginning(sequence, &found, can_come);
        let starts = sequence.tables.found(&found, num_blocks, &self.cache);
        let wanted = (0..)
            .zip(&starts)
            .flat_map(|(group, start)| self.names_behind(sequence, start, (group, num_blocks)));
        for name in wanted.collect::<Vec<_>>() {
            if self.swap.find(&name) == OnHost::Missing {
                let Some(host) = self.swap.keep(name) else { return };
                self.file.reads.push(FileBlock { name, host });
                self.file.num_reading += 1;
            }
        }
    }

    /// Whether some of what a waiting sequence begins with is on its way to the host.
    pub(crate) fn waits_for_host(&self, sequence: &Sequence) -> bool {
        let found = self.find_first(sequence);
        self.num_known(sequence, &found) > self.num_kept(sequence, &found)
    }

    /// Notes that the host has a block that the file may not have.
    pub(crate) fn write_later(&mut self, host: HostBlockId) {
        let (Some(known), Some(name)) = (&self.file.known, self.swap.name(host)) else { return };
        if !known.contains(&name) && self.file.writes.len() < MOST_WRITES {
            self.file.writes.push_back(FileBlock { name, host });
        }
    }

    /// Blocks to read from the file now; [`file_read`](Self::file_read) is to tell of each.
    pub fn take_file_reads(&mut self) -> Vec<FileBlock> {
        std::mem::take(&mut self.file.reads)
    }

    /// The next block to write to the file. The host's block may have another content after the
    /// next plan.
    pub fn take_file_write(&mut self) -> Option<FileBlock> {
        loop {
            let block = self.file.writes.pop_front()?;
            if self.swap.find(&block.name) == OnHost::Kept(block.host) {
                return Some(block);
            }
        }
    }

    /// Number of blocks that the file has.
    #[must_use]
    pub fn num_file_blocks(&self) -> usize {
        self.file.known.as_ref().map_or(0, HashSet::len)
    }

    /// Whether there are blocks to be written.
    #[must_use]
    pub fn has_file_writes(&self) -> bool {
        !self.file.writes.is_empty()
    }

    /// Whether an idle engine still has blocks of the prefix cache to be kept: all of them, where
    /// they are to survive it. Planning on moves them to the host.
    #[must_use]
    pub fn has_cold_blocks(&self) -> bool {
        self.keeps_all() && self.cache.has_more_to_offer() && self.swap.has_room()
    }

    /// Whether all blocks of the prefix cache are to be kept, not only those next to be evicted.
    pub(crate) fn keeps_all(&self) -> bool {
        self.file.known.is_some() && self.config.memory.keeps_cold_prefixes
    }

    /// Whether blocks are being read.
    #[must_use]
    pub fn waits_for_file(&self) -> bool {
        self.file.num_reading > 0
    }

    /// Notes that a block was read to the host, or that the file does not have it after all.
    ///
    /// # Panics
    /// When it was not asked for.
    pub fn file_read(&mut self, block: FileBlock, is_read: bool) {
        assert_eq!(self.swap.find(&block.name), OnHost::Arriving, "{block:?} was not asked for");
        self.file.num_reading -= 1;
        if is_read {
            self.swap.fill_alone(block.host);
            self.host.num_read += 1;
        } else {
            self.swap.discard(block.host);
            self.file_forgot(&block.name);
        }
    }

    /// Notes that the file has a block now.
    pub fn file_has(&mut self, name: BlockName) {
        self.file.known.iter_mut().for_each(|known| known.extend([name]));
    }

    /// Notes that the file has a block no longer.
    pub fn file_forgot(&mut self, name: &BlockName) {
        if let Some(known) = &mut self.file.known {
            known.remove(name);
        }
    }
}
