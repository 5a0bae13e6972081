//! Counting each sequence's tokens, for penalties.

use crate::RowState;

/// Bit of a token's count that says that the prompt contains it.
pub(super) const IN_PROMPT: u32 = 1 << 31;

/// Arguments of [`track_tokens`].
#[allow(missing_docs)]
pub(crate) struct TrackTokens<'a> {
    /// `[num_tokens]`.
    pub(crate) token_ids: &'a [u32],
    /// `[num_tokens]`.
    pub(crate) positions: &'a [u32],
    /// `[num_rows + 1]`.
    pub(crate) row_starts: &'a [u32],
    /// `[num_rows * 3]`.
    pub(crate) row_states: &'a [u32],
    /// `[max_rows, vocab_size]`; see [`crate::ops::SamplingState`].
    pub(crate) token_counts: &'a mut [u32],
    pub(crate) num_rows: usize,
    pub(crate) vocab_size: usize,
}

/// Counts the step's input tokens for the rows that are tracked, clearing fresh ones first.
///
/// Token ids outside the vocabulary are not counted: no logit of theirs can be penalised.
pub(crate) fn track_tokens(args: TrackTokens<'_>) {
    let states = args.row_states.chunks_exact(RowState::WORDS).map(RowState::from_words);
    for (bounds, state) in args.row_starts.windows(2).zip(states).take(args.num_rows) {
        let Some(slot) = state.state_slot else { continue };
        let counts = &mut args.token_counts[slot as usize * args.vocab_size..][..args.vocab_size];
        if state.fresh {
            counts.fill(0);
        }
        let tokens = bounds[0] as usize..bounds[1] as usize;
        for (id, position) in args.token_ids[tokens.clone()].iter().zip(&args.positions[tokens]) {
            let Some(count) = counts.get_mut(*id as usize) else { continue };
            if *position < state.prompt_len {
                *count |= IN_PROMPT;
            } else {
                *count += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOCAB: usize = 6;

    struct Row {
        state: RowState,
        tokens: Vec<(u32, u32)>,
    }

    fn track(counts: &mut [u32], rows: &[Row]) {
        let mut row_starts = vec![0];
        let (mut token_ids, mut positions, mut row_states) = (vec![], vec![], vec![]);
        for row in rows {
            token_ids.extend(row.tokens.iter().map(|(id, _)| *id));
            positions.extend(row.tokens.iter().map(|(_, position)| *position));
            row_states.extend(row.state.to_words());
            row_starts.push(token_ids.len() as u32);
        }
        track_tokens(TrackTokens {
            token_ids: &token_ids,
            positions: &positions,
            row_starts: &row_starts,
            row_states: &row_states,
            token_counts: counts,
            num_rows: rows.len(),
            vocab_size: VOCAB,
        });
    }

    fn row(state_slot: Option<u32>, prompt_len: u32, fresh: bool, tokens: &[(u32, u32)]) -> Row {
        Row { state: RowState { state_slot, prompt_len, fresh }, tokens: tokens.to_vec() }
    }

    #[test]
    fn prompts_are_marked_and_outputs_counted_over_several_steps() {
        let mut counts = [9; 3 * VOCAB];
        // A prompt of three tokens in two chunks, beside an untracked row and another sequence.
        track(
            &mut counts,
            &[
                row(Some(1), 3, true, &[(4, 0), (4, 1)]),
                row(None, 0, true, &[(0, 5), (1, 6)]),
                row(Some(2), 1, true, &[(5, 0), (2, 1), (2, 2), (5, 3)]),
            ],
        );
        track(&mut counts, &[row(Some(1), 3, false, &[(0, 2)])]);
        track(&mut counts, &[row(Some(1), 3, false, &[(4, 3)])]);
        track(&mut counts, &[row(Some(1), 3, false, &[(3, 4)])]);
        track(&mut counts, &[row(Some(1), 3, false, &[(3, 5)])]);
        assert_eq!(counts[..VOCAB], [9; VOCAB]);
        assert_eq!(counts[VOCAB..2 * VOCAB], [IN_PROMPT, 0, 0, 2, IN_PROMPT | 1, 0]);
        assert_eq!(counts[2 * VOCAB..], [0, 0, 2, 0, 0, IN_PROMPT | 1]);
    }

    #[test]
    fn another_sequence_starts_from_nothing() {
        let mut counts = [0; VOCAB];
        track(&mut counts, &[row(Some(0), 1, true, &[(1, 0), (1, 1), (1, 2)])]);
        track(&mut counts, &[row(Some(0), 2, true, &[(2, 0)])]);
        assert_eq!(counts, [0, 0, IN_PROMPT, 0, 0, 0]);
        // A recomputed sequence is fresh, and its outputs are counted again.
        track(&mut counts, &[row(Some(0), 1, true, &[(1, 0), (1, 1), (1, 2)])]);
        assert_eq!(counts, [0, IN_PROMPT | 2, 0, 0, 0, 0]);
    }

    #[test]
    fn tokens_outside_the_vocabulary_are_left_out() {
        let mut counts = [0; 2 * VOCAB];
        track(&mut counts, &[row(Some(0), 1, true, &[(VOCAB as u32, 0), (u32::MAX, 1)])]);
        assert_eq!(counts, [0; 2 * VOCAB]);
    }
}
