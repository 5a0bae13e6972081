//! A device whose memory remembers what was written, so that each row can check what it reads.
//!
//! It runs a batch from what was staged at launch, in launch order, as one compute stream does, and
//! as late as possible: when the host collects. By then the scheduler has long moved on, so any
//! block or state slot that it gives away too early is seen here as foreign data. Moves between
//! host and device have streams of their own: they happen as early or as late as events allow.

use std::collections::{HashMap, HashSet};

use inflight_scheduler::{
    BlockMove, Moves, Row, RowInputs, Scheduler, SchedulerConfig, SequenceId,
};

use crate::workload::Identity;

/// One row as the host staged it: nothing in it changes after the launch.
#[derive(Debug)]
pub(crate) struct StagedRow {
    row: Row,
    /// `[context_len]`: place in the KV cache of every position that the row reads or writes.
    slot_mapping: Vec<u32>,
    /// `[len]`; `None` is taken from the previous batch's output.
    inputs: Vec<Option<u32>>,
    /// `[num_uncounted]`: tokens before the inputs that were not counted yet.
    uncounted: Vec<u32>,
}

impl StagedRow {
    pub(crate) fn stage(row: &Row, scheduler: &Scheduler) -> Self {
        let table = scheduler.block_table(row.id);
        let tokens = scheduler.tokens(row.id);
        let inputs = match row.inputs {
            RowInputs::Known => {
                tokens[row.start..row.context_len].iter().copied().map(Some).collect()
            }
            RowInputs::Pending => {
                assert_eq!(row.len, 1, "a carry-over is one token");
                assert!(tokens.len() <= row.start, "a token that the host knows is no carry-over");
                vec![None]
            }
        };
        Self {
            row: row.clone(),
            slot_mapping: (0..row.context_len).map(|position| table.slot(position)).collect(),
            inputs,
            uncounted: tokens[..row.num_uncounted].to_vec(),
        }
    }
}

/// What one place of the KV cache holds: a hash of the token there, of all before it and of the
/// salt, which is all that keys and values depend on.
type Entry = u64;

/// When moves happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MoveTime {
    /// As soon as the batches before have computed.
    Early,
    /// Just before the batch is collected.
    Late,
}

/// What one state slot holds.
#[derive(Debug)]
struct SamplingState {
    id: SequenceId,
    /// Every token that was counted, as penalties see them.
    tokens: Vec<u32>,
}

/// One sequence as the device knows it.
#[derive(Debug)]
struct Known {
    identity: Identity,
    /// What its places must hold, as far as that was needed yet.
    entries: Vec<Entry>,
    num_computed: usize,
}

impl Known {
    fn entry(&mut self, position: usize) -> Entry {
        while self.entries.len() <= position {
            let before = self.entries.last().copied();
            let before = before.unwrap_or(u64::from(self.identity.lengths.salt) + 1);
            let token = u64::from(self.identity.token(self.entries.len()));
            let hash = (before ^ token.wrapping_add(1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            self.entries.push(hash ^ (hash >> 29));
        }
        self.entries[position]
    }
}

/// KV cache, swap space, sampling states and the outputs of the previous batch.
#[derive(Debug)]
pub(crate) struct Device {
    memory: Vec<Option<Entry>>,
    host: Vec<Option<Entry>>,
    states: Vec<Option<SamplingState>>,
    /// What the previous batch yielded.
    outputs: Vec<(SequenceId, u32)>,
    sequences: HashMap<SequenceId, Known>,
    block_size: usize,
    move_time: MoveTime,
    pub(crate) num_computed_tokens: usize,
}

impl Device {
    pub(crate) fn new(config: &SchedulerConfig, move_time: MoveTime) -> Self {
        Self {
            memory: vec![None; config.num_blocks * config.block_size],
            host: vec![None; config.memory.num_swap_blocks * config.block_size],
            states: (0..config.max_num_seqs).map(|_| None).collect(),
            outputs: Vec::new(),
            sequences: HashMap::new(),
            block_size: config.block_size,
            move_time,
            num_computed_tokens: 0,
        }
    }

    pub(crate) fn know(&mut self, identity: Identity) {
        let known = Known { entries: Vec::new(), num_computed: 0, identity };
        self.sequences.insert(known.identity.id, known);
    }

    /// Runs a batch and returns the sampled rows' tokens, in row order.
    ///
    /// Every layer writes all rows' keys and values, then every row attends. Rows are checked
    /// before and after the writes, since a write by a neighbour must not reach what a row reads.
    pub(crate) fn run(&mut self, batch: &[StagedRow], moves: &Moves) -> &[(SequenceId, u32)] {
        if self.move_time == MoveTime::Early {
            self.swap(moves);
        }
        self.copy(moves);
        for staged in batch {
            self.begin_row(&staged.row);
            self.check_context(staged, staged.row.start);
        }
        let mut written = HashSet::new();
        for staged in batch {
            self.write(staged, &mut written);
        }
        let mut outputs = Vec::new();
        for staged in batch {
            self.check_context(staged, staged.row.context_len);
            outputs.extend(self.sample(&staged.row));
        }
        if self.move_time == MoveTime::Late {
            self.swap(moves);
        }
        self.outputs = outputs;
        &self.outputs
    }

    /// All copies read what was there before any of them wrote.
    fn copy(&mut self, moves: &Moves) {
        let read = |from: usize| self.memory[from * self.block_size..][..self.block_size].to_vec();
        let blocks: Vec<_> =
            moves.copies.iter().map(|copy| (copy.to.index(), read(copy.from.index()))).collect();
        for (to, block) in blocks {
            self.memory[to * self.block_size..][..self.block_size].copy_from_slice(&block);
        }
    }

    /// The two directions have a stream each, so their order is not known: moves that touch the
    /// same block would be a mistake.
    fn swap(&mut self, moves: &Moves) {
        let places = |block: &BlockMove| {
            let (device, host) = (block.device.index(), block.host.0 as usize);
            (device * self.block_size, host * self.block_size)
        };
        let mut touched = HashSet::new();
        for block in moves.swap_out.iter().chain(&moves.swap_in) {
            assert!(touched.insert(block.host), "two moves use {}", block.host);
        }
        let copies = |copy: &&BlockMove| {
            moves.copies.iter().any(|c| c.to == copy.device || c.from == copy.device)
        };
        assert_eq!(moves.swap_in.iter().find(copies), None);
        for (device, host) in moves.swap_out.iter().map(places) {
            let from = &self.memory[device..][..self.block_size];
            self.host[host..][..self.block_size].copy_from_slice(from);
        }
        for (device, host) in moves.swap_in.iter().map(places) {
            let from = &self.host[host..][..self.block_size];
            self.memory[device..][..self.block_size].copy_from_slice(from);
        }
    }

    /// A row continues where its sequence's last one ended, or starts all over.
    fn begin_row(&mut self, row: &Row) {
        let known = self.sequences.get_mut(&row.id).expect("only added sequences have rows");
        let is_next = row.start == known.num_computed;
        assert!(row.fresh || is_next, "positions are computed in order, once");
        assert_eq!(row.context_len, row.start + row.len);
        known.num_computed = row.context_len;
        self.num_computed_tokens += row.len;
    }

    /// The first `num_positions` places of the row's context hold what its own tokens give.
    fn check_context(&mut self, staged: &StagedRow, num_positions: usize) {
        let known = self.sequences.get_mut(&staged.row.id).expect("checked before");
        for (position, &slot) in staged.slot_mapping.iter().enumerate().take(num_positions) {
            let expected = Some(known.entry(position));
            let id = staged.row.id;
            assert_eq!(self.memory[slot as usize], expected, "{id}: {position} at {slot}");
        }
    }

    /// Writes the row's inputs to the KV cache and counts them in the sampling state.
    fn write(&mut self, staged: &StagedRow, written: &mut HashSet<u32>) {
        let Row { id, state_slot, start, fresh, .. } = staged.row;
        if fresh {
            let cleared = SamplingState { id, tokens: staged.uncounted.clone() };
            self.states[state_slot.index()] = Some(cleared);
        }
        for (i, &input) in staged.inputs.iter().enumerate() {
            let position = start + i;
            let slot = staged.slot_mapping[position];
            assert!(written.insert(slot), "place {slot} has two writers in one batch");
            let token = input.unwrap_or_else(|| self.carry_over(id));
            let known = self.sequences.get_mut(&id).expect("checked before");
            assert_eq!(token, known.identity.token(position), "sequence {id}, {position}");
            self.memory[slot as usize] = Some(known.entry(position));
            self.state_mut(&staged.row).tokens.push(token);
        }
    }

    /// The token that the sequence's row in the previous batch yielded.
    fn carry_over(&self, id: SequenceId) -> u32 {
        let mut tokens = self.outputs.iter().filter(|output| output.0 == id).map(|output| output.1);
        let token = tokens.next().expect("the previous batch sampled the carried-over token");
        assert_eq!(tokens.next(), None, "a sequence has one row per batch");
        token
    }

    /// The token that the row yields, if it does; penalties see all tokens before it.
    fn sample(&mut self, row: &Row) -> Option<(SequenceId, u32)> {
        let &Row { id, context_len, .. } = row;
        let identity = self.sequences[&id].identity.clone();
        let tokens = &self.state_mut(row).tokens;
        if identity.lengths.counts_tokens {
            let expected = (0..context_len).map(|position| identity.token(position));
            let sees = "penalties of sequence";
            assert!(expected.eq(tokens.iter().copied()), "{sees} {id} see {tokens:?}");
        }
        row.samples.then(|| (id, identity.token(context_len)))
    }

    fn state_mut(&mut self, row: &Row) -> &mut SamplingState {
        let state = self.states[row.state_slot.index()].as_mut();
        let state = state.expect("a state is cleared before its first use");
        assert_eq!(state.id, row.id, "state slot {} is somebody else's", row.state_slot);
        state
    }
}
