//! Keys and values of a simulated device: what is written, read, turned, cut and copied.

use inflight_backend::{
    BlockCheck, BlockSum, BlockTurn, CheckBlocks, DeviceBatch, PromptCut, SumCheck,
};

use super::backend::SimBackend;
use super::state::{COMPUTE, State};
use super::token::{chosen, kv_value, turned, with_layer};

/// A memory and a block of it.
pub(super) type Place = (usize, u32);

impl State {
    /// The layer group that a batch is of.
    pub(super) fn group_of(&self, batch: &DeviceBatch<SimBackend>) -> usize {
        let id = batch.context_lens.id;
        self.group_ids.iter().position(|&known| known == id).expect("the batch was unpacked")
    }

    /// Writes keys and values of the step's tokens for a layer of a group.
    pub(super) fn write_kv(&mut self, memory: usize, block_size: usize, group: usize) {
        self.writers.clear();
        for row in 0..self.step.num_rows() {
            for index in self.step.row(row) {
                let slot = self.step.groups[group].slot_mapping[index] as usize;
                let block = (slot / block_size) as u32;
                if self.writers.last() != Some(&(block, row)) {
                    self.writers.push((block, row));
                    self.writes_block(COMPUTE, memory, block);
                }
                let value = kv_value(self.step.token_ids[index], self.step.positions[index]);
                let to = self.memories[memory].block_mut(block as usize);
                *to.place_mut(slot % block_size) = value;
                to.group = group;
            }
        }
        self.check_writers(group);
    }

    /// A block that a row writes to is in no other row's table, nor in one of another group.
    fn check_writers(&mut self, group: usize) {
        let mut writers = std::mem::take(&mut self.writers);
        writers.sort_unstable();
        let tables = (0..self.step.groups.len())
            .flat_map(|of| (0..self.step.num_rows()).map(move |row| (of, row)));
        for (of, row) in tables {
            for block in self.step.blocks_of(of, row) {
                let at = writers.partition_point(|(written, _)| written < block);
                let mut writers = writers[at..].iter().take_while(|(written, _)| written == block);
                if let Some((_, other)) = writers.find(|(_, writer)| (of, row) != (group, *writer))
                {
                    let message =
                        format!("row {other} writes to block {block} of row {row}, group {of}");
                    self.violations.push(message);
                }
            }
        }
        self.writers = writers;
    }

    /// Reads of every row's context what its last token sees in a layer of a group.
    pub(super) fn read_kv(
        &mut self,
        memory: usize,
        block_size: usize,
        (group, window): (usize, Option<usize>),
    ) {
        self.contexts.resize(self.step.num_rows(), 0);
        for row in 0..self.step.num_rows() {
            let context_len = self.step.groups[group].context_lens[row] as usize;
            let mut sum = 0_u64;
            let blocks = if group == 0 && window.is_none() {
                let (blocks, num_shared) = self.step.cascaded_blocks_of(row, block_size);
                self.usage.num_cascaded += num_shared as u64;
                blocks
            } else {
                self.step.blocks_of(group, row).to_vec()
            };
            for (i, block) in blocks.into_iter().enumerate() {
                self.reads_block(COMPUTE, memory, block);
                let found = self.memories[memory].block_mut(block as usize).group;
                if found != group {
                    let what = format!("block {block} is of group {found}, read as of {group}");
                    self.violations.push(what);
                }
                let start = window.map_or(0, |window| context_len.saturating_sub(window));
                let in_block = |place: usize| place.saturating_sub(i * block_size).min(block_size);
                let seen = in_block(start)..in_block(context_len);
                let from = self.memories[memory].block_mut(block as usize);
                sum = seen.fold(sum, |sum, place| sum.wrapping_add(from.place(place)));
            }
            self.contexts[row] = with_layer(self.contexts[row], sum);
        }
    }

    /// Copies blocks with keys turned to other positions.
    pub(super) fn turn(&mut self, memory: usize, turns: &[BlockTurn]) {
        self.usage.num_turns += turns.len() as u64;
        for turn in turns {
            self.copy_block(COMPUTE, (memory, turn.from), (memory, turn.to));
            let block = self.memories[memory].block_mut(turn.to as usize);
            block.values.iter_mut().for_each(|value| *value = turned(*value, turn.by));
        }
    }

    /// Copies what stays of prompts.
    pub(super) fn cut(&mut self, memory: usize, block_size: usize, cuts: &[PromptCut]) {
        self.usage.num_cuts += cuts.len() as u64;
        cuts.iter().for_each(|cut| self.cut_prompt(memory, block_size, cut));
    }

    fn cut_prompt(&mut self, memory: usize, block_size: usize, cut: &PromptCut) {
        let context_len = self.step.groups[0].context_lens[cut.row] as usize;
        assert_eq!(context_len, cut.context_len, "a cut is of its row");
        let mut values = Vec::new();
        for block in self.step.blocks_of(0, cut.row).to_vec() {
            self.reads_block(COMPUTE, memory, block);
            let from = self.memories[memory].block_mut(block as usize);
            values.extend((0..block_size).map(|place| from.place(place)));
        }
        values.truncate(context_len);
        let kept = chosen(&values, cut.blocks.len() * block_size, cut.num_observed);
        for (&block, places) in cut.blocks.iter().zip(kept.chunks(block_size)) {
            self.writes_block(COMPUTE, memory, block);
            let to = self.memories[memory].block_mut(block as usize);
            to.values = places.iter().map(|&place| values[place]).collect();
        }
    }

    /// Copies a block of keys and values.
    pub(super) fn copy_block(&mut self, thread: usize, (from, source): Place, (to, target): Place) {
        self.reads_block(thread, from, source);
        self.writes_block(thread, to, target);
        let from = self.memories[from].block_mut(source as usize);
        let (values, group) = (from.values.clone(), from.group);
        let to = self.memories[to].block_mut(target as usize);
        (to.values, to.group) = (values, group);
    }

    /// Notes or verifies what blocks hold in the first layer.
    pub(super) fn check_blocks(&mut self, thread: usize, args: &CheckBlocks<'_, SimBackend>) {
        let keys = args.kv.parts()[0].id;
        let (memory, check) = match args.check {
            BlockCheck::Note { full, partial } => (keys, SumCheck::Note { full, partial }),
            BlockCheck::Verify(blocks) => (keys, SumCheck::Verify(blocks)),
            BlockCheck::Left(host, pairs) => (host.id, SumCheck::Left(pairs)),
            BlockCheck::Returns(host, pairs) => (host.id, SumCheck::Returns(pairs)),
        };
        let is_host = matches!(args.check, BlockCheck::Left(..) | BlockCheck::Returns(..));
        let scale = if is_host { (args.kv.parts().len() / 2) as u32 } else { 1 };
        let sum = |block: u32| {
            let block = block * scale;
            self.reads_block(thread, memory, block);
            let values = &self.memories[memory].block_mut(block as usize).values;
            let with = |sum: BlockSum, value: &u64| sum.with(&value.to_le_bytes());
            values.iter().fold(BlockSum::default(), with).get()
        };
        if let Err(changed) = args.sums.check(check, sum) {
            self.violations.push(changed);
        }
        if let BlockCheck::Note { full, .. } = args.check {
            self.flip(keys, full);
        }
    }

    /// A block changes that nobody is to write to any more, if that is to happen now.
    fn flip(&mut self, memory: usize, full: &[u32]) {
        let Some(left) = &mut self.config.faults.flips_after else { return };
        match left.checked_sub(full.len()) {
            Some(later) => *left = later,
            None => {
                let block = full[*left];
                self.config.faults.flips_after = None;
                *self.memories[memory].block_mut(block as usize).place_mut(0) ^= 1;
            }
        }
    }
}
