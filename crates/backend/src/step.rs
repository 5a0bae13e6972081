//! What one step ships to the device and brings back, word by word.
//!
//! The host packs everything a step needs into one run of 32-bit words, so that one copy moves it:
//!
//! ```text
//! counts         [8]                 the `StepShape`: a captured graph must not depend on it
//! token_ids      [num_tokens]        id, or anything where carry_over >= 0
//! carry_over     [num_tokens]        sampled row of the previous step, or -1
//! positions      [num_tokens]        absolute position in the sequence
//! slot_mapping   [num_tokens]        place in the KV cache: block * block_size + offset
//! row_starts     [num_rows + 1]      first token of each row
//! context_lens   [num_rows]          tokens to attend to, this chunk's included
//! block_starts   [num_rows + 1]      first entry of each row in `blocks`
//! row_states     [num_rows * 3]      see `RowState`
//! blocks         [num_blocks]        block tables, one after the other
//! sample_indices [num_sampled]       token whose logits each sampled row needs
//! sampling       [num_sampled * 20]  see `SamplingRow`
//! bias_ids       [num_bias]          tokens whose logits are shifted
//! bias_values    [num_bias]          by how much (f32)
//! ```
//!
//! Where a model's layers form several groups, those behind the first have places, lengths and
//! starts of their own; `blocks` has the tables of all groups, one group after the other:
//!
//! ```text
//! for each of num_more_groups:
//!   slot_mapping [num_tokens]
//!   context_lens [num_rows]
//!   block_starts [num_rows + 1]
//! ```
//!
//! Where the device is to be told of shared prefixes, they come last:
//!
//! ```text
//! prefixes       [num_prefixes * 3]    tokens, first of its rows in `prefix_rows`, rows
//! prefix_rows    [num_prefix_rows * 2] row, its prefix; one prefix's rows after the other's
//! ```
//!
//! The first device operation of a step unpacks it to fixed addresses and replaces carried-over
//! tokens, so that a captured graph never sees an offset.

use std::ops::Range;

use crate::{PrefixRule, RowTables, SamplingRow, SharedPrefixes};

/// Words of the `counts` section.
const NUM_COUNTS: usize = 8;

/// Most layer groups of a model, the first one included.
pub const MAX_LAYER_GROUPS: usize = 8;

/// How many of everything one step has. Known to the host when it launches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct StepShape {
    pub num_tokens: usize,
    pub num_rows: usize,
    pub num_blocks: usize,
    pub num_sampled: usize,
    pub num_bias: usize,
    /// Layer groups behind the first.
    pub num_more_groups: usize,
    /// Of [`SharedPrefixes`].
    pub num_prefixes: usize,
    pub num_prefix_rows: usize,
}

/// The most of everything that a step may have: sizes every buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct StepCapacity {
    pub max_tokens: usize,
    pub max_rows: usize,
    pub max_blocks: usize,
    pub max_bias: usize,
    /// Layer groups behind the first.
    pub num_more_groups: usize,
    /// Of [`SharedPrefixes`]; 0: the device is not told of any.
    pub max_prefixes: usize,
}

/// Where each section lies in the packed words.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct StepLayout {
    pub counts: Range<usize>,
    pub token_ids: Range<usize>,
    pub carry_over: Range<usize>,
    pub positions: Range<usize>,
    pub slot_mapping: Range<usize>,
    pub row_starts: Range<usize>,
    pub context_lens: Range<usize>,
    pub block_starts: Range<usize>,
    pub row_states: Range<usize>,
    pub blocks: Range<usize>,
    pub sample_indices: Range<usize>,
    pub sampling: Range<usize>,
    pub bias_ids: Range<usize>,
    pub bias_values: Range<usize>,
    pub more_groups: Vec<GroupLayout>,
    pub prefixes: Range<usize>,
    pub prefix_rows: Range<usize>,
}

/// Where the sections of a layer group behind the first lie.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct GroupLayout {
    pub slot_mapping: Range<usize>,
    pub context_lens: Range<usize>,
    pub block_starts: Range<usize>,
}

impl StepShape {
    /// The sections' places for a step of this shape.
    pub fn layout(&self) -> StepLayout {
        let mut next = 0;
        let mut section = |len: usize| {
            let range = next..next + len;
            next += len;
            range
        };
        StepLayout {
            counts: section(NUM_COUNTS),
            token_ids: section(self.num_tokens),
            carry_over: section(self.num_tokens),
            positions: section(self.num_tokens),
            slot_mapping: section(self.num_tokens),
            row_starts: section(self.num_rows + 1),
            context_lens: section(self.num_rows),
            block_starts: section(self.num_rows + 1),
            row_states: section(self.num_rows * RowState::WORDS),
            blocks: section(self.num_blocks),
            sample_indices: section(self.num_sampled),
            sampling: section(self.num_sampled * SamplingRow::WORDS),
            bias_ids: section(self.num_bias),
            bias_values: section(self.num_bias),
            more_groups: (0..self.num_more_groups)
                .map(|_| GroupLayout {
                    slot_mapping: section(self.num_tokens),
                    context_lens: section(self.num_rows),
                    block_starts: section(self.num_rows + 1),
                })
                .collect(),
            prefixes: section(self.num_prefixes * SharedPrefixes::WORDS),
            prefix_rows: section(self.num_prefix_rows * SharedPrefixes::ROW_WORDS),
        }
    }

    /// As the words of the `counts` section.
    pub fn to_words(&self) -> [u32; NUM_COUNTS] {
        let count = |value: usize| u32::try_from(value).expect("a step's counts fit 32 bits");
        [
            count(self.num_tokens),
            count(self.num_rows),
            count(self.num_blocks),
            count(self.num_sampled),
            count(self.num_bias),
            count(self.num_more_groups),
            count(self.num_prefixes),
            count(self.num_prefix_rows),
        ]
    }

    /// Words of a step of this shape.
    pub fn num_words(&self) -> usize {
        let group = 2 * self.num_rows + 1 + self.num_tokens;
        let first = Self { num_more_groups: 0, ..*self };
        first.layout().prefix_rows.end + self.num_more_groups * group
    }
}

impl StepCapacity {
    /// The largest shape.
    pub fn shape(&self) -> StepShape {
        StepShape {
            num_tokens: self.max_tokens,
            num_rows: self.max_rows,
            num_blocks: self.max_blocks,
            num_sampled: self.max_rows,
            num_bias: self.max_bias,
            num_more_groups: self.num_more_groups,
            num_prefixes: self.max_prefixes,
            num_prefix_rows: if self.max_prefixes == 0 { 0 } else { self.max_rows },
        }
    }
}

/// What the device remembers of a row's sequence between steps, and which part of it this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowState {
    /// The sequence's place in [`crate::ops::SamplingState`]; `None`: its tokens are not counted.
    pub state_slot: Option<u32>,
    /// Tokens at positions below this are the prompt's.
    pub prompt_len: u32,
    /// Whether the state is another sequence's and must be cleared first.
    pub fresh: bool,
}

impl RowState {
    /// Words of one row.
    pub const WORDS: usize = 3;

    /// As words.
    pub fn to_words(self) -> [u32; Self::WORDS] {
        [self.state_slot.unwrap_or(u32::MAX), self.prompt_len, u32::from(self.fresh)]
    }

    /// From [`RowState::to_words`].
    pub fn from_words(words: &[u32]) -> Self {
        let state_slot = (words[0] != u32::MAX).then_some(words[0]);
        Self { state_slot, prompt_len: words[1], fresh: words[2] != 0 }
    }
}

/// A step's inputs while the host puts them together. Kept between steps: its vectors are reused.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)]
pub struct StepInputs {
    pub token_ids: Vec<u32>,
    /// Sampled row of the previous step, or -1.
    pub carry_over: Vec<i32>,
    pub positions: Vec<u32>,
    pub slot_mapping: Vec<u32>,
    pub row_starts: Vec<u32>,
    pub context_lens: Vec<u32>,
    pub block_starts: Vec<u32>,
    pub row_states: Vec<RowState>,
    pub blocks: Vec<u32>,
    pub sample_indices: Vec<u32>,
    pub sampling: Vec<SamplingRow>,
    pub bias: Vec<(u32, f32)>,
    /// Of the layer groups behind the first.
    pub more_groups: Vec<GroupInputs>,
    pub prefixes: SharedPrefixes,
}

/// What a step knows of a layer group behind the first.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)]
pub struct GroupInputs {
    pub slot_mapping: Vec<u32>,
    pub context_lens: Vec<u32>,
    /// Where each row's table begins in `blocks`.
    pub block_starts: Vec<u32>,
    pub blocks: Vec<u32>,
}

impl StepInputs {
    /// Empty inputs for a model of so many layer groups behind the first.
    pub fn of_groups(num_more_groups: usize) -> Self {
        let more_groups = (0..num_more_groups).map(|_| GroupInputs::default()).collect();
        Self { more_groups, ..Self::default() }
    }

    /// Empties everything and keeps the memory. `row_starts` and `block_starts` begin with 0.
    pub fn clear(&mut self) {
        self.token_ids.clear();
        self.carry_over.clear();
        self.positions.clear();
        self.slot_mapping.clear();
        self.row_starts.clear();
        self.row_starts.push(0);
        self.context_lens.clear();
        self.block_starts.clear();
        self.block_starts.push(0);
        self.row_states.clear();
        self.blocks.clear();
        self.sample_indices.clear();
        self.sampling.clear();
        self.bias.clear();
        self.prefixes.clear();
        for group in &mut self.more_groups {
            group.slot_mapping.clear();
            group.context_lens.clear();
            group.block_starts.clear();
            group.block_starts.push(0);
            group.blocks.clear();
        }
    }

    /// How many of everything there is.
    pub fn shape(&self) -> StepShape {
        StepShape {
            num_tokens: self.token_ids.len(),
            num_rows: self.context_lens.len(),
            num_blocks: self.blocks.len()
                + self.more_groups.iter().map(|group| group.blocks.len()).sum::<usize>(),
            num_sampled: self.sample_indices.len(),
            num_bias: self.bias.len(),
            num_more_groups: self.more_groups.len(),
            num_prefixes: self.prefixes.prefixes().len(),
            num_prefix_rows: self.prefixes.num_rows(),
        }
    }

    /// Finds what rows share, once all of them are there.
    pub fn find_prefixes(&mut self, rule: PrefixRule, block_size: usize) {
        let tables = RowTables {
            row_starts: &self.row_starts,
            context_lens: &self.context_lens,
            block_starts: &self.block_starts,
            blocks: &self.blocks,
            block_size,
        };
        self.prefixes.find(tables, rule);
    }

    /// Writes everything into `words` and returns the shape.
    ///
    /// # Panics
    /// If `words` is shorter than [`StepShape::num_words`], or the vectors' lengths disagree.
    pub fn pack(&self, words: &mut [u32]) -> StepShape {
        let shape = self.shape();
        let at = shape.layout();
        words[at.counts].copy_from_slice(&shape.to_words());
        words[at.token_ids].copy_from_slice(&self.token_ids);
        for (word, row) in words[at.carry_over].iter_mut().zip(&self.carry_over) {
            *word = row.cast_unsigned();
        }
        words[at.positions].copy_from_slice(&self.positions);
        words[at.slot_mapping].copy_from_slice(&self.slot_mapping);
        words[at.row_starts].copy_from_slice(&self.row_starts);
        words[at.context_lens].copy_from_slice(&self.context_lens);
        words[at.block_starts].copy_from_slice(&self.block_starts);
        let states = words[at.row_states].chunks_exact_mut(RowState::WORDS);
        for (chunk, state) in states.zip(&self.row_states) {
            chunk.copy_from_slice(&state.to_words());
        }
        let blocks = &mut words[at.blocks];
        let mut num_blocks = self.blocks.len();
        blocks[..num_blocks].copy_from_slice(&self.blocks);
        for group in &self.more_groups {
            blocks[num_blocks..][..group.blocks.len()].copy_from_slice(&group.blocks);
            num_blocks += group.blocks.len();
        }
        words[at.sample_indices].copy_from_slice(&self.sample_indices);
        let sampling = words[at.sampling].chunks_exact_mut(SamplingRow::WORDS);
        for (chunk, row) in sampling.zip(&self.sampling) {
            chunk.copy_from_slice(&row.to_words());
        }
        for (word, (id, _)) in words[at.bias_ids].iter_mut().zip(&self.bias) {
            *word = *id;
        }
        for (word, (_, value)) in words[at.bias_values].iter_mut().zip(&self.bias) {
            *word = value.to_bits();
        }
        self.pack_more_groups(&at.more_groups, words);
        let (words, prefix_rows) = words.split_at_mut(at.prefix_rows.start);
        self.prefixes.pack(&mut words[at.prefixes], &mut prefix_rows[..at.prefix_rows.len()]);
        shape
    }
}

impl StepInputs {
    fn pack_more_groups(&self, layouts: &[GroupLayout], words: &mut [u32]) {
        let mut first = self.blocks.len();
        for (group, at) in self.more_groups.iter().zip(layouts) {
            words[at.slot_mapping.clone()].copy_from_slice(&group.slot_mapping);
            words[at.context_lens.clone()].copy_from_slice(&group.context_lens);
            let first_word = u32::try_from(first).expect("a step's blocks fit 32 bits");
            let starts = words[at.block_starts.clone()].iter_mut().zip(&group.block_starts);
            starts.for_each(|(word, start)| *word = first_word + start);
            first += group.blocks.len();
        }
    }
}

/// Most entries of `top_logprobs` that a row can ask for.
pub const MAX_TOP_LOGPROBS: usize = 20;

/// Where a step's outputs lie in the output words; tokens first, since the next step reads them.
///
/// ```text
/// tokens        [max_rows]
/// logprobs      [max_rows]        f32, of the token drawn
/// top_ids       [max_rows * 20]   likeliest first; u32::MAX where a row asked for fewer
/// top_logprobs  [max_rows * 20]   f32
/// ```
///
/// Logprobs are of the model's own distribution, before penalties, bias and temperature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputLayout {
    /// Most sampled rows of a step.
    pub max_rows: usize,
}

impl OutputLayout {
    /// All words.
    pub const fn num_words(self) -> usize {
        self.max_rows * (2 + 2 * MAX_TOP_LOGPROBS)
    }

    /// The words that are always copied back: tokens and their logprobs.
    pub const fn num_token_words(self) -> usize {
        self.max_rows * 2
    }

    /// Word of row `row`'s token.
    pub const fn token(self, row: usize) -> usize {
        row
    }

    /// Word of row `row`'s logprob.
    pub const fn logprob(self, row: usize) -> usize {
        self.max_rows + row
    }

    /// Words of row `row`'s likeliest tokens.
    pub const fn top_ids(self, row: usize) -> Range<usize> {
        let start = 2 * self.max_rows + row * MAX_TOP_LOGPROBS;
        start..start + MAX_TOP_LOGPROBS
    }

    /// Words of their logprobs.
    pub const fn top_logprobs(self, row: usize) -> Range<usize> {
        let start = (2 + MAX_TOP_LOGPROBS) * self.max_rows + row * MAX_TOP_LOGPROBS;
        start..start + MAX_TOP_LOGPROBS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_sections_follow_each_other_and_keep_their_values() {
        let mut inputs = StepInputs::default();
        inputs.clear();
        inputs.token_ids.extend([7, 0, 9]);
        inputs.carry_over.extend([-1, 4, -1]);
        inputs.positions.extend([0, 11, 12]);
        inputs.slot_mapping.extend([32, 5, 6]);
        inputs.row_starts.extend([1, 3]);
        inputs.context_lens.extend([1, 13]);
        inputs.block_starts.extend([1, 2]);
        inputs.row_states.extend([
            RowState { state_slot: None, prompt_len: 3, fresh: true },
            RowState { state_slot: Some(2), prompt_len: 5, fresh: false },
        ]);
        inputs.blocks.extend([2, 0]);
        inputs.sample_indices.push(2);
        let row = SamplingRow {
            seed: 0x0123_4567_89ab_cdef,
            top_logprobs: Some(0),
            bias_len: 1,
            ..SamplingRow::GREEDY
        };
        inputs.sampling.push(row);
        inputs.bias.push((42, -1.5));

        let mut words = vec![0; inputs.shape().num_words()];
        let shape = inputs.pack(&mut words);
        let at = shape.layout();
        assert_eq!(words[at.counts], [3, 2, 2, 1, 1, 0, 0, 0]);
        assert_eq!(shape.num_words(), 8 + 3 * 4 + 3 + 2 + 3 + 6 + 2 + 1 + 20 + 2);
        assert_eq!(words[at.carry_over], [u32::MAX, 4, u32::MAX]);
        assert_eq!(words[at.row_starts], [0, 1, 3]);
        assert_eq!(SamplingRow::from_words(&words[at.sampling]), row);
        assert_eq!(RowState::from_words(&words[at.row_states][3..]).state_slot, Some(2));
        assert_eq!((words[at.bias_ids.start], words[at.bias_values.start]), (42, 0xbfc0_0000));
    }

    #[test]
    fn groups_have_tables_of_their_own() {
        let mut inputs = StepInputs::of_groups(2);
        inputs.clear();
        inputs.token_ids.extend([7, 9]);
        inputs.carry_over.extend([-1, -1]);
        inputs.positions.extend([3, 8]);
        inputs.slot_mapping.extend([3, 12]);
        inputs.row_starts.extend([1, 2]);
        inputs.context_lens.extend([4, 9]);
        inputs.block_starts.extend([1, 4]);
        inputs.row_states.extend([RowState { state_slot: None, prompt_len: 3, fresh: true }; 2]);
        inputs.blocks.extend([0, 1, 2, 3]);
        for (group, block) in inputs.more_groups.iter_mut().zip([10, 20]) {
            group.slot_mapping.extend([4 * block + 3, 4 * block + 4]);
            group.context_lens.extend([4, 5]);
            group.block_starts.extend([1, 3]);
            group.blocks.extend([block, block, block + 1]);
        }
        let mut words = vec![0; inputs.shape().num_words()];
        let shape = inputs.pack(&mut words);
        let at = shape.layout();
        assert_eq!(words[at.counts], [2, 2, 10, 0, 0, 2, 0, 0]);
        assert_eq!(words[at.blocks], [0, 1, 2, 3, 10, 10, 11, 20, 20, 21]);
        let starts = at.more_groups.iter().map(|group| &words[group.block_starts.clone()]);
        assert!(starts.eq([[4, 5, 7], [7, 8, 10]]));
        assert_eq!(words[at.more_groups[1].slot_mapping.clone()], [83, 84]);
        assert_eq!(at.more_groups[1].block_starts.end, words.len());
    }

    #[test]
    fn output_sections_do_not_overlap() {
        let layout = OutputLayout { max_rows: 3 };
        assert_eq!(layout.token(2) + 1, layout.logprob(0));
        assert_eq!(layout.logprob(2) + 1, layout.top_ids(0).start);
        assert_eq!(layout.top_ids(2).end, layout.top_logprobs(0).start);
        assert_eq!(layout.top_logprobs(2).end, layout.num_words());
    }
}
