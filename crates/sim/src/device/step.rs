//! One step's inputs as the device has unpacked them.

use inflight_backend::{LateRow, RowState, SamplingRow, SharedPrefixes, StepShape};

/// Everything that operators of a step look at; see [`inflight_backend::step`].
#[derive(Clone, Debug, Default)]
pub(crate) struct Step {
    /// Tokens, those carried over included.
    pub(crate) token_ids: Vec<u32>,
    pub(crate) positions: Vec<u32>,
    pub(crate) row_starts: Vec<u32>,
    /// By layer group; the first is always there.
    pub(crate) groups: Vec<GroupStep>,
    pub(crate) row_states: Vec<RowState>,
    pub(crate) blocks: Vec<u32>,
    pub(crate) sample_indices: Vec<u32>,
    pub(crate) sampling: Vec<SamplingRow>,
    pub(crate) bias: Vec<(u32, f32)>,
    pub(crate) prefixes: SharedPrefixes,
}

/// Where a layer group's keys and values are.
#[derive(Clone, Debug, Default)]
pub(crate) struct GroupStep {
    pub(crate) slot_mapping: Vec<u32>,
    pub(crate) context_lens: Vec<u32>,
    block_starts: Vec<u32>,
}

impl Step {
    /// Reads a step's words. Tokens that are carried over come from `previous`, the output words of
    /// the step before.
    pub(crate) fn unpack(&mut self, words: &[u32], previous: &[u32], shape: StepShape) {
        let at = shape.layout();
        let copy = |to: &mut Vec<u32>, range: std::ops::Range<usize>| {
            to.clear();
            to.extend_from_slice(&words[range]);
        };
        copy(&mut self.token_ids, at.token_ids);
        for (token, row) in self.token_ids.iter_mut().zip(&words[at.carry_over]) {
            if let Ok(row) = usize::try_from(row.cast_signed()) {
                *token = previous[row];
            }
        }
        copy(&mut self.positions, at.positions);
        copy(&mut self.row_starts, at.row_starts);
        let first = (at.slot_mapping, at.context_lens, at.block_starts);
        let others = at.more_groups.into_iter();
        let others = others.map(|at| (at.slot_mapping, at.context_lens, at.block_starts));
        self.groups.resize_with(1 + shape.num_more_groups, GroupStep::default);
        let sections = [first].into_iter().chain(others);
        for (group, (slots, lens, starts)) in self.groups.iter_mut().zip(sections) {
            copy(&mut group.slot_mapping, slots);
            copy(&mut group.context_lens, lens);
            copy(&mut group.block_starts, starts);
        }
        copy(&mut self.blocks, at.blocks);
        copy(&mut self.sample_indices, at.sample_indices);
        self.row_states.clear();
        let states = words[at.row_states].chunks_exact(RowState::WORDS);
        self.row_states.extend(states.map(RowState::from_words));
        self.sampling.clear();
        let rows = words[at.sampling].chunks_exact(SamplingRow::WORDS);
        self.sampling.extend(rows.map(SamplingRow::from_words));
        self.bias.clear();
        let values = words[at.bias_values].iter().map(|bits| f32::from_bits(*bits));
        self.bias.extend(words[at.bias_ids].iter().copied().zip(values));
        self.prefixes = SharedPrefixes::unpack(&words[at.prefixes], &words[at.prefix_rows]);
    }

    pub(crate) fn num_rows(&self) -> usize {
        self.row_starts.len().saturating_sub(1)
    }

    /// A row's tokens, as indices.
    pub(crate) fn row(&self, row: usize) -> std::ops::Range<usize> {
        self.row_starts[row] as usize..self.row_starts[row + 1] as usize
    }

    /// A row's blocks of a layer group.
    pub(crate) fn blocks_of(&self, group: usize, row: usize) -> &[u32] {
        let starts = &self.groups[group].block_starts;
        &self.blocks[starts[row] as usize..starts[row + 1] as usize]
    }

    /// The blocks that a row sees of the first layer group if prefixes are read once for all rows
    /// that share them: those of the first such row, then its own. And how many tokens are shared.
    pub(crate) fn cascaded_blocks_of(&self, row: usize, block_size: usize) -> (Vec<u32>, usize) {
        let own = self.blocks_of(0, row);
        let shared = self.prefixes.prefixes().iter().find_map(|prefix| {
            let rows = self.prefixes.rows(prefix);
            rows.contains(&(row as u32)).then(|| (rows[0] as usize, prefix.num_tokens))
        });
        let (reader, num_tokens) = shared.unwrap_or((row, 0));
        let num_blocks = num_tokens / block_size;
        let prefix = &self.blocks_of(0, reader)[..num_blocks];
        (prefix.iter().chain(&own[num_blocks..]).copied().collect(), num_tokens)
    }

    /// The row whose last token a sampled row is drawn after.
    pub(crate) fn row_of_sample(&self, sample: usize) -> Option<usize> {
        let end = self.sample_indices[sample] + 1;
        self.row_starts[1..].iter().position(|&row_end| row_end == end)
    }

    /// All that shifts a sampled row's logits.
    pub(crate) fn bias_of(&self, row: &SamplingRow, late: &[u32], vocab: usize) -> Vec<(u32, f32)> {
        let own = &self.bias[row.bias_start as usize..][..row.bias_len as usize];
        let mut bias = own.to_vec();
        if let Some(late_row) = row.late_row {
            let at = LateRow::read(late, late_row, vocab);
            let values = late[at.bias_values].iter().map(|bits| f32::from_bits(*bits));
            bias.extend(late[at.bias_ids].iter().copied().zip(values));
            if let Some(mask) = at.mask {
                let mask = &late[mask];
                let is_banned = |id: &u32| mask[*id as usize / 32] >> (id % 32) & 1 == 0;
                let banned = (0..vocab as u32).filter(is_banned);
                bias.extend(banned.map(|id| (id, f32::NEG_INFINITY)));
            }
        }
        bias
    }
}
