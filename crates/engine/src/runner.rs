//! The model runner: what a step enqueues on the compute stream.

use inflight_backend::{
    Backend, BackendError, DeviceBatch, KvLayer, StepShape,
    ops::{Sample, SamplingState},
};
use inflight_model::{Decoder, ForwardInputs, Scratch};

use crate::{EngineConfig, io_slot::IoSlot};

/// The model and all device memory that steps share. Only the compute stream touches it, so one set
/// serves both IO slots.
pub(crate) struct ModelRunner<B: Backend> {
    decoder: Decoder<B>,
    batch: DeviceBatch<B>,
    kv: Vec<KvLayer<B>>,
    scratch: Scratch<B>,
    state: SamplingState<B>,
    block_size: usize,
    max_rows: usize,
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
            max_rows: config.max_num_seqs,
        })
    }

    /// Unpacks the slot, replaces carried-over tokens and computes the logits of sampled rows.
    pub(crate) fn carry_over_and_forward(
        &self,
        backend: &B,
        io: &IoSlot<B>,
        previous: &IoSlot<B>,
        step: StepShape,
        compute: &B::Stream,
    ) -> Result<(), BackendError> {
        let outputs = &previous.device_outputs;
        backend.unpack(&io.device_inputs, outputs, step, &self.batch, compute)?;
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
    pub(crate) fn sample(
        &self,
        backend: &B,
        io: &IoSlot<B>,
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
            outputs: &io.device_outputs,
            max_rows: self.max_rows,
        };
        backend.sample(args, compute)
    }
}
