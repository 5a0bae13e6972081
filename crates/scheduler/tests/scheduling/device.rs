//! A device whose memory remembers what was written, so that each row can check what it reads.
//!
//! It runs a batch from what was staged at launch, in launch order, as one compute stream does, and
//! as late as possible: when the host collects. By then the scheduler has long moved on, so any
//! block or state slot that it gives away too early is seen here as foreign data. Moves between
//! host and device have streams of their own: they happen as early or as late as events allow.

use std::collections::{HashMap, HashSet};

use inflight_kv_cache::{Attended, BlockTable, Retention};
use inflight_scheduler::{
    Batch, BlockMove, BlockTurn, Moves, PromptCut, Row, RowInputs, Scheduler, SchedulerConfig,
    SequenceId,
};

use crate::workload::Identity;

/// One row as the host staged it: nothing in it changes after the launch.
#[derive(Debug)]
pub(crate) struct StagedRow {
    row: Row,
    /// Of each layer group.
    places: Vec<Places>,
    /// `[len]`; `None` is taken from the previous batch's output.
    inputs: Vec<Option<u32>>,
    /// `[num_uncounted]`: tokens before the inputs that were not counted yet.
    uncounted: Vec<u32>,
}

/// What a row knows of one layer group's keys and values.
#[derive(Debug)]
struct Places {
    num_dropped: usize,
    /// `[context_len - num_dropped]`: place in the KV cache of every position that the row reads
    /// or writes.
    slot_mapping: Vec<u32>,
}

impl StagedRow {
    pub(crate) fn stage(row: &Row, scheduler: &Scheduler) -> Self {
        let tables = scheduler.block_tables(row.id);
        assert_eq!(tables.first().num_dropped(), row.num_dropped);
        let places = |table: &BlockTable| Places {
            num_dropped: table.num_dropped(),
            slot_mapping: (table.num_dropped()..row.context_len).map(|at| table.slot(at)).collect(),
        };
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
            places: tables.iter().map(places).collect(),
            inputs,
            uncounted: tokens[..row.num_uncounted].to_vec(),
        }
    }
}

/// What one place of the KV cache holds: a hash of the token there, of all before it, of what it
/// did not see of them and of the salt, which is all that keys and values depend on.
type Entry = u64;

/// Which position of a prompt is number `i` of those that stay: the first ones and those that
/// decide, in these tests.
fn kept_position(cut: &Attended, i: usize) -> usize {
    let num_first = cut.num_kept() - cut.num_observed();
    if i < num_first { i } else { cut.prompt_len() - cut.num_kept() + i }
}

/// What a layer group's place holds of what the first one's does.
fn of_group(entry: Entry, group: usize) -> Entry {
    entry ^ (group as u64).wrapping_mul(0x94d0_49bb_1331_11eb)
}

/// What a place holds whose keys were turned.
fn turned(entry: Entry, by: usize) -> Entry {
    entry ^ (by as u64).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

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
            let before = turned(before, self.num_unseen(self.entries.len()));
            let hash = (before ^ token.wrapping_add(1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            self.entries.push(hash ^ (hash >> 29));
        }
        self.entries[position]
    }

    /// Tokens before a position that the token there does not see by choice.
    fn num_unseen(&self, position: usize) -> usize {
        match self.identity.lengths.retention {
            Retention::All | Retention::Window { .. } => 0,
            Retention::Attended(attended) => match attended.is_cut() {
                true if position >= attended.prompt_len() => {
                    attended.prompt_len() - attended.num_kept()
                }
                _ => 0,
            },
            Retention::Sinks(sinks) => {
                let beyond = (position + 1).saturating_sub(sinks.capacity());
                beyond.div_ceil(sinks.stride()) * sinks.stride()
            }
        }
    }

    /// What the place number `i` of the context must hold of a row that dropped tokens.
    fn seen(&mut self, num_dropped: usize, i: usize) -> Entry {
        let num_sinks = self.identity.lengths.retention.num_sinks();
        if let (Some(cut), 1..) = (self.identity.lengths.retention.cut(), num_dropped)
            && i < cut.num_kept()
        {
            return self.entry(kept_position(&cut, i));
        }
        match num_dropped {
            0 => self.entry(i),
            by if i < num_sinks => turned(self.entry(i), by),
            num_dropped => self.entry(num_dropped + i),
        }
    }

    /// Checks that a row sees what it must of each layer group.
    fn check_dropped(&self, staged: &StagedRow, windows: &[Option<usize>]) {
        let retention = self.identity.lengths.retention;
        let others = windows.iter().map(|window| retention.of_group(*window));
        let retentions: Vec<_> = [retention].into_iter().chain(others).collect();
        assert_eq!(retentions.len(), staged.places.len());
        for (retention, Places { num_dropped, .. }) in retentions.into_iter().zip(&staged.places) {
            for position in staged.row.start..staged.row.context_len {
                match retention {
                    Retention::All => assert_eq!(*num_dropped, 0),
                    Retention::Sinks(_) | Retention::Attended(_) => {
                        assert_eq!(*num_dropped, self.num_unseen(position))
                    }
                    Retention::Window { window } => {
                        assert!(*num_dropped <= (position + 1).saturating_sub(window));
                    }
                }
            }
        }
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
    /// Of the layer groups behind the first.
    windows: Vec<Option<usize>>,
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
            windows: config.other_windows.clone(),
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
    pub(crate) fn run(&mut self, rows: &[StagedRow], batch: &Batch) -> &[(SequenceId, u32)] {
        let moves = &batch.moves;
        if self.move_time == MoveTime::Early {
            self.swap(moves);
        }
        self.copy(moves);
        self.turn(&batch.turns);
        for staged in rows {
            self.begin_row(staged);
            self.check_context(staged, staged.row.start);
        }
        let mut written = HashSet::new();
        for staged in rows {
            self.write(staged, &mut written);
        }
        let mut outputs = Vec::new();
        for staged in rows {
            self.check_context(staged, staged.row.context_len);
            outputs.extend(self.sample(&staged.row));
        }
        for cut in &batch.cuts {
            self.cut(&rows[cut.row], cut);
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

    /// Copies what stays of a prompt.
    fn cut(&mut self, staged: &StagedRow, planned: &PromptCut) {
        let cut = self.sequences[&staged.row.id].identity.lengths.retention.cut();
        let cut = cut.expect("only such prompts are cut");
        assert!(staged.row.len >= cut.num_observed(), "those that decide share a row");
        assert_eq!(staged.row.context_len, cut.prompt_len());
        assert_eq!(planned.num_observed, cut.num_observed());
        assert_eq!(planned.blocks.len() * self.block_size, cut.num_kept());
        for i in 0..cut.num_kept() {
            let from = staged.places[0].slot_mapping[kept_position(&cut, i)] as usize;
            let block = planned.blocks[i / self.block_size].index();
            self.memory[block * self.block_size + i % self.block_size] = self.memory[from];
        }
    }

    /// Turns keys of whole blocks; no block is written by one turn and read by another.
    fn turn(&mut self, turns: &[BlockTurn]) {
        for BlockTurn { copy, by, .. } in turns {
            assert!(turns.iter().all(|other| other.copy.to != copy.from));
            for i in 0..self.block_size {
                let [from, to] =
                    [copy.from, copy.to].map(|block| block.index() * self.block_size + i);
                self.memory[to] = self.memory[from].map(|entry| turned(entry, *by));
            }
        }
    }

    /// The two directions have a stream each, so their order is not known: moves of which one
    /// writes to what another touches would be a mistake. Two may read what the host keeps, for
    /// sequences that do not look for what came before it.
    fn swap(&mut self, moves: &Moves) {
        let places = |block: &BlockMove| {
            let (device, host) = (block.device.index(), block.host.0 as usize);
            (device * self.block_size, host * self.block_size)
        };
        let (mut written, mut filled) = (HashSet::new(), HashSet::new());
        for block in &moves.swap_out {
            assert!(written.insert(block.host), "two moves write to {}", block.host);
        }
        for block in &moves.swap_in {
            assert!(!written.contains(&block.host), "{} is written and read", block.host);
            assert!(filled.insert(block.device), "two moves write to {}", block.device);
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
    fn begin_row(&mut self, staged: &StagedRow) {
        let row = &staged.row;
        let known = self.sequences.get_mut(&row.id).expect("only added sequences have rows");
        let is_next = row.start == known.num_computed;
        assert!(row.fresh || is_next, "positions are computed in order, once");
        assert_eq!(row.context_len, row.start + row.len);
        known.num_computed = row.context_len;
        known.check_dropped(staged, &self.windows);
        self.num_computed_tokens += row.len;
    }

    /// The places of the row's context up to a position hold what its own tokens give.
    fn check_context(&mut self, staged: &StagedRow, end: usize) {
        let known = self.sequences.get_mut(&staged.row.id).expect("checked before");
        let id = staged.row.id;
        for (group, Places { num_dropped, slot_mapping }) in staged.places.iter().enumerate() {
            for (i, &slot) in slot_mapping.iter().enumerate().take(end - num_dropped) {
                let expected = Some(of_group(known.seen(*num_dropped, i), group));
                assert_eq!(self.memory[slot as usize], expected, "{id}, {group}: {i} at {slot}");
            }
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
            let token = input.unwrap_or_else(|| self.carry_over(id));
            let known = self.sequences.get_mut(&id).expect("checked before");
            assert_eq!(token, known.identity.token(position), "sequence {id}, {position}");
            let entry = known.entry(position);
            for (group, Places { num_dropped, slot_mapping }) in staged.places.iter().enumerate() {
                let slot = slot_mapping[position - num_dropped];
                assert!(written.insert(slot), "place {slot} has two writers in one batch");
                self.memory[slot as usize] = Some(of_group(entry, group));
            }
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
