//! Spreading a step's packed words over the arrays that operators read, and picking sampled rows.

use std::ops::Range;

use super::Cores;
use crate::{StepShape, cpu::pool::SharedMut};

/// The arrays of [`crate::DeviceBatch`], for writing.
#[allow(missing_docs)]
pub(crate) struct BatchMut<'a> {
    pub(crate) token_ids: &'a mut [u32],
    pub(crate) positions: &'a mut [u32],
    pub(crate) slot_mapping: &'a mut [u32],
    pub(crate) row_starts: &'a mut [u32],
    pub(crate) context_lens: &'a mut [u32],
    pub(crate) block_starts: &'a mut [u32],
    pub(crate) row_states: &'a mut [u32],
    pub(crate) blocks: &'a mut [u32],
    pub(crate) sample_indices: &'a mut [u32],
    pub(crate) sampling: &'a mut [u32],
    pub(crate) bias_ids: &'a mut [u32],
    pub(crate) bias_values: &'a mut [u32],
    pub(crate) more_groups: Vec<GroupMut<'a>>,
}

/// The same for [`crate::GroupPlaces`].
#[allow(missing_docs)]
pub(crate) struct GroupMut<'a> {
    pub(crate) slot_mapping: &'a mut [u32],
    pub(crate) context_lens: &'a mut [u32],
    pub(crate) block_starts: &'a mut [u32],
}

/// Copies every section of `packed` to its array, then replaces carried-over tokens by those in
/// `previous`, the output words of the step before.
pub(crate) fn unpack(packed: &[u32], previous: &[u32], shape: StepShape, batch: BatchMut<'_>) {
    let at = shape.layout();
    let token_ids = &mut batch.token_ids[..shape.num_tokens];
    token_ids.copy_from_slice(&packed[at.token_ids]);
    for (token, row) in token_ids.iter_mut().zip(&packed[at.carry_over]) {
        if let Ok(row) = usize::try_from(row.cast_signed()) {
            // Output words begin with the rows' tokens.
            *token = previous[row];
        }
    }
    let copy = |array: &mut [u32], section: Range<usize>| {
        array[..section.len()].copy_from_slice(&packed[section]);
    };
    copy(batch.positions, at.positions);
    copy(batch.slot_mapping, at.slot_mapping);
    copy(batch.row_starts, at.row_starts);
    copy(batch.context_lens, at.context_lens);
    copy(batch.block_starts, at.block_starts);
    copy(batch.row_states, at.row_states);
    copy(batch.blocks, at.blocks);
    copy(batch.sample_indices, at.sample_indices);
    copy(batch.sampling, at.sampling);
    copy(batch.bias_ids, at.bias_ids);
    copy(batch.bias_values, at.bias_values);
    for (group, at) in batch.more_groups.into_iter().zip(at.more_groups) {
        copy(group.slot_mapping, at.slot_mapping);
        copy(group.context_lens, at.context_lens);
        copy(group.block_starts, at.block_starts);
    }
}

/// Arguments of [`gather_sampled`].
pub(crate) struct GatherSampled<'a> {
    /// `[num_tokens, len]`.
    pub(crate) x: &'a [f32],
    /// `[num_sampled]`.
    pub(crate) sample_indices: &'a [u32],
    /// `[num_sampled, len]`.
    pub(crate) out: &'a mut [f32],
    pub(crate) len: usize,
}

/// `out[s] = x[sample_indices[s]]`.
pub(crate) fn gather_sampled(cores: Cores<'_>, args: GatherSampled<'_>) {
    let len = args.len;
    let out = SharedMut::new(args.out);
    cores.for_rows(args.sample_indices.len(), len, |rows| {
        // SAFETY: rows of different tasks are different.
        let out = unsafe { out.slice(rows.start * len..rows.end * len) };
        for (token, row) in args.sample_indices[rows].iter().zip(out.chunks_exact_mut(len.max(1))) {
            row.copy_from_slice(&args.x[*token as usize * len..][..len]);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{RowState, SamplingRow, StepInputs, cpu::kernels::testing::at_every_level};

    const UNTOUCHED: u32 = 0xdead_beef;

    fn inputs() -> StepInputs {
        let mut inputs = StepInputs::of_groups(1);
        inputs.clear();
        inputs.token_ids.extend([7, 0, 9, 0]);
        inputs.carry_over.extend([-1, 2, -1, 0]);
        inputs.positions.extend([0, 11, 12, 3]);
        inputs.slot_mapping.extend([32, 5, 6, 90]);
        inputs.row_starts.extend([1, 3, 4]);
        inputs.context_lens.extend([1, 13, 4]);
        inputs.block_starts.extend([1, 2, 3]);
        let state = RowState { state_slot: Some(2), prompt_len: 5, fresh: true };
        inputs.row_states.extend([state; 3]);
        inputs.blocks.extend([2, 0, 5]);
        inputs.sample_indices.extend([2, 3]);
        inputs.sampling.extend([SamplingRow { seed: u64::MAX / 3, ..SamplingRow::GREEDY }; 2]);
        inputs.bias.push((42, -1.5));
        let group = &mut inputs.more_groups[0];
        group.slot_mapping.extend([16, 17, 18, 19]);
        group.context_lens.extend([1, 9, 4]);
        group.block_starts.extend([1, 1, 2]);
        group.blocks.extend([7, 8]);
        inputs
    }

    #[test]
    fn sections_arrive_and_carried_over_tokens_are_replaced() {
        let inputs = inputs();
        let mut packed = vec![0; inputs.shape().num_words()];
        let shape = inputs.pack(&mut packed);
        let mut arrays = vec![[UNTOUCHED; 40]; 15];
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o] = arrays.as_mut_slice() else {
            unreachable!()
        };
        let batch = BatchMut {
            token_ids: a,
            positions: b,
            slot_mapping: c,
            row_starts: d,
            context_lens: e,
            block_starts: f,
            row_states: g,
            blocks: h,
            sample_indices: i,
            sampling: j,
            bias_ids: k,
            bias_values: l,
            more_groups: vec![GroupMut { slot_mapping: m, context_lens: n, block_starts: o }],
        };
        unpack(&packed, &[100, 101, 102], shape, batch);

        let state = [2, 5, 1];
        let sampling = inputs.sampling[0].to_words();
        let expected: [&[u32]; 15] = [
            &[7, 102, 9, 100],
            &[0, 11, 12, 3],
            &[32, 5, 6, 90],
            &[0, 1, 3, 4],
            &[1, 13, 4],
            &[0, 1, 2, 3],
            &[state, state, state].concat(),
            &[2, 0, 5, 7, 8],
            &[2, 3],
            &[sampling, sampling].concat(),
            &[42],
            &[(-1.5_f32).to_bits()],
            &[16, 17, 18, 19],
            &[1, 9, 4],
            &[3, 4, 4, 5],
        ];
        for (array, expected) in arrays.iter().zip(expected) {
            let (used, rest) = array.split_at(expected.len());
            assert_eq!(used, expected);
            assert!(rest.iter().all(|word| *word == UNTOUCHED));
        }
    }

    #[test]
    fn sampled_rows_are_gathered() {
        let x: Vec<f32> = (0..3000).map(|i| i as f32).collect();
        at_every_level(|cores| {
            for (len, sample_indices) in [(3, vec![4, 0, 4]), (1000, vec![2, 1]), (5, vec![])] {
                let mut out = vec![f32::NAN; sample_indices.len() * len + 1];
                let args =
                    GatherSampled { x: &x, sample_indices: &sample_indices, out: &mut out, len };
                gather_sampled(cores, args);
                let rows = sample_indices.iter().flat_map(|s| &x[*s as usize * len..][..len]);
                assert!(rows.eq(&out[..out.len() - 1]));
                assert!(out[out.len() - 1].is_nan());
            }
        });
    }
}
