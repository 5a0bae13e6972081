//! IO slots: two sets of staging buffers, used in turn.

use inflight_backend::{Backend, BackendError, OutputLayout, late::late_words};

use inflight_model::ModelConfig;

use crate::EngineConfig;

/// Everything that moves between host and device for one batch.
///
/// ```text
///   host_inputs ──h2d──► device_inputs ──compute──► device_outputs ──d2h──► host_outputs
///   host_late ────h2d──► device_late ────compute──┘
///                 h2d_done, late_ready     compute_done             d2h_done
/// ```
///
/// Invariant: a slot is restaged only after its last batch was collected.
/// Invariant: inputs and outputs are separate buffers, since the next batch reads these outputs
/// (carry-over) while these inputs are still being read.
pub(crate) struct IoSlot<B: Backend> {
    /// Packed as [`inflight_backend::step`] says; host.
    pub(crate) host_inputs: B::HostBuffer,
    /// The same words; device.
    pub(crate) device_inputs: B::Buffer,
    /// Packed as [`inflight_backend::late`] says; host.
    pub(crate) host_late: B::HostBuffer,
    /// The same words; device.
    pub(crate) device_late: B::Buffer,
    /// Laid out as [`OutputLayout`]; device.
    pub(crate) device_outputs: B::Buffer,
    /// The same words; host.
    pub(crate) host_outputs: B::HostBuffer,
    /// Tokens to count that are not computed, packed as [`inflight_backend::HistoryInputs`]; host.
    pub(crate) host_history: B::HostBuffer,
    /// The same words; device.
    pub(crate) device_history: B::Buffer,
    /// States of sampled rows, where some are asked for, `[max_rows, hidden_size]` f32; host.
    pub(crate) host_states: B::HostBuffer,
    /// Probes, packed as a step's inputs are; host.
    pub(crate) host_probes: B::HostBuffer,
    /// The same words; device.
    pub(crate) device_probes: B::Buffer,
    /// What they found, laid out as [`OutputLayout`]; device.
    pub(crate) device_probe_outputs: B::Buffer,
    /// The same words; host.
    pub(crate) host_probe_outputs: B::HostBuffer,
    /// States of probed tokens, `[output_rows, hidden_size]` f32; host.
    pub(crate) host_probe_states: B::HostBuffer,
    pub(crate) h2d: Interval<B>,
    /// The late inputs were copied.
    pub(crate) late_ready: B::Event,
    /// The forward pass of a batch that waits for late inputs was done; for traces.
    pub(crate) forward_done: B::Event,
    pub(crate) compute: Interval<B>,
    pub(crate) d2h: Interval<B>,
    /// Blocks came from the host.
    pub(crate) swap_in: Interval<B>,
    /// Blocks went to the host.
    pub(crate) swap_out: Interval<B>,
}

/// Start and end of a slot's work on one stream. `done` orders streams; `started` is for traces.
pub(crate) struct Interval<B: Backend> {
    pub(crate) started: B::Event,
    pub(crate) done: B::Event,
}

/// The two slots. While one is being filled the other's batch computes.
pub(crate) struct IoSlots<B: Backend> {
    slots: [IoSlot<B>; 2],
    /// The slot that was staged last.
    latest: usize,
}

/// Which of the two slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct IoSlotId(usize);

impl<B: Backend> IoSlots<B> {
    pub(crate) fn new(
        backend: &B,
        config: &EngineConfig,
        model: &ModelConfig,
    ) -> Result<Self, BackendError> {
        let new = || IoSlot::new(backend, config, model);
        Ok(Self { slots: [new()?, new()?], latest: 1 })
    }

    /// Both slots.
    pub(crate) fn ids(&self) -> [IoSlotId; 2] {
        [IoSlotId(0), IoSlotId(1)]
    }

    /// Turns to the other slot. Its last batch must have been collected.
    pub(crate) fn advance(&mut self) -> IoSlotId {
        self.latest = 1 - self.latest;
        IoSlotId(self.latest)
    }

    pub(crate) fn get(&self, id: IoSlotId) -> &IoSlot<B> {
        &self.slots[id.0]
    }

    pub(crate) fn get_mut(&mut self, id: IoSlotId) -> &mut IoSlot<B> {
        &mut self.slots[id.0]
    }

    /// The slot staged before `id`: its outputs are what `id` may carry over.
    pub(crate) fn before(&self, id: IoSlotId) -> &IoSlot<B> {
        &self.slots[1 - id.0]
    }
}

impl<B: Backend> IoSlot<B> {
    fn new(backend: &B, config: &EngineConfig, model: &ModelConfig) -> Result<Self, BackendError> {
        let capacity = config.step_capacity(model);
        let num_history = config.history_capacity().num_words();
        let outputs = OutputLayout { max_rows: config.output_rows() };
        let num_probes = config.probe_capacity().shape().num_words();
        let num_inputs = capacity.shape().num_words();
        let num_late = late_words(capacity.max_rows, model.vocab_size);
        let num_states = capacity.max_rows * model.hidden_size;
        let num_probe_states = outputs.max_rows * model.hidden_size;
        Ok(Self {
            host_inputs: backend.alloc_host("host_inputs", num_inputs)?,
            device_inputs: backend.alloc_words("device_inputs", num_inputs)?,
            host_late: backend.alloc_host("host_late", num_late)?,
            device_late: backend.alloc_words("device_late", num_late)?,
            device_outputs: backend.alloc_words("device_outputs", outputs.num_words())?,
            host_outputs: backend.alloc_host("host_outputs", outputs.num_words())?,
            host_history: backend.alloc_host("host_history", num_history)?,
            device_history: backend.alloc_words("device_history", num_history)?,
            host_states: backend.alloc_host("host_states", num_states)?,
            host_probes: backend.alloc_host("host_probes", num_probes)?,
            device_probes: backend.alloc_words("device_probes", num_probes)?,
            device_probe_outputs: backend
                .alloc_words("device_probe_outputs", outputs.num_words())?,
            host_probe_outputs: backend.alloc_host("host_probe_outputs", outputs.num_words())?,
            host_probe_states: backend.alloc_host("host_probe_states", num_probe_states)?,
            h2d: Interval::new(backend)?,
            late_ready: backend.create_event()?,
            forward_done: backend.create_event()?,
            compute: Interval::new(backend)?,
            d2h: Interval::new(backend)?,
            swap_in: Interval::new(backend)?,
            swap_out: Interval::new(backend)?,
        })
    }
}

impl<B: Backend> Interval<B> {
    fn new(backend: &B) -> Result<Self, BackendError> {
        Ok(Self { started: backend.create_event()?, done: backend.create_event()? })
    }
}
