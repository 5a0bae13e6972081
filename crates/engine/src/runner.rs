//! The model runner: what a step enqueues on the compute stream.

use std::collections::HashMap;

use inflight_backend::{
    Backend, BackendError, DeviceBatch, Graph, HistoryShape, KvBlocks, KvLayer, PromptCut,
    StepCapacity, StepShape,
    ops::{Sample, SamplingState},
};
use inflight_model::{Decoder, ForwardInputs, Scratch};
use inflight_scheduler::{Batch, BlockTurn};

use crate::{
    EngineConfig, LaunchKind,
    io_slot::{IoSlot, IoSlotId, IoSlots},
    probes::Probing,
};

/// The model and all device memory that steps share. Only the compute stream touches it, so one set
/// serves both IO slots.
pub(crate) struct ModelRunner<B: Backend> {
    decoder: Decoder<B>,
    batch: DeviceBatch<B>,
    /// The probes of a step.
    probes: DeviceBatch<B>,
    kv: Vec<KvLayer<B>>,
    scratch: Scratch<B>,
    state: SamplingState<B>,
    block_size: usize,
    capacity: StepCapacity,
    /// Rows of the outputs.
    output_rows: usize,
    /// A graph knows its slot's buffers, the rows it is padded to, and whether they share prefixes.
    graphs: HashMap<(IoSlotId, usize, bool), Graph>,
    /// What to prepare while nobody asks for anything; the next one last.
    unprepared: Vec<(IoSlotId, Preparation)>,
    /// How the latest forward pass was launched, and whether that allocated memory: for traces.
    last_launch: (LaunchKind, bool),
}

/// A shape of step that the device can prepare for.
enum Preparation {
    /// By capturing its graph.
    Graph(StepShape),
    /// By choosing kernels and loading them.
    Prefill(StepShape),
}

/// The slot that a step uses, and the slot whose outputs it carries over.
pub(crate) struct StepSlots<'a, B: Backend> {
    pub(crate) id: IoSlotId,
    pub(crate) io: &'a IoSlot<B>,
    pub(crate) previous: &'a IoSlot<B>,
    /// Prompts that end with the step and are to be cut.
    pub(crate) cuts: &'a [PromptCut],
    /// Whether the step has probes, which read states that it does not sample.
    pub(crate) has_probes: bool,
}

impl<B: Backend> ModelRunner<B> {
    pub(crate) fn new(
        backend: &B,
        decoder: Decoder<B>,
        config: &EngineConfig,
    ) -> Result<Self, BackendError> {
        let capacity = config.step_capacity(decoder.config());
        let vocab_size = decoder.config().vocab_size;
        let num_counts = config.max_num_seqs * vocab_size;
        Ok(Self {
            batch: DeviceBatch::new(backend, capacity)?,
            probes: DeviceBatch::new(backend, config.probe_capacity())?,
            kv: inflight_model::kv_layers(
                backend,
                decoder.config(),
                config.num_blocks,
                config.block_size,
            )?,
            scratch: Scratch::new(
                backend,
                decoder.config(),
                config.scratch_capacity(decoder.config()),
            )?,
            state: SamplingState {
                token_counts: backend.alloc_words("token_counts", num_counts)?,
                vocab_size,
            },
            decoder,
            block_size: config.block_size,
            capacity,
            output_rows: config.output_rows(),
            graphs: HashMap::new(),
            unprepared: Vec::new(),
            last_launch: <_>::default(),
        })
    }

    /// Notes everything that [`ModelRunner::prepare_next`] will prepare: graphs of all steps that
    /// have one, small ones first, then prefills of every order of size, then graphs of steps whose
    /// rows share prefixes, if any are told to.
    pub(crate) fn plan_preparations(&mut self, backend: &B, slots: &[IoSlotId; 2], shares: bool) {
        let StepCapacity { max_tokens, .. } = self.capacity;
        let graphs = |num_prefixes| {
            let padded = self.padded_shapes(backend, num_prefixes);
            let of_slots = |padded| slots.map(|id| (id, Preparation::Graph(padded)));
            padded.into_iter().flat_map(of_slots)
        };
        let mut all: Vec<_> = graphs(0).collect();
        if all.is_empty() {
            return; // a device without graphs prepares nothing
        }
        let sizes = (0..usize::BITS).map(|exponent| 1 << exponent);
        for num_tokens in sizes.take_while(|size| *size < max_tokens).chain([max_tokens]) {
            all.push((slots[0], Preparation::Prefill(self.prefill(num_tokens))));
        }
        if shares {
            all.extend(graphs(1));
        }
        all.reverse();
        self.unprepared = all;
    }

    /// The shapes that steps of one token a row are padded to.
    fn padded_shapes(&self, backend: &B, num_prefixes: usize) -> Vec<StepShape> {
        let max_rows = self.capacity.max_rows;
        let padded = (1..=max_rows).filter_map(|num_rows| {
            let rows = StepShape { num_rows, num_sampled: num_rows, ..self.prefill(num_rows) };
            let step = StepShape { num_prefixes, num_prefix_rows: num_prefixes * num_rows, ..rows };
            let padded = backend.padded_shape(step, self.capacity)?;
            (padded.num_rows == num_rows || num_rows == max_rows).then_some(padded)
        });
        padded.collect()
    }

    /// Prepares one more shape of step, so that no request waits for it later. Whether there was
    /// one.
    pub(crate) fn prepare_next(
        &mut self,
        backend: &B,
        io: &IoSlots<B>,
        compute: &B::Stream,
    ) -> Result<bool, BackendError> {
        let Some((id, preparation)) = self.unprepared.pop() else { return Ok(false) };
        let slots =
            StepSlots { id, io: io.get(id), previous: io.before(id), cuts: &[], has_probes: false };
        match preparation {
            Preparation::Graph(padded) => {
                self.captured(backend, &slots, padded, compute)?;
            }
            // The graph itself is of no use: launching a prefill costs less than computing it.
            Preparation::Prefill(step) => drop(self.rehearse(backend, &slots, step, compute)?),
        }
        Ok(true)
    }

    /// A step of one row and so many tokens.
    fn prefill(&self, num_tokens: usize) -> StepShape {
        let StepCapacity { max_blocks, max_bias, num_more_groups, .. } = self.capacity;
        StepShape {
            num_tokens,
            num_rows: 1,
            num_sampled: 1,
            num_blocks: max_blocks,
            num_bias: max_bias,
            num_more_groups,
            num_prefixes: 0,
            num_prefix_rows: 0,
        }
    }

    /// Enqueues a step's forward pass: by replaying a graph where the device has them for steps of
    /// this shape, else operator by operator. [`ModelRunner::sample`] is to follow.
    pub(crate) fn forward(
        &mut self,
        backend: &B,
        slots: &StepSlots<'_, B>,
        step: StepShape,
        compute: &B::Stream,
    ) -> Result<(), BackendError> {
        if step.num_rows == 0 {
            return Ok(()); // the batch only moves blocks
        }
        let num_allocations = backend.num_allocations();
        let padded = backend.padded_shape(step, self.capacity);
        let kind = match padded.filter(|_| slots.cuts.is_empty()) {
            None => {
                self.carry_over_and_forward(backend, slots, step, compute)?;
                if self.graphs.is_empty() { LaunchKind::NoGraphs } else { LaunchKind::WithoutGraph }
            }
            Some(padded) => {
                let num_graphs = self.graphs.len();
                let graph = self.captured(backend, slots, padded, compute)?;
                backend.replay(graph, compute)?;
                let is_new = self.graphs.len() > num_graphs;
                if is_new { LaunchKind::CapturedGraph } else { LaunchKind::Graph }
            }
        };
        self.last_launch = (kind, backend.num_allocations() > num_allocations);
        Ok(())
    }

    /// How the latest forward pass was launched, and whether that allocated memory.
    pub(crate) fn last_launch(&self) -> (LaunchKind, bool) {
        self.last_launch
    }

    /// The graph for a padded shape, captured now if it was not before.
    fn captured(
        &mut self,
        backend: &B,
        slots: &StepSlots<'_, B>,
        padded: StepShape,
        compute: &B::Stream,
    ) -> Result<&Graph, BackendError> {
        let key = (slots.id, padded.num_rows, padded.num_prefixes > 0);
        if !self.graphs.contains_key(&key) {
            let graph = backend.capture(compute, &|| {
                self.carry_over_and_forward(backend, slots, padded, compute)
            })?;
            self.graphs.insert(key, graph);
        }
        Ok(&self.graphs[&key])
    }

    /// Captures all of a step.
    fn rehearse(
        &self,
        backend: &B,
        slots: &StepSlots<'_, B>,
        step: StepShape,
        compute: &B::Stream,
    ) -> Result<Graph, BackendError> {
        backend.capture(compute, &|| {
            self.carry_over_and_forward(backend, slots, step, compute)?;
            self.sample(backend, slots, step, false, compute)
        })
    }

    /// Unpacks the slot, replaces carried-over tokens and computes the logits of sampled rows.
    fn carry_over_and_forward(
        &self,
        backend: &B,
        slots: &StepSlots<'_, B>,
        step: StepShape,
        compute: &B::Stream,
    ) -> Result<(), BackendError> {
        let (packed, outputs) = (&slots.io.device_inputs, &slots.previous.device_outputs);
        backend.unpack(packed, outputs, step, &self.batch, compute)?;
        backend.track_tokens(&self.batch, step, &self.state, compute)?;
        let inputs = ForwardInputs {
            batch: &self.batch,
            step,
            kv: &self.kv,
            scratch: &self.scratch,
            block_size: self.block_size,
            cuts: slots.cuts,
            keeps_states: slots.has_probes,
        };
        self.decoder.forward(backend, inputs, compute)
    }

    /// Turns keys of sinks to where the tokens behind them now begin.
    pub(crate) fn turn_blocks(
        &self,
        backend: &B,
        turns: &[BlockTurn],
        compute: &B::Stream,
    ) -> Result<(), BackendError> {
        if turns.is_empty() {
            return Ok(());
        }
        let word = |by| u32::try_from(by).expect("positions fit 32 bits");
        let turn = |turn: &BlockTurn| inflight_backend::BlockTurn {
            from: turn.copy.from.0,
            to: turn.copy.to.0,
            by: word(turn.by),
        };
        for group in 0..self.decoder.groups().num_groups() {
            let of_group = turns.iter().filter(|turn| turn.group == group);
            let turns: Vec<_> = of_group.map(turn).collect();
            if !turns.is_empty() {
                let kv = (&self.kv[..], self.block_size);
                self.decoder.turn_blocks(backend, kv, (group, &turns), compute)?;
            }
        }
        Ok(())
    }

    /// Counts tokens that no step computes.
    pub(crate) fn count_history(
        &self,
        backend: &B,
        io: &IoSlot<B>,
        shape: HistoryShape,
        compute: &B::Stream,
    ) -> Result<(), BackendError> {
        if shape.num_rows == 0 {
            return Ok(());
        }
        backend.count_history(&io.device_history, shape, &self.state, compute)
    }

    /// The KV cache as blocks.
    pub(crate) fn kv_blocks(&self, backend: &B) -> KvBlocks<B> {
        let attention = self.decoder.config().attention_shape(self.block_size);
        KvBlocks::new(&self.kv, backend.kv_layout(attention))
    }

    /// Copies the states of a step's sampled rows to the slot's `host_states`. On the compute
    /// stream, since the next step overwrites them.
    pub(crate) fn copy_states(
        &self,
        backend: &B,
        io: &IoSlot<B>,
        step: StepShape,
        compute: &B::Stream,
    ) -> Result<(), BackendError> {
        let num_words = step.num_sampled * self.hidden_size();
        backend.copy_to_host(self.scratch.sampled(), &io.host_states, num_words, compute)
    }

    /// The state of a sampled row, normed, from a slot whose batch was collected.
    pub(crate) fn read_state(&self, backend: &B, io: &IoSlot<B>, row: usize) -> Vec<f32> {
        self.read_row(backend, &io.host_states, row)
    }

    /// The state of a probe, likewise.
    pub(crate) fn read_probe_state(&self, backend: &B, io: &IoSlot<B>, row: usize) -> Vec<f32> {
        self.read_row(backend, &io.host_probe_states, row)
    }

    fn read_row(&self, backend: &B, states: &B::HostBuffer, row: usize) -> Vec<f32> {
        let len = self.hidden_size();
        let mut state = backend.read_host(states, |words| {
            let words = &words[row * len..][..len];
            words.iter().map(|bits| f32::from_bits(*bits)).collect::<Vec<_>>()
        });
        self.decoder.normalise_state(&mut state);
        state
    }

    /// Elements of a token's state.
    fn hidden_size(&self) -> usize {
        self.decoder.config().hidden_size
    }

    /// Draws the sampled rows' tokens. Apart from the forward pass and outside its graph, so that a
    /// row under a grammar can get its mask while the device computes. `is_unusual`: some row has a
    /// rule that looks at the whole distribution.
    pub(crate) fn sample(
        &self,
        backend: &B,
        slots: &StepSlots<'_, B>,
        step: StepShape,
        is_unusual: bool,
        compute: &B::Stream,
    ) -> Result<(), BackendError> {
        if step.num_sampled == 0 {
            return Ok(());
        }
        let args = Sample {
            logits: self.scratch.logits(),
            state: &self.state,
            batch: &self.batch,
            step,
            is_unusual,
            late: &slots.io.device_late,
            outputs: &slots.io.device_outputs,
            max_rows: self.output_rows,
        };
        backend.sample(args, compute)
    }

    /// Computes a step's probes. After the step's own tokens were drawn, whose logits they
    /// overwrite; before the next forward pass, which overwrites the states that they read.
    pub(crate) fn probe(
        &self,
        backend: &B,
        slots: &StepSlots<'_, B>,
        probing: Probing,
        compute: &B::Stream,
    ) -> Result<(), BackendError> {
        let (io, step) = (slots.io, probing.shape);
        let previous = &slots.previous.device_outputs;
        backend.unpack(&io.device_probes, previous, step, &self.probes, compute)?;
        let inputs = || ForwardInputs {
            batch: &self.probes,
            step,
            kv: &self.kv,
            scratch: &self.scratch,
            cuts: &[],
            block_size: self.block_size,
            keeps_states: true,
        };
        if probing.wants_states {
            self.decoder.gather_states(backend, inputs(), compute)?;
            let (states, num_words) =
                (&io.host_probe_states, step.num_sampled * self.hidden_size());
            backend.copy_to_host(self.scratch.sampled(), states, num_words, compute)?;
        }
        if !probing.wants_logprobs {
            return Ok(());
        }
        self.decoder.logits(backend, inputs(), compute)?;
        let args = Sample {
            logits: self.scratch.logits(),
            state: &self.state,
            batch: &self.probes,
            step,
            is_unusual: false,
            late: &io.device_late,
            outputs: &io.device_probe_outputs,
            max_rows: self.output_rows,
        };
        backend.sample(args, compute)
    }
}

/// The prompts that a batch cuts, as devices take them.
pub(crate) fn cuts(batch: &Batch) -> Vec<PromptCut> {
    let cut = |planned: &inflight_scheduler::PromptCut| PromptCut {
        row: planned.row,
        context_len: batch.rows[planned.row].context_len,
        num_observed: planned.num_observed,
        blocks: planned.blocks.iter().map(|block| block.0).collect(),
    };
    batch.cuts.iter().map(cut).collect()
}
