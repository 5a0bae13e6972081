//! One step's inputs on the device.

use crate::{Backend, BackendError, StepCapacity};

/// One step's inputs on the device, at fixed addresses; see [`crate::step`] for the sections.
///
/// One set serves all steps: only operations of the compute stream touch it.
#[derive(Clone)]
#[allow(missing_docs)]
pub struct DeviceBatch<B: Backend> {
    pub token_ids: B::Buffer,
    pub positions: B::Buffer,
    pub slot_mapping: B::Buffer,
    pub row_starts: B::Buffer,
    pub context_lens: B::Buffer,
    pub block_starts: B::Buffer,
    pub row_states: B::Buffer,
    pub blocks: B::Buffer,
    pub sample_indices: B::Buffer,
    pub sampling: B::Buffer,
    pub bias_ids: B::Buffer,
    pub bias_values: B::Buffer,
    /// Of the layer groups behind the first.
    pub more_groups: Vec<GroupPlaces<B>>,
    /// The numbers of prefixes and of their rows, then the section.
    pub prefixes: B::Buffer,
    pub prefix_rows: B::Buffer,
}

/// Where a layer group's keys and values are, of one step: what it has of its own in
/// [`DeviceBatch`].
#[derive(Clone)]
#[allow(missing_docs)]
pub struct GroupPlaces<B: Backend> {
    pub slot_mapping: B::Buffer,
    pub context_lens: B::Buffer,
    pub block_starts: B::Buffer,
}

impl<B: Backend> DeviceBatch<B> {
    /// Buffers for the largest step.
    pub fn new(backend: &B, capacity: StepCapacity) -> Result<Self, BackendError> {
        let at = capacity.shape().layout();
        let alloc = |label, range: std::ops::Range<usize>| backend.alloc_words(label, range.len());
        Ok(Self {
            token_ids: alloc("token_ids", at.token_ids)?,
            positions: alloc("positions", at.positions)?,
            slot_mapping: alloc("slot_mapping", at.slot_mapping)?,
            row_starts: alloc("row_starts", at.row_starts)?,
            context_lens: alloc("context_lens", at.context_lens)?,
            block_starts: alloc("block_starts", at.block_starts)?,
            row_states: alloc("row_states", at.row_states)?,
            blocks: alloc("blocks", at.blocks)?,
            sample_indices: alloc("sample_indices", at.sample_indices)?,
            sampling: alloc("sampling", at.sampling)?,
            bias_ids: alloc("bias_ids", at.bias_ids)?,
            bias_values: alloc("bias_values", at.bias_values)?,
            more_groups: at
                .more_groups
                .into_iter()
                .map(|at| {
                    Ok(GroupPlaces {
                        slot_mapping: alloc("slot_mapping", at.slot_mapping)?,
                        context_lens: alloc("context_lens", at.context_lens)?,
                        block_starts: alloc("block_starts", at.block_starts)?,
                    })
                })
                .collect::<Result<_, _>>()?,
            prefixes: backend.alloc_words("prefixes", 2 + at.prefixes.len())?,
            prefix_rows: backend.alloc_words("prefix_rows", at.prefix_rows.len().max(1))?,
        })
    }

    /// The same batch as the operators of a layer group's layers see it; groups count from 0.
    ///
    /// # Panics
    /// When there is no such group.
    pub fn of_group(&self, group: usize) -> Self {
        let mut batch = Self { more_groups: Vec::new(), ..self.clone() };
        if let Some(group) = group.checked_sub(1) {
            let places = self.more_groups[group].clone();
            batch.slot_mapping = places.slot_mapping;
            batch.context_lens = places.context_lens;
            batch.block_starts = places.block_starts;
        }
        batch
    }
}
