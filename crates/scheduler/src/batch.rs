//! What one step runs.

use inflight_kv_cache::{BlockCopy, BlockId};

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
    /// Blocks of sinks whose keys are to turn after the copies and before the rows are computed.
    pub turns: Vec<BlockTurn>,
    /// Rows that compute the end of a prompt of which only a part is to stay.
    pub cuts: Vec<PromptCut>,
}

impl Batch {
    /// A batch of nothing.
    #[must_use]
    pub fn new(number: u64) -> Self {
        Self {
            number,
            rows: Vec::new(),
            num_tokens: 0,
            num_uncounted: 0,
            num_probes: 0,
            moves: Moves::default(),
            turns: Vec::new(),
            cuts: Vec::new(),
        }
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

/// A block to copy with keys that were computed for other positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockTurn {
    /// From where to where. The source may be read by others.
    pub copy: BlockCopy,
    /// By how many positions the tokens move on.
    pub by: usize,
    /// Which layer group's block it is.
    pub group: usize,
}

/// A prompt to cut once its last row is computed: to what its last tokens attend to most.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptCut {
    /// Which of the batch's rows.
    pub row: usize,
    /// Tokens at the row's end that decide, and that stay.
    pub num_observed: usize,
    /// Where what stays is to be copied to, in the order of tokens; all full.
    pub blocks: Vec<BlockId>,
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
    /// Tokens of those before that are not in the KV cache any more: what is left of them counts as
    /// `num_dropped` fewer. Those of the first layer group; the others' tables say it of theirs.
    pub num_dropped: usize,
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
