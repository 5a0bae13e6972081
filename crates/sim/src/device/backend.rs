//! The simulated device as the engine sees it.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use inflight_backend::{
    AttentionShape, Backend, BackendError, CheckBlocks, Clock, CutPrompts, DeviceBatch, Dtype,
    HistoryShape, HostTensor, KvDtype, MoveBlocks, MoveWay, PrefixRule, RowState, StepShape,
    TurnBlocks,
    ops::{
        Attention, Embed, GateAndMul, GatedMatmul, Matmul, RmsNorm, RopeAndCache, Sample,
        SamplingState,
    },
};

use super::memory::{SimBuffer, SimHostBuffer, SimMatrix};
use super::state::{Done, SimConfig, SimEvent, SimStream, State, Usage};
use super::token::{Seen, count_value, draw};
use crate::RowLoad;

/// A GPU of virtual time. Copies are handles to the same one.
#[derive(Clone)]
pub struct SimBackend {
    state: Arc<Mutex<State>>,
    clock: Clock,
}

/// The host's thread, for checks.
const HOST: usize = 0;

impl SimBackend {
    /// A device at time zero.
    #[must_use]
    pub fn new(config: SimConfig) -> Self {
        let clock = Clock::of_virtual_time();
        Self { state: Arc::new(Mutex::new(State::new(config, clock.clone()))), clock }
    }

    /// How busy it was so far.
    #[must_use]
    pub fn usage(&self) -> Usage {
        self.state().usage()
    }

    /// Uses of memory that no event ordered, and blocks with two writers, since last asked.
    #[must_use]
    pub fn take_violations(&self) -> Vec<String> {
        std::mem::take(&mut self.state().violations)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn allocate(&self, label: &'static str, len: usize) -> Done<SimBuffer> {
        Ok(SimBuffer { id: self.state().allocate(label, len)?, len })
    }

    /// Enqueues an operator of the compute stream.
    fn operate(&self, stream: SimStream, cost: impl FnOnce(&State) -> f64) -> Done<()> {
        let mut state = self.state();
        let seconds = cost(&state);
        state.launch_operator();
        state.operate(stream, seconds)
    }
}

impl State {
    /// The host enqueues an operator; one that is part of a graph costs it nothing.
    fn launch_operator(&mut self) {
        if !self.is_graph {
            self.host_works(self.config.cost.gpu.host.launch_s);
        }
    }

    fn count(&mut self, state: RowState, tokens: impl Iterator<Item = (u32, u32)>) {
        let Some(slot) = state.state_slot else { return };
        let slot = slot as usize;
        if self.counts.len() <= slot {
            self.counts.resize(slot + 1, 0);
        }
        if state.fresh {
            self.counts[slot] = 0;
        }
        for (token, position) in tokens {
            let value = count_value(token, position < state.prompt_len);
            self.counts[slot] = self.counts[slot].wrapping_add(value);
        }
    }

    fn draw_tokens(&mut self, args: &Sample<'_, SimBackend>) {
        let vocab_size = args.state.vocab_size;
        for sample in 0..args.step.num_sampled {
            let row = self.step.sampling[sample];
            let seen = self.seen_by(sample);
            let late = &self.memories[args.late.id].words;
            let bias = self.step.bias_of(&row, late, vocab_size);
            let token = draw(seen, &row, &bias, vocab_size as u32);
            let words = self.memories[args.outputs.id].words_mut(args.outputs.len);
            words[sample] = token;
            words[args.max_rows + sample] = (-1.0_f32).to_bits();
        }
    }

    fn seen_by(&mut self, sample: usize) -> Seen {
        if !self.config.checks {
            return Seen { context: sample as u64, counts: 0 };
        }
        let Some(row) = self.step.row_of_sample(sample) else {
            self.violations.push(format!("sampled row {sample} is not the end of a row"));
            return Seen::default();
        };
        let slot = self.step.row_states[row].state_slot;
        let counts = slot.map_or(0, |slot| self.counts[slot as usize]);
        Seen { context: self.contexts[row], counts }
    }

    /// Copies `num_words` words.
    fn copy_words(&mut self, from: usize, to: usize, num_words: usize) {
        let mut words = std::mem::take(&mut self.memories[to].words);
        if words.len() < num_words {
            words.resize(num_words, 0);
        }
        words[..num_words].copy_from_slice(self.memories[from].words_mut(num_words));
        self.memories[to].words = words;
    }
}

impl SimBackend {
    /// Multiplies `num_rows` rows, and in the same kernel moves `more_bytes` besides the product's.
    fn multiply(
        &self,
        weight: SimMatrix,
        num_rows: usize,
        more_bytes: f64,
        stream: SimStream,
    ) -> Done<()> {
        let SimMatrix { rows, cols, bytes, is_fp8 } = weight;
        self.operate(stream, |state: &State| {
            let cost = &state.config.cost;
            let product = cost.matmul(num_rows, [rows, cols], bytes as f64, is_fp8);
            product + more_bytes / cost.gpu.bytes_per_s
        })
    }
}

/// Seconds that copying so many blocks of keys and of values takes.
fn copied(state: &State, num_blocks: usize, attention: AttentionShape) -> f64 {
    let AttentionShape { num_kv_heads, head_dim, block_size, .. } = attention;
    let num_read = 2 * num_blocks * block_size * num_kv_heads * head_dim;
    state.config.cost.elementwise(2.0 * num_read as f64 * state.config.cost.kv_bytes)
}

impl Backend for SimBackend {
    type Buffer = SimBuffer;
    type HostBuffer = SimHostBuffer;
    type Matrix = SimMatrix;
    type Embedding = SimMatrix;
    type Stream = SimStream;
    type Event = SimEvent;

    fn description(&self) -> String {
        format!("a simulated {}", self.state().config.cost.gpu.name)
    }

    fn clock(&self) -> Clock {
        self.clock.clone()
    }

    fn kv_dtype(&self) -> KvDtype {
        match self.state().config.cost.kv_bytes {
            bytes if bytes < 2.0 => KvDtype::Fp8,
            _ => KvDtype::Bf16,
        }
    }

    fn activation_dtype(&self) -> Dtype {
        Dtype::BF16
    }

    fn alloc_activations(&self, label: &'static str, len: usize) -> Done<SimBuffer> {
        self.allocate(label, len)
    }

    fn alloc_words(&self, label: &'static str, len: usize) -> Done<SimBuffer> {
        self.allocate(label, len)
    }

    fn alloc_kv(&self, label: &'static str, bytes: usize) -> Done<SimBuffer> {
        self.allocate(label, bytes)
    }

    fn alloc_host(&self, label: &'static str, len: usize) -> Done<SimHostBuffer> {
        Ok(SimHostBuffer { id: self.state().allocate(label, len)?, len })
    }

    fn load_matrix(&self, parts: &[HostTensor]) -> Done<SimMatrix> {
        let is_fp8 = parts.iter().any(|part| part.dtype == Dtype::F8E4M3);
        let rows = parts.iter().map(HostTensor::num_rows).sum();
        let cols = parts.first().map_or(0, HostTensor::row_len);
        let part_bytes = |part: &HostTensor| match part.dtype {
            // Plain weights are kept in 16 bits.
            Dtype::F32 | Dtype::F16 | Dtype::BF16 => 2 * part.num_rows() * part.row_len(),
            dtype => part.num_rows() * dtype.row_bytes(part.row_len()).unwrap_or(part.row_len()),
        };
        Ok(SimMatrix { rows, cols, bytes: parts.iter().map(part_bytes).sum(), is_fp8 })
    }

    fn load_embedding(&self, table: &HostTensor) -> Done<SimMatrix> {
        self.load_matrix(std::slice::from_ref(table))
    }

    fn load_vector(&self, parts: &[HostTensor]) -> Done<SimBuffer> {
        self.allocate("vector", parts.iter().map(HostTensor::row_len).sum())
    }

    fn matrix_bytes(&self, matrix: &SimMatrix) -> usize {
        matrix.bytes
    }

    fn write_host<R>(&self, host: &mut SimHostBuffer, write: impl FnOnce(&mut [u32]) -> R) -> R {
        let mut state = self.state();
        state.host_begins();
        state.writes(HOST, host.id);
        let mut words = std::mem::take(&mut state.memories[host.id].words);
        words.resize(host.len, 0);
        drop(state);
        let result = write(&mut words);
        self.state().memories[host.id].words = words;
        result
    }

    fn read_host<R>(&self, host: &SimHostBuffer, read: impl FnOnce(&[u32]) -> R) -> R {
        let mut state = self.state();
        state.host_begins();
        state.reads(HOST, host.id);
        let mut words = std::mem::take(&mut state.memories[host.id].words);
        words.resize(host.len, 0);
        drop(state);
        let result = read(&words);
        self.state().memories[host.id].words = words;
        result
    }

    fn create_stream(&self, name: &'static str) -> Done<SimStream> {
        Ok(self.state().stream(name))
    }

    fn create_event(&self) -> Done<SimEvent> {
        Ok(self.state().new_event())
    }

    fn record(&self, event: &SimEvent, stream: &SimStream) -> Done<()> {
        self.state().record(*event, *stream)
    }

    fn wait(&self, event: &SimEvent, stream: &SimStream) -> Done<()> {
        self.state().wait(*event, *stream)
    }

    fn synchronize(&self, event: &SimEvent) -> Done<()> {
        self.state().synchronize(*event)
    }

    fn elapsed(&self, earlier: &SimEvent, later: &SimEvent) -> Result<Duration, BackendError> {
        Ok(self.state().elapsed(*earlier, *later))
    }

    fn copy_to_device(
        &self,
        src: &SimHostBuffer,
        dst: &SimBuffer,
        num_words: usize,
        stream: &SimStream,
    ) -> Done<()> {
        let mut state = self.state();
        let seconds = state.config.cost.link(4.0 * num_words as f64);
        state.operate(*stream, seconds)?;
        state.reads(stream.thread, src.id);
        state.writes(stream.thread, dst.id);
        state.copy_words(src.id, dst.id, num_words);
        Ok(())
    }

    fn copy_to_host(
        &self,
        src: &SimBuffer,
        dst: &SimHostBuffer,
        num_words: usize,
        stream: &SimStream,
    ) -> Done<()> {
        let mut state = self.state();
        let seconds = state.config.cost.link(4.0 * num_words as f64);
        state.operate(*stream, seconds)?;
        state.copied_outputs();
        state.reads(stream.thread, src.id);
        state.writes(stream.thread, dst.id);
        state.copy_words(src.id, dst.id, num_words);
        Ok(())
    }

    fn move_blocks(&self, args: MoveBlocks<'_, Self>, stream: &SimStream) -> Done<()> {
        let mut state = self.state();
        let bytes = (args.pairs.len() * args.kv.block_bytes()) as f64;
        let cost = &state.config.cost;
        let seconds = match args.way {
            MoveWay::WithinDevice => cost.elementwise(2.0 * bytes),
            MoveWay::ToHost(_) | MoveWay::FromHost(_) => cost.link(bytes),
        };
        state.operate(*stream, seconds)?;
        if !state.config.checks {
            return Ok(());
        }
        // Values of a layer lie as its keys do. A block of the host has all layers side by side.
        let num_layers = args.kv.parts().len() / 2;
        let on_host = |block: u32, layer: usize| block * num_layers as u32 + layer as u32;
        for (layer, keys) in args.kv.parts().iter().step_by(2).enumerate() {
            for pair in args.pairs {
                let (from, to) = match args.way {
                    MoveWay::WithinDevice => ((keys.id, pair.from), (keys.id, pair.to)),
                    MoveWay::ToHost(host) => {
                        ((keys.id, pair.from), (host.id, on_host(pair.to, layer)))
                    }
                    MoveWay::FromHost(host) => {
                        ((host.id, on_host(pair.from, layer)), (keys.id, pair.to))
                    }
                };
                state.copy_block(stream.thread, from, to);
            }
        }
        Ok(())
    }

    fn turn_blocks(&self, args: TurnBlocks<'_, Self>, stream: &SimStream) -> Done<()> {
        let num_blocks = args.turns.len() * args.kv.len();
        self.operate(*stream, |state| copied(state, num_blocks, args.attention))?;
        let mut state = self.state();
        if state.config.checks {
            args.kv.iter().for_each(|layer| state.turn(layer.keys.id, args.turns));
        }
        Ok(())
    }

    fn cut_prompts(&self, args: CutPrompts<'_, Self>, stream: &SimStream) -> Done<()> {
        let num_blocks = args.cuts.iter().map(|cut| cut.blocks.len()).sum();
        self.operate(*stream, |state| copied(state, num_blocks, args.attention))?;
        let mut state = self.state();
        if state.config.checks {
            state.cut(args.kv.keys.id, args.attention.block_size, args.cuts);
        }
        Ok(())
    }

    fn cuts_prompts(&self) -> bool {
        true
    }

    fn check_blocks(&self, args: CheckBlocks<'_, Self>, stream: &SimStream) -> Done<()> {
        self.operate(*stream, |_| 0.0)?;
        let mut state = self.state();
        if state.config.checks {
            state.check_blocks(stream.thread, &args);
        }
        Ok(())
    }

    fn checks_blocks(&self) -> bool {
        true
    }

    fn unpack(
        &self,
        packed: &SimBuffer,
        previous: &SimBuffer,
        shape: StepShape,
        batch: &DeviceBatch<Self>,
        stream: &SimStream,
    ) -> Done<()> {
        let mut state = self.state();
        state.begin_step(shape);
        state.launch_operator();
        let seconds = state.config.cost.elementwise(8.0 * shape.num_words() as f64);
        state.operate(*stream, seconds)?;
        state.reads(stream.thread, packed.id);
        state.reads(stream.thread, previous.id);
        state.writes(stream.thread, batch.token_ids.id);
        let mut step = std::mem::take(&mut state.step);
        let previous_words = std::mem::take(&mut state.memories[previous.id].words);
        step.unpack(&state.memories[packed.id].words, &previous_words, shape);
        state.memories[previous.id].words = previous_words;
        state.step = step;
        state.contexts.clear();
        state.group_ids.clear();
        let others = batch.more_groups.iter().map(|group| group.context_lens.id);
        state.group_ids.extend([batch.context_lens.id].into_iter().chain(others));
        Ok(())
    }

    fn track_tokens(
        &self,
        _batch: &DeviceBatch<Self>,
        shape: StepShape,
        counts: &SamplingState<Self>,
        stream: &SimStream,
    ) -> Done<()> {
        let mut state = self.state();
        state.launch_operator();
        let seconds = state.config.cost.elementwise(8.0 * shape.num_tokens as f64);
        state.operate(*stream, seconds)?;
        state.writes(stream.thread, counts.token_counts.id);
        if !state.config.checks {
            return Ok(());
        }
        let step = std::mem::take(&mut state.step);
        for row in 0..step.num_rows() {
            let tokens = step.row(row).map(|index| (step.token_ids[index], step.positions[index]));
            state.count(step.row_states[row], tokens);
        }
        state.step = step;
        Ok(())
    }

    fn count_history(
        &self,
        words: &SimBuffer,
        shape: HistoryShape,
        counts: &SamplingState<Self>,
        stream: &SimStream,
    ) -> Done<()> {
        let mut state = self.state();
        let seconds = state.config.cost.elementwise(8.0 * shape.num_tokens as f64);
        state.operate(*stream, seconds)?;
        state.reads(stream.thread, words.id);
        state.writes(stream.thread, counts.token_counts.id);
        let at = shape.layout();
        let words = std::mem::take(&mut state.memories[words.id].words);
        let starts = &words[at.row_starts.clone()];
        for (row, states) in words[at.row_states.clone()].chunks_exact(RowState::WORDS).enumerate()
        {
            let tokens = (starts[row]..starts[row + 1]).map(|index| index as usize);
            let pair = |i: usize| (words[at.token_ids.start + i], words[at.positions.start + i]);
            state.count(RowState::from_words(states), tokens.map(pair));
        }
        drop(words);
        Ok(())
    }

    fn embed(&self, args: Embed<'_, Self>, stream: &SimStream) -> Done<()> {
        let bytes = 6.0 * (args.step.num_tokens * args.table.cols) as f64;
        self.operate(*stream, |state| state.config.cost.elementwise(bytes))?;
        self.state().writes(stream.thread, args.out.id);
        Ok(())
    }

    fn rms_norm(&self, args: RmsNorm<'_, Self>, stream: &SimStream) -> Done<()> {
        let bytes = 6.0 * (args.num_rows * args.len) as f64;
        self.operate(*stream, |state| state.config.cost.elementwise(bytes))
    }

    fn add_rms_norm(&self, args: RmsNorm<'_, Self>, stream: &SimStream) -> Done<()> {
        let bytes = 12.0 * (args.num_rows * args.len) as f64;
        self.operate(*stream, |state| state.config.cost.elementwise(bytes))
    }

    fn matmul(&self, args: Matmul<'_, Self>, stream: &SimStream) -> Done<()> {
        self.multiply(*args.weight, args.num_rows, 0.0, *stream)
    }

    fn add_matmul_and_norm(
        &self,
        matmul: Matmul<'_, Self>,
        norm: RmsNorm<'_, Self>,
        stream: &SimStream,
    ) -> Done<()> {
        let norm_bytes = 6.0 * (norm.num_rows * norm.len) as f64;
        self.multiply(*matmul.weight, matmul.num_rows, norm_bytes, *stream)
    }

    fn gated_matmul(&self, args: GatedMatmul<'_, Self>, stream: &SimStream) -> Done<()> {
        let gate_bytes = 6.0 * (args.num_rows * args.len) as f64;
        self.multiply(*args.weight, args.num_rows, gate_bytes, *stream)
    }

    fn rope_and_cache(&self, args: RopeAndCache<'_, Self>, stream: &SimStream) -> Done<()> {
        let bytes = 4.0 * (args.step.num_tokens * args.attention.qkv_len()) as f64;
        self.operate(*stream, |state| state.config.cost.elementwise(bytes))?;
        let mut state = self.state();
        if state.config.checks {
            let group = state.group_of(args.batch);
            state.write_kv(args.kv.keys.id, args.attention.block_size, group);
        }
        Ok(())
    }

    fn prefix_rule(&self, attention: AttentionShape) -> Option<PrefixRule> {
        let unit = attention.block_size;
        let checks = self.state().config.checks;
        checks.then_some(PrefixRule { unit, rows_of_reading: 1, min_saved: 1 })
    }

    fn attention(&self, args: Attention<'_, Self>, stream: &SimStream) -> Done<()> {
        let window = args.window.unwrap_or(usize::MAX);
        let cost = |state: &State| {
            let step = &state.step;
            let context_lens = &step.groups[state.group_of(args.batch)].context_lens;
            let load = |row: usize| {
                let len = step.row(row).len();
                let seen = window.saturating_add(len - 1);
                RowLoad { len, context_len: (context_lens[row] as usize).min(seen) }
            };
            state.config.cost.attention((0..step.num_rows()).map(load), args.attention)
        };
        self.operate(*stream, cost)?;
        let mut state = self.state();
        if state.config.checks {
            let group = state.group_of(args.batch);
            state.read_kv(args.kv.keys.id, args.attention.block_size, (group, args.window));
        }
        Ok(())
    }

    fn gate_and_mul(&self, args: GateAndMul<'_, Self>, stream: &SimStream) -> Done<()> {
        let bytes = 6.0 * (args.num_rows * args.len) as f64;
        self.operate(*stream, |state| state.config.cost.elementwise(bytes))
    }

    fn gather_sampled(
        &self,
        _x: &SimBuffer,
        _batch: &DeviceBatch<Self>,
        shape: StepShape,
        len: usize,
        out: &SimBuffer,
        stream: &SimStream,
    ) -> Done<()> {
        let bytes = 8.0 * (shape.num_sampled * len) as f64;
        self.operate(*stream, |state| state.config.cost.elementwise(bytes))?;
        self.state().writes(stream.thread, out.id);
        Ok(())
    }

    fn sample(&self, args: Sample<'_, Self>, stream: &SimStream) -> Done<()> {
        let (num_rows, vocab_size) = (args.step.num_sampled, args.state.vocab_size);
        self.operate(*stream, |state| state.config.cost.sample(num_rows, vocab_size))?;
        let mut state = self.state();
        if state.step.sampling.iter().any(|row| row.late_row.is_some()) {
            state.reads(stream.thread, args.late.id);
        }
        state.reads(stream.thread, args.state.token_counts.id);
        state.writes(stream.thread, args.outputs.id);
        state.draw_tokens(&args);
        Ok(())
    }
}
