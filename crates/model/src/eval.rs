//! One sequence through a decoder, without an engine: to compare logits or measure perplexity.

use inflight_backend::{
    Backend, BackendError, DeviceBatch, KvLayer, RowState, SamplingRow, StepCapacity, StepInputs,
};

use crate::{Decoder, ForwardInputs, Scratch, kv_layers};

const BLOCK_SIZE: usize = 16;

/// Logits after each of `tokens`, computed `chunk` tokens at a time.
///
/// # Shapes
/// The result is `[tokens.len(), vocab_size]`.
///
/// # Errors
/// As [`logits_from`].
///
/// # Panics
/// As [`logits_from`].
pub fn all_logits<B: Backend>(
    backend: &B,
    decoder: &Decoder<B>,
    tokens: &[u32],
    chunk: usize,
) -> Result<Vec<f32>, BackendError> {
    logits_from(backend, decoder, tokens, 0, chunk)
}

/// Logits after each of `tokens` from position `first` on, computed `chunk` tokens at a time.
///
/// Uses a stream, buffers and a KV cache of its own.
///
/// # Shapes
/// The result is `[tokens.len() - first, vocab_size]`.
///
/// # Errors
/// [`BackendError`] of the allocations or operators.
///
/// # Panics
/// If `chunk` is 0, or there are more tokens than the decoder was loaded for.
pub fn logits_from<B: Backend>(
    backend: &B,
    decoder: &Decoder<B>,
    tokens: &[u32],
    first: usize,
    chunk: usize,
) -> Result<Vec<f32>, BackendError> {
    assert!(chunk > 0, "a chunk has at least one token");
    assert!(tokens.len() <= decoder.max_model_len(), "more tokens than positions");
    let mut runner = Runner::new(backend, decoder, tokens.len(), chunk.min(tokens.len().max(1)))?;
    let num_logits = tokens.len().saturating_sub(first) * decoder.config().vocab_size;
    let mut logits = Vec::with_capacity(num_logits);
    for (i, chunk_tokens) in tokens.chunks(chunk).enumerate() {
        runner.step(chunk_tokens, i * chunk, first, &mut logits)?;
    }
    Ok(logits)
}

/// What one sequence needs on a device. One stream does all, so no event is waited on by another.
struct Runner<'a, B: Backend> {
    backend: &'a B,
    decoder: &'a Decoder<B>,
    kv: Vec<KvLayer<B>>,
    /// Of each layer group.
    max_blocks: usize,
    scratch: Scratch<B>,
    batch: DeviceBatch<B>,
    inputs: StepInputs,
    host_inputs: B::HostBuffer,
    packed: B::Buffer,
    /// Stands for the outputs of a step before, of which no token is taken.
    previous: B::Buffer,
    host_logits: B::HostBuffer,
    stream: B::Stream,
    done: B::Event,
}

impl<'a, B: Backend> Runner<'a, B> {
    fn new(
        backend: &'a B,
        decoder: &'a Decoder<B>,
        max_len: usize,
        chunk: usize,
    ) -> Result<Self, BackendError> {
        let config = decoder.config();
        let max_blocks = max_len.div_ceil(BLOCK_SIZE).max(1);
        let num_groups = decoder.groups().num_groups();
        let num_blocks = num_groups * max_blocks;
        let capacity = StepCapacity {
            max_tokens: chunk,
            max_rows: chunk,
            max_blocks: num_blocks,
            max_bias: 0,
            num_more_groups: num_groups - 1,
            max_prefixes: 0,
        };
        let num_words = capacity.shape().num_words();
        Ok(Self {
            backend,
            decoder,
            kv: kv_layers(backend, config, num_blocks, BLOCK_SIZE)?,
            max_blocks,
            scratch: Scratch::new(backend, config, capacity)?,
            batch: DeviceBatch::new(backend, capacity)?,
            inputs: StepInputs::of_groups(num_groups - 1),
            host_inputs: backend.alloc_host("eval inputs", num_words)?,
            packed: backend.alloc_words("eval packed inputs", num_words)?,
            previous: backend.alloc_words("eval previous outputs", chunk)?,
            host_logits: backend.alloc_host("eval logits", chunk * config.vocab_size)?,
            stream: backend.create_stream("eval")?,
            done: backend.create_event()?,
        })
    }

    /// Runs `tokens`, the first of which is at position `start`, and appends the logits of those
    /// from position `first` on.
    fn step(
        &mut self,
        tokens: &[u32],
        start: usize,
        first: usize,
        logits: &mut Vec<f32>,
    ) -> Result<(), BackendError> {
        stage(&mut self.inputs, tokens, start, first);
        stage_groups(&mut self.inputs, self.max_blocks);
        let (inputs, backend, stream) = (&self.inputs, self.backend, &self.stream);
        let step = backend.write_host(&mut self.host_inputs, |words| inputs.pack(words));
        backend.copy_to_device(&self.host_inputs, &self.packed, step.num_words(), stream)?;
        backend.unpack(&self.packed, &self.previous, step, &self.batch, stream)?;
        let forward = ForwardInputs {
            batch: &self.batch,
            step,
            kv: &self.kv,
            scratch: &self.scratch,
            block_size: BLOCK_SIZE,
            cuts: &[],
            keeps_states: false,
        };
        self.decoder.forward(backend, forward, stream)?;
        let num_words = step.num_sampled * self.decoder.config().vocab_size;
        backend.copy_to_host(self.scratch.logits(), &self.host_logits, num_words, stream)?;
        backend.record(&self.done, stream)?;
        backend.synchronize(&self.done)?;
        backend.read_host(&self.host_logits, |words| {
            logits.extend(words[..num_words].iter().map(|word| f32::from_bits(*word)));
        });
        Ok(())
    }
}

/// One row whose block table is the blocks in order; tokens from position `first` on are sampled.
fn stage(inputs: &mut StepInputs, tokens: &[u32], start: usize, first: usize) {
    let end = start + tokens.len();
    let sampled = first.clamp(start, end) - start..tokens.len();
    let word = |value: usize| u32::try_from(value).expect("positions fit a decoder's table");
    inputs.clear();
    inputs.token_ids.extend(tokens);
    inputs.carry_over.extend(tokens.iter().map(|_| -1));
    inputs.positions.extend((start..end).map(word));
    inputs.slot_mapping.extend((start..end).map(word));
    inputs.row_starts.push(word(tokens.len()));
    inputs.context_lens.push(word(end));
    inputs.blocks.extend((0..end.div_ceil(BLOCK_SIZE)).map(word));
    inputs.block_starts.push(word(inputs.blocks.len()));
    inputs.row_states.push(RowState { state_slot: None, prompt_len: word(end), fresh: false });
    inputs.sampling.extend(sampled.clone().map(|_| SamplingRow::GREEDY));
    inputs.sample_indices.extend(sampled.map(word));
}

/// The same row for the layer groups behind the first: blocks behind those of all before.
fn stage_groups(inputs: &mut StepInputs, max_blocks: usize) {
    let word = |value: usize| u32::try_from(value).expect("blocks of one sequence are few");
    for (group, number) in inputs.more_groups.iter_mut().zip(1..) {
        let first = word(number * max_blocks);
        let first_slot = word(number * max_blocks * BLOCK_SIZE);
        group.slot_mapping.extend(inputs.slot_mapping.iter().map(|slot| first_slot + slot));
        group.context_lens.extend(&inputs.context_lens);
        group.blocks.extend(inputs.blocks.iter().map(|block| first + block));
        group.block_starts.push(word(group.blocks.len()));
    }
}
