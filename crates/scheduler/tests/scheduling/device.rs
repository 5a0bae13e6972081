//! A device whose memory remembers who wrote what, so that each row can check what it reads.
//!
//! It runs a batch from what was staged at launch, in launch order, as one compute stream does, and
//! as late as possible: when the host collects. By then the scheduler has long moved on, so any
//! block or state slot that it gives away too early is seen here as foreign data.

use std::collections::{HashMap, HashSet};

use inflight_scheduler::{Row, RowInputs, Scheduler, SchedulerConfig, SequenceId};

use crate::workload::token_at;

/// One row as the host staged it: nothing in it changes after the launch.
#[derive(Debug)]
pub(crate) struct StagedRow {
    row: Row,
    /// `[context_len]`: place in the KV cache of every position that the row reads or writes.
    slot_mapping: Vec<u32>,
    /// `[len]`; `None` is taken from the previous batch's output.
    inputs: Vec<Option<u32>>,
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
        }
    }
}

/// What one place of the KV cache holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    id: SequenceId,
    /// How often the sequence had been (re)started when this was written.
    life: u32,
    position: usize,
    token: u32,
}

/// What one state slot holds.
#[derive(Debug)]
struct SamplingState {
    id: SequenceId,
    /// Every token that was an input, as penalties count them.
    tokens: Vec<u32>,
}

/// How far one sequence has come on the device.
#[derive(Debug, Default)]
struct Progress {
    life: u32,
    num_computed: usize,
}

/// KV cache, sampling states and the outputs of the previous batch.
#[derive(Debug)]
pub(crate) struct Device {
    memory: Vec<Option<Entry>>,
    states: Vec<Option<SamplingState>>,
    /// What the previous batch yielded.
    outputs: Vec<(SequenceId, u32)>,
    progress: HashMap<SequenceId, Progress>,
}

impl Device {
    pub(crate) fn new(config: &SchedulerConfig) -> Self {
        Self {
            memory: vec![None; config.num_blocks * config.block_size],
            states: (0..config.max_num_seqs).map(|_| None).collect(),
            outputs: Vec::new(),
            progress: HashMap::new(),
        }
    }

    /// Runs a batch and returns the sampled rows' tokens, in row order.
    ///
    /// Every layer writes all rows' keys and values, then every row attends. Rows are checked
    /// before and after the writes, since a write by a neighbour must not reach what a row reads.
    pub(crate) fn run(&mut self, batch: &[StagedRow]) -> &[(SequenceId, u32)] {
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
        self.outputs = outputs;
        &self.outputs
    }

    /// A row continues where its sequence's last one ended, or starts all over.
    fn begin_row(&mut self, row: &Row) {
        let progress = self.progress.entry(row.id).or_default();
        if row.fresh {
            *progress = Progress { life: progress.life + 1, num_computed: 0 };
        }
        assert_eq!(row.start, progress.num_computed, "positions are computed in order, once");
        assert_eq!(row.context_len, row.start + row.len);
        progress.num_computed = row.context_len;
    }

    /// The first `num_positions` places of the row's context hold its own sequence's data, written
    /// since it was last started.
    fn check_context(&self, staged: &StagedRow, num_positions: usize) {
        let id = staged.row.id;
        let life = self.progress[&id].life;
        for (position, &slot) in staged.slot_mapping.iter().enumerate().take(num_positions) {
            let expected = Entry { id, life, position, token: token_at(id, position) };
            assert_eq!(self.memory[slot as usize], Some(expected), "place {slot}");
        }
    }

    /// Writes the row's inputs to the KV cache and counts them in the sampling state.
    fn write(&mut self, staged: &StagedRow, written: &mut HashSet<u32>) {
        let Row { id, state_slot, start, fresh, .. } = staged.row;
        let life = self.progress[&id].life;
        if fresh {
            let cleared = SamplingState { id, tokens: Vec::new() };
            self.states[state_slot.index()] = Some(cleared);
        }
        for (i, &input) in staged.inputs.iter().enumerate() {
            let position = start + i;
            let slot = staged.slot_mapping[position];
            assert!(written.insert(slot), "place {slot} has two writers in one batch");
            let token = input.unwrap_or_else(|| self.carry_over(id));
            self.memory[slot as usize] = Some(Entry { id, life, position, token });
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
        let expected = (0..context_len).map(|position| token_at(id, position));
        let tokens = &self.state_mut(row).tokens;
        assert!(expected.eq(tokens.iter().copied()), "penalties of sequence {id} see {tokens:?}");
        row.samples.then(|| (id, token_at(id, context_len)))
    }

    fn state_mut(&mut self, row: &Row) -> &mut SamplingState {
        let state = self.states[row.state_slot.index()].as_mut();
        let state = state.expect("a state is cleared before its first use");
        assert_eq!(state.id, row.id, "state slot {} is somebody else's", row.state_slot);
        state
    }
}
