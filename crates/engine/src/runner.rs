//! The model runner: what a step enqueues on the compute stream.

use std::collections::HashMap;

use inflight_backend::{
    Backend, BackendError, DeviceBatch, Graph, KvLayer, StepCapacity, StepShape,
    ops::{Sample, SamplingState},
};
use inflight_model::{Decoder, ForwardInputs, Scratch};

use crate::{
    EngineConfig,
    io_slot::{IoSlot, IoSlotId},
};

/// The model and all device memory that steps share. Only the compute stream touches it, so one set
/// serves both IO slots.
pub(crate) struct ModelRunner<B: Backend> {
    decoder: Decoder<B>,
    batch: DeviceBatch<B>,
    kv: Vec<KvLayer<B>>,
    scratch: Scratch<B>,
    state: SamplingState<B>,
    block_size: usize,
    capacity: StepCapacity,
    /// Captured when first needed. A graph knows its slot's buffers and the rows it is padded to.
    graphs: HashMap<(IoSlotId, usize), Graph>,
}

/// The slot that a step uses, and the slot whose outputs it carries over.
pub(crate) struct StepSlots<'a, B: Backend> {
    pub(crate) id: IoSlotId,
    pub(crate) io: &'a IoSlot<B>,
    pub(crate) previous: &'a IoSlot<B>,
}

impl<B: Backend> ModelRunner<B> {
    pub(crate) fn new(
        backend: &B,
        decoder: Decoder<B>,
        config: &EngineConfig,
    ) -> Result<Self, BackendError> {
        let capacity = config.step_capacity();
        let vocab_size = decoder.config().vocab_size;
        let num_counts = config.max_num_seqs * vocab_size;
        Ok(Self {
            batch: DeviceBatch::new(backend, capacity)?,
            kv: inflight_model::kv_layers(
                backend,
                decoder.config(),
                config.num_blocks,
                config.block_size,
            )?,
            scratch: Scratch::new(backend, decoder.config(), capacity)?,
            state: SamplingState {
                token_counts: backend.alloc_words("token_counts", num_counts)?,
                vocab_size,
            },
            decoder,
            block_size: config.block_size,
            capacity,
            graphs: HashMap::new(),
        })
    }

    /// Enqueues all of a step: by replaying a graph where the device has them for steps of this
    /// shape, else operator by operator.
    pub(crate) fn run(
        &mut self,
        backend: &B,
        slots: &StepSlots<'_, B>,
        step: StepShape,
        compute: &B::Stream,
    ) -> Result<(), BackendError> {
        let Some(padded) = backend.padded_shape(step, self.capacity) else {
            self.carry_over_and_forward(backend, slots, step, compute)?;
            return self.sample(backend, slots, step, compute);
        };
        let key = (slots.id, padded.num_rows);
        if !self.graphs.contains_key(&key) {
            let graph = backend.capture(compute, &|| {
                self.carry_over_and_forward(backend, slots, padded, compute)?;
                self.sample(backend, slots, padded, compute)
            })?;
            self.graphs.insert(key, graph);
        }
        backend.replay(&self.graphs[&key], compute)
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
        };
        self.decoder.forward(backend, inputs, compute)
    }

    /// Draws the sampled rows' tokens. Apart from the forward pass, so that a row under a grammar
    /// can get its mask while the device computes.
    fn sample(
        &self,
        backend: &B,
        slots: &StepSlots<'_, B>,
        step: StepShape,
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
            outputs: &slots.io.device_outputs,
            max_rows: self.capacity.max_rows,
        };
        backend.sample(args, compute)
    }
}
