//! What one step runs.

use crate::{Moves, SequenceId, StateSlot};

/// The rows of one step, planned and not yet launched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Counts the plans of a scheduler, from 1; names the batch in traces.
    pub number: u64,
    /// Rows in the order of the device's inputs: rows of one token, then chunks, each in order of
    /// arrival. May be empty if there is something to move.
    pub rows: Vec<Row>,
    /// Sum of the rows' lengths.
    pub num_tokens: usize,
    /// Sum of [`Row::num_uncounted`].
    pub num_uncounted: usize,
    /// Input tokens that may be probed.
    pub num_probes: usize,
    /// Blocks to copy before, and to move beside computing the rows.
    pub moves: Moves,
}

impl Batch {
    /// A batch of nothing.
    #[must_use]
    pub fn new(number: u64) -> Self {
        let (rows, moves) = (Vec::new(), Moves::default());
        Self { number, rows, num_tokens: 0, num_uncounted: 0, num_probes: 0, moves }
    }

    /// The rows that yield a token, in row order: the order of the device's sampled outputs and of
    /// the calls to [`commit`](crate::Scheduler::commit).
    pub fn sampled_rows(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|row| row.samples)
    }

    /// Number of rows that yield a token.
    #[must_use]
    pub fn num_sampled(&self) -> usize {
        self.sampled_rows().count()
    }
}

/// One sequence's share of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// The sequence.
    pub id: SequenceId,
    /// Where its sampling state lives on the device.
    pub state_slot: StateSlot,
    /// Position of the first input token in the sequence.
    pub start: usize,
    /// Number of input tokens; at least one.
    pub len: usize,
    /// Where the input tokens come from.
    pub inputs: RowInputs,
    /// `start + len`: tokens that the row's last token attends to, itself included, and the
    /// position of the token it yields.
    pub context_len: usize,
    /// Whether the row reaches the end of what is known, and so yields a token: true for every
    /// decode and for the last chunk of a prefill.
    pub samples: bool,
    /// First row since the state slot was assigned: the device's sampling state must be cleared.
    pub fresh: bool,
    /// Tokens before `start` that no row has had as inputs since the state slot was assigned, as
    /// their keys and values were found or moved: they must be counted before this row's own.
    /// Not 0 only in a fresh row, and only for sequences whose tokens are counted.
    pub num_uncounted: usize,
    /// Tokens of the prompt; later ones are generated, also when they are computed again after a
    /// preemption.
    pub prompt_len: usize,
}

/// Where a row's input tokens come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowInputs {
    /// The host knows them: `scheduler.tokens(id)[start..context_len]`.
    Known,
    /// The one input token is still on the device: it is what the same sequence's row in the
    /// previous batch yields (the carry-over).
    Pending,
}
