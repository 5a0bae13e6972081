//! Batches whose sequences lie scattered in the KV cache, as in a server that has run for a while.

use inflight_backend::{RowState, SamplingRow, StepInputs};

/// One sequence's share of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Row {
    /// Which of the sequences.
    pub(super) sequence: usize,
    /// Tokens after the step.
    pub(super) context_len: usize,
    /// How many of them are new.
    pub(super) num_new: usize,
}

/// Sequences that have blocks for as many tokens each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sequences {
    pub(super) num: usize,
    pub(super) len: usize,
    pub(super) block_size: usize,
}

impl Sequences {
    /// Blocks of all.
    pub(super) fn num_blocks(&self) -> usize {
        self.num * self.len.div_ceil(self.block_size)
    }

    /// A step of `rows`, each of which is sampled greedily.
    pub(super) fn step(&self, rows: &[Row]) -> StepInputs {
        let mut inputs = StepInputs::default();
        inputs.clear();
        for row in rows {
            self.push(&mut inputs, *row);
        }
        inputs
    }

    /// Steps of at most `max_tokens` tokens that write everything.
    pub(super) fn fill(&self, max_tokens: usize) -> Vec<StepInputs> {
        let starts =
            |sequence| (0..self.len).step_by(max_tokens.max(1)).map(move |start| (sequence, start));
        let row = |(sequence, start)| {
            let context_len = self.len.min(start + max_tokens);
            self.step(&[Row { sequence, context_len, num_new: context_len - start }])
        };
        (0..self.num).flat_map(starts).map(row).collect()
    }

    /// Neighbours in a sequence lie as far apart as there are sequences.
    fn block(&self, sequence: usize, i: usize) -> u32 {
        word(i * self.num + sequence)
    }

    fn push(&self, inputs: &mut StepInputs, row: Row) {
        let Row { sequence, context_len, num_new } = row;
        for position in context_len - num_new..context_len {
            let block = self.block(sequence, position / self.block_size) as usize;
            inputs.token_ids.push(0);
            inputs.carry_over.push(-1);
            inputs.positions.push(word(position));
            inputs.slot_mapping.push(word(block * self.block_size + position % self.block_size));
        }
        let num_blocks = context_len.div_ceil(self.block_size);
        inputs.blocks.extend((0..num_blocks).map(|i| self.block(sequence, i)));
        inputs.block_starts.push(word(inputs.blocks.len()));
        inputs.row_starts.push(word(inputs.token_ids.len()));
        inputs.context_lens.push(word(context_len));
        inputs.row_states.push(RowState { state_slot: None, prompt_len: 1, fresh: false });
        inputs.sample_indices.push(word(inputs.token_ids.len() - 1));
        inputs.sampling.push(SamplingRow::GREEDY);
    }
}

fn word(value: usize) -> u32 {
    u32::try_from(value).expect("counts of a step fit 32 bits")
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn filling_writes_every_token_once_and_only_to_its_sequence() {
        let sequences = Sequences { num: 3, len: 37, block_size: 16 };
        let steps = sequences.fill(10);
        assert_eq!(steps.len(), 3 * 4);
        let slots: Vec<u32> = steps.iter().flat_map(|step| step.slot_mapping.clone()).collect();
        let distinct: HashSet<_> = slots.iter().collect();
        assert_eq!((slots.len(), distinct.len()), (3 * 37, 3 * 37));
        assert!(slots.iter().all(|slot| (*slot as usize) < sequences.num_blocks() * 16));
        for step in &steps {
            let blocks: HashSet<u32> = step.blocks.iter().copied().collect();
            assert!(step.slot_mapping.iter().all(|slot| blocks.contains(&(slot / 16))));
        }
    }

    #[test]
    fn a_row_has_its_new_tokens_at_the_end_of_its_context() {
        let sequences = Sequences { num: 2, len: 40, block_size: 16 };
        let rows = [
            Row { sequence: 0, context_len: 40, num_new: 1 },
            Row { sequence: 1, context_len: 20, num_new: 3 },
        ];
        let step = sequences.step(&rows);
        assert_eq!(step.positions, [39, 17, 18, 19]);
        assert_eq!(step.row_starts, [0, 1, 4]);
        assert_eq!(step.blocks, [0, 2, 4, 1, 3]);
        assert_eq!(step.slot_mapping, [4 * 16 + 7, 3 * 16 + 1, 3 * 16 + 2, 3 * 16 + 3]);
        assert_eq!(step.sample_indices, [0, 3]);
    }
}
