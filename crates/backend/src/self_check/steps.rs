//! Random batches.

use super::rig::{Rig, uniform};
use crate::{
    Backend, BackendError, DeviceBatch, RowState, SamplingRow, SharedPrefixes, StepCapacity,
    StepInputs, StepShape,
};

/// A step's inputs, and what they refer to.
pub(super) struct RandomStep {
    pub(super) inputs: StepInputs,
    /// Tokens of the step before.
    pub(super) previous: Vec<u32>,
    pub(super) block_size: usize,
    /// Blocks of the KV cache, more than the step uses.
    pub(super) num_cache_blocks: usize,
}

/// One sequence's share of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct RandomRow {
    /// Tokens after the step.
    pub(super) context_len: usize,
    /// How many of them are new.
    pub(super) num_new: usize,
}

impl RandomStep {
    pub(super) const VOCAB_SIZE: usize = 1000;

    /// Rows whose blocks lie anywhere in the cache; every row is sampled, every fourth token that
    /// is a row's only one is carried over.
    pub(super) fn new(rows: &[RandomRow], block_size: usize) -> Self {
        let num_blocks: usize = rows.iter().map(|row| row.context_len.div_ceil(block_size)).sum();
        let num_cache_blocks = num_blocks + 5;
        let mut places = shuffled(num_cache_blocks).into_iter();
        let mut inputs = StepInputs::default();
        inputs.clear();
        for (i, row) in rows.iter().enumerate() {
            let num_blocks = row.context_len.div_ceil(block_size);
            let blocks: Vec<u32> = places.by_ref().take(num_blocks).collect();
            push_row(&mut inputs, *row, &blocks, block_size);
            if row.num_new == 1 && i % 4 == 3 {
                *inputs.carry_over.last_mut().expect("a token was pushed") = i as i32;
            }
        }
        let previous = uniform(41, rows.len(), Self::VOCAB_SIZE);
        Self { inputs, previous, block_size, num_cache_blocks }
    }

    /// Rows that decode, beside rows that prefill and rows that do so in chunks.
    pub(super) fn mixed(block_size: usize) -> Self {
        let row = |(context_len, num_new)| RandomRow { context_len, num_new };
        Self::new(
            &[(1, 1), (40, 40), (17, 1), (130, 1), (700, 200), (64, 1), (3, 2)].map(row),
            block_size,
        )
    }

    /// Rows of many new tokens, and one of few.
    pub(super) fn prefill(block_size: usize) -> Self {
        let row = |(context_len, num_new)| RandomRow { context_len, num_new };
        Self::new(&[(600, 600), (257, 257), (3, 3), (400, 129)].map(row), block_size)
    }

    /// Rows of one token each.
    pub(super) fn decode(context_lens: &[usize], block_size: usize) -> Self {
        let row = |context_len: &usize| RandomRow { context_len: *context_len, num_new: 1 };
        Self::new(&context_lens.iter().map(row).collect::<Vec<_>>(), block_size)
    }

    /// Rows that decode and share prefixes of different lengths, in no order, beside rows that
    /// share nothing. `with_prefill`: beside rows of several tokens as well.
    pub(super) fn sharing(with_prefill: bool, block_size: usize) -> Self {
        let behind = |i: usize| 1 + 37 * i % 150;
        // Tokens that the rows of one kind share: more rows than a tile of queries takes, more
        // tiles than a block, and few of both.
        let prefixes = [192, 1280, 64, 0];
        let prefix_of = |i: usize| match i % 8 {
            1 | 5 => 1,
            3 if i < 28 => 2,
            7 => 3,
            _ => 0,
        };
        let row = |i| RandomRow { context_len: prefixes[prefix_of(i)] + behind(i), num_new: 1 };
        let mut rows: Vec<_> = (0..75).map(row).collect();
        if with_prefill {
            rows.insert(0, RandomRow { context_len: 90, num_new: 70 });
            rows.push(RandomRow { context_len: 300, num_new: 2 });
        }
        let mut step = Self::new(&rows, block_size);
        for (prefix, num_tokens) in prefixes.into_iter().enumerate().take(3) {
            let first = usize::from(with_prefill);
            let sharing = (0..75).filter(|i| prefix_of(*i) == prefix).map(|i| i + first);
            step.share(num_tokens, &sharing.collect::<Vec<_>>());
        }
        step
    }

    /// Has rows begin with the blocks of the first of them.
    fn share(&mut self, num_tokens: usize, rows: &[usize]) {
        let inputs = &mut self.inputs;
        let num_blocks = num_tokens / self.block_size;
        let start = |row: usize| inputs.block_starts[row] as usize;
        let (first, others) = rows.split_first().expect("several rows share a prefix");
        for row in others {
            inputs.blocks.copy_within(start(*first)..start(*first) + num_blocks, start(*row));
        }
        let rows: Vec<u32> = rows.iter().map(|row| u32::try_from(*row).expect("few")).collect();
        inputs.prefixes.push(num_tokens, &rows);
    }

    /// These tokens, each a row of its own.
    pub(super) fn tokens(ids: &[u32]) -> Self {
        let mut step = Self::decode(&vec![1; ids.len()], 16);
        step.inputs.token_ids.copy_from_slice(ids);
        step.inputs.carry_over.fill(-1);
        step
    }

    /// For every slot of the cache, whether any token of the step sees it, or may come across it:
    /// kernels for rows of several tokens take whole tiles, and slots that were written hold
    /// numbers.
    pub(super) fn seen_slots(&self, window: Option<usize>) -> Vec<bool> {
        let inputs = &self.inputs;
        let mut seen = vec![false; self.num_cache_blocks * self.block_size];
        for (row, context_len) in inputs.context_lens.iter().enumerate() {
            let new = (inputs.row_starts[row + 1] - inputs.row_starts[row]) as usize;
            let end = *context_len as usize;
            let window = window.filter(|_| new == 1);
            let start = window.map_or(0, |window| end.saturating_sub(window));
            let blocks = &inputs.blocks[inputs.block_starts[row] as usize..];
            for position in start..end {
                let block = blocks[position / self.block_size] as usize;
                seen[block * self.block_size + position % self.block_size] = true;
            }
        }
        seen
    }

    pub(super) fn shape(&self) -> StepShape {
        self.inputs.shape()
    }

    /// A batch with room for more than the step.
    pub(super) fn batch<B: Backend>(
        &self,
        rig: &Rig<'_, B>,
    ) -> Result<DeviceBatch<B>, BackendError> {
        DeviceBatch::new(rig.backend, self.capacity())
    }

    pub(super) fn capacity(&self) -> StepCapacity {
        let shape = self.shape();
        StepCapacity {
            max_tokens: shape.num_tokens + 16,
            max_rows: shape.num_rows.max(shape.num_sampled) + 16,
            max_blocks: shape.num_blocks + 9,
            max_bias: shape.num_bias + 3,
            num_more_groups: 0,
            max_prefixes: if shape.num_prefixes > 0 { SharedPrefixes::MAX } else { 0 },
        }
    }

    /// The packed words on the device.
    pub(super) fn pack<B: Backend>(&self, rig: &Rig<'_, B>) -> Result<B::Buffer, BackendError> {
        let mut words = vec![0; self.shape().num_words()];
        self.inputs.pack(&mut words);
        rig.words(&words)
    }

    /// The step's inputs in a batch, as operators find them.
    pub(super) fn unpack<B: Backend>(
        &self,
        rig: &Rig<'_, B>,
    ) -> Result<(DeviceBatch<B>, StepShape), BackendError> {
        let (batch, packed) = (self.batch(rig)?, self.pack(rig)?);
        let (previous, shape) = (rig.words(&self.previous)?, self.shape());
        rig.backend.unpack(&packed, &previous, shape, &batch, &rig.stream)?;
        rig.finish()?;
        Ok((batch, shape))
    }
}

fn push_row(inputs: &mut StepInputs, row: RandomRow, blocks: &[u32], block_size: usize) {
    let word = |value: usize| u32::try_from(value).expect("checks are small");
    let RandomRow { context_len, num_new } = row;
    let first = inputs.token_ids.len();
    inputs.token_ids.extend(uniform(word(first).into(), num_new, RandomStep::VOCAB_SIZE));
    inputs.carry_over.extend((0..num_new).map(|_| -1));
    for position in context_len - num_new..context_len {
        inputs.positions.push(word(position));
        let block = blocks[position / block_size] as usize;
        inputs.slot_mapping.push(word(block * block_size + position % block_size));
    }
    inputs.row_starts.push(word(first + num_new));
    inputs.context_lens.push(word(context_len));
    inputs.blocks.extend(blocks);
    inputs.block_starts.push(word(inputs.blocks.len()));
    inputs.row_states.push(RowState { state_slot: None, prompt_len: 0, fresh: false });
    inputs.sample_indices.push(word(first + num_new - 1));
    inputs.sampling.push(SamplingRow::GREEDY);
}

/// The numbers below `len` in a random order.
fn shuffled(len: usize) -> Vec<u32> {
    let keys = uniform(40, len, 1 << 30);
    let mut numbers: Vec<u32> = (0..).take(len).collect();
    numbers.sort_by_key(|number| keys[*number as usize]);
    numbers
}
