//! Operators that know where tokens are: rotation, attention, sampling.

use anyhow::Result;
use inflight_backend::{
    AttentionShape, Backend, BackendError, DeviceBatch, Dtype, HostTensor, KvLayer, OutputLayout,
    StepCapacity, StepInputs, StepShape, TensorData,
    late::late_words,
    ops::{Attention, RmsNorm, RopeAndCache, Sample, SamplingState},
};

use super::{
    KernelWorkload, OperatorTiming, Peer,
    report::Work,
    steps::{Row, Sequences},
    stopwatch::Stopwatch,
};

/// Bytes that the keys and values of all layers have together, unless the model has fewer.
const COLD_BYTES: usize = 256 << 20;
/// Most layers for that.
const MAX_LAYERS: usize = 32;
/// Tokens that are written to the KV cache at once when it is filled.
const FILL_TOKENS: usize = 2048;

pub(super) struct Contexts<'a, B: Backend> {
    pub(super) workload: &'a KernelWorkload,
    pub(super) stopwatch: &'a Stopwatch<'a, B>,
}

/// Sequences in the KV cache of some layers, and a step's operands.
struct Cache<B: Backend> {
    layers: Vec<KvLayer<B>>,
    /// Random.
    qkv: B::Buffer,
    out: B::Buffer,
    rotary: B::Buffer,
    batch: DeviceBatch<B>,
    packed: B::Buffer,
    host: B::HostBuffer,
    outputs: B::Buffer,
}

impl<B: Backend> Contexts<'_, B> {
    /// `peer`: another device to measure decode attention with, and its name.
    pub(super) fn measure(
        &self,
        peer: Option<(&'static str, &Self)>,
        note: &mut dyn FnMut(OperatorTiming),
    ) -> Result<()> {
        for &num_rows in &self.workload.num_rows {
            let sequences = self.sequences(1, num_rows);
            let row = Row { sequence: 0, context_len: num_rows, num_new: num_rows };
            let mut cache = self.cache(sequences, num_rows)?;
            let step = self.set(&mut cache, &sequences.step(&[row]))?;
            note(self.rope_and_cache(&cache, step)?);
        }
        for &num_rows in &self.workload.batches {
            for &context in &self.workload.contexts {
                let Some(mut timing) = self.decode(num_rows, context)? else { continue };
                if let Some((name, peer)) = peer {
                    let beside = peer.decode(num_rows, context)?;
                    timing.peer = beside.map(|beside| Peer::new(name, beside.us * 1e-6));
                }
                note(timing);
            }
            note(self.sample(num_rows)?);
        }
        for &len in &self.workload.prompts {
            let sequences = self.sequences(1, len);
            let row = Row { sequence: 0, context_len: len, num_new: len };
            let mut cache = self.filled(sequences, len)?;
            let step = self.set(&mut cache, &sequences.step(&[row]))?;
            let pairs = (len * (len + 1) / 2) as f64;
            let work = self.attention_work(len, len, pairs);
            let seconds = self.attention_seconds(&cache, step)?;
            let timing = OperatorTiming::new("prefill attention", len, work, seconds);
            note(OperatorTiming { context: Some(len), ..timing });
        }
        Ok(())
    }

    /// `None` if the device has no memory for that.
    fn decode(&self, num_rows: usize, context_len: usize) -> Result<Option<OperatorTiming>> {
        let sequences = self.sequences(num_rows, context_len);
        let row = |sequence| Row { sequence, context_len, num_new: 1 };
        let mut cache = match self.filled(sequences, num_rows) {
            Ok(cache) => cache,
            Err(error) if is_out_of_memory(&error) => return Ok(None),
            Err(error) => return Err(error),
        };
        let rows: Vec<Row> = (0..num_rows).map(row).collect();
        let step = self.set(&mut cache, &sequences.step(&rows))?;
        let work = self.attention_work(num_rows, num_rows * context_len, {
            num_rows as f64 * context_len as f64
        });
        let seconds = self.attention_seconds(&cache, step)?;
        let timing = OperatorTiming::new("decode attention", num_rows, work, seconds);
        Ok(Some(OperatorTiming { context: Some(context_len), ..timing }))
    }

    /// Bytes of so many tokens' queries and outputs and of so many positions' keys and values.
    fn attention_work(&self, num_tokens: usize, num_positions: usize, pairs: f64) -> Work {
        let attention = self.attention();
        let layout = self.stopwatch.backend.kv_layout(attention);
        let kv_bytes = 2 * layout.block_bytes() * num_positions / self.workload.block_size;
        Work {
            bytes: kv_bytes + 2 * num_tokens * attention.q_len() * self.activation_bytes(),
            operations: 4.0 * pairs * attention.q_len() as f64,
        }
    }

    fn attention_seconds(&self, cache: &Cache<B>, step: StepShape) -> Result<f64> {
        let Stopwatch { backend, stream, .. } = self.stopwatch;
        let attention = self.attention();
        self.stopwatch.seconds(&|i| {
            let args = Attention {
                qkv: &cache.qkv,
                kv: &cache.layers[i % cache.layers.len()],
                out: &cache.out,
                attention,
                scale: 1.0 / (attention.head_dim as f32).sqrt(),
                window: None,
                batch: &cache.batch,
                step,
            };
            backend.attention(args, stream)
        })
    }

    fn rope_and_cache(&self, cache: &Cache<B>, step: StepShape) -> Result<OperatorTiming> {
        let seconds = self
            .stopwatch
            .seconds(&|i| self.enqueue_rope(cache, &cache.layers[i % cache.layers.len()], step))?;
        let attention = self.attention();
        let layout = self.stopwatch.backend.kv_layout(attention);
        let written = 2 * layout.block_bytes() * step.num_tokens / self.workload.block_size;
        let activations = step.num_tokens * (attention.qkv_len() + attention.q_len());
        let work = Work {
            bytes: activations * self.activation_bytes() + written,
            operations: (3 * step.num_tokens * attention.qkv_len()) as f64,
        };
        Ok(OperatorTiming::new("rope_and_cache", step.num_tokens, work, seconds))
    }

    fn enqueue_rope(
        &self,
        cache: &Cache<B>,
        kv: &KvLayer<B>,
        step: StepShape,
    ) -> Result<(), BackendError> {
        let attention = self.attention();
        let args = RopeAndCache {
            qkv: &cache.qkv,
            rotary_table: &cache.rotary,
            rotary_dim: attention.head_dim,
            interleaved: false,
            qk_norm: None,
            eps: 1e-5,
            attention,
            kv,
            batch: &cache.batch,
            step,
        };
        self.stopwatch.backend.rope_and_cache(args, &self.stopwatch.stream)
    }

    /// Greedy, of logits that do not matter.
    fn sample(&self, num_rows: usize) -> Result<OperatorTiming> {
        let Stopwatch { backend, stream, .. } = self.stopwatch;
        let vocab_size = self.workload.config.vocab_size;
        let sequences = self.sequences(num_rows, 1);
        let row = |sequence| Row { sequence, context_len: 1, num_new: 1 };
        let mut cache = self.cache(sequences, num_rows)?;
        let rows: Vec<Row> = (0..num_rows).map(row).collect();
        let step = self.set(&mut cache, &sequences.step(&rows))?;
        let logits = self.random(num_rows * vocab_size)?;
        let token_counts = backend.alloc_words("bench", num_rows * vocab_size)?;
        let state = SamplingState { token_counts, vocab_size };
        let late = backend.alloc_words("bench", late_words(num_rows, vocab_size))?;
        let seconds = self.stopwatch.seconds(&|_| {
            let args = Sample {
                logits: &logits,
                state: &state,
                batch: &cache.batch,
                step,
                is_unusual: false,
                late: &late,
                outputs: &cache.outputs,
                max_rows: num_rows,
            };
            backend.sample(args, stream)
        })?;
        let len = num_rows * vocab_size;
        let work = Work { bytes: 4 * len, operations: len as f64 };
        Ok(OperatorTiming::new("sample, greedy", num_rows, work, seconds))
    }

    /// As [`Contexts::cache`], every token written.
    fn filled(&self, sequences: Sequences, max_rows: usize) -> Result<Cache<B>> {
        let mut cache = self.cache(sequences, max_rows)?;
        for inputs in sequences.fill(FILL_TOKENS) {
            let step = self.set(&mut cache, &inputs)?;
            cache.layers.iter().try_for_each(|kv| self.enqueue_rope(&cache, kv, step))?;
            self.stopwatch.finish()?;
        }
        Ok(cache)
    }

    /// Room for `sequences` in as many layers as no cache holds, and for a step of `max_tokens`.
    fn cache(&self, sequences: Sequences, max_tokens: usize) -> Result<Cache<B>> {
        let (backend, attention) = (self.stopwatch.backend, self.attention());
        let max_tokens = max_tokens.max(FILL_TOKENS.min(sequences.len));
        let bytes = sequences.num_blocks() * backend.kv_layout(attention).block_bytes();
        let most = self.workload.config.num_layers.clamp(1, MAX_LAYERS);
        let num_layers = COLD_BYTES.div_ceil(2 * bytes).clamp(1, most);
        let layer = |_| {
            let kv = |label| backend.alloc_kv(label, bytes);
            Ok::<_, BackendError>(KvLayer { keys: kv("keys")?, values: kv("values")? })
        };
        let layers = (0..num_layers).map(layer).collect::<Result<_, _>>()?;
        let capacity = StepCapacity {
            max_tokens,
            max_rows: sequences.num.max(1),
            max_blocks: sequences.num_blocks(),
            max_bias: 0,
            num_more_groups: 0,
            max_prefixes: 0,
        };
        let num_words = capacity.shape().num_words();
        let outputs = OutputLayout { max_rows: sequences.num.max(1) }.num_words();
        Ok(Cache {
            layers,
            qkv: self.random_activations(max_tokens, attention.qkv_len())?,
            out: backend.alloc_activations("bench", max_tokens * attention.q_len())?,
            rotary: self.no_rotation(sequences.len.max(1), attention.head_dim)?,
            batch: DeviceBatch::new(backend, capacity)?,
            packed: backend.alloc_words("bench", num_words)?,
            host: backend.alloc_host("bench", num_words)?,
            outputs: backend.alloc_words("bench", outputs)?,
        })
    }

    /// Makes `inputs` the step that operators see.
    fn set(&self, cache: &mut Cache<B>, inputs: &StepInputs) -> Result<StepShape> {
        let Stopwatch { backend, stream, .. } = self.stopwatch;
        let shape = inputs.shape();
        backend.write_host(&mut cache.host, |words| inputs.pack(words));
        backend.copy_to_device(&cache.host, &cache.packed, shape.num_words(), stream)?;
        backend.unpack(&cache.packed, &cache.outputs, shape, &cache.batch, stream)?;
        self.stopwatch.finish()?;
        Ok(shape)
    }

    fn random(&self, len: usize) -> Result<B::Buffer, BackendError> {
        let data = TensorData::Random { seed: 9, std: 1.0 };
        let (name, dtype) = ("bench".to_owned(), Dtype::F32);
        self.stopwatch.backend.load_vector(&[HostTensor { name, dtype, shape: vec![len], data }])
    }

    /// A rotary table of ones and zeros: queries are turned in place over and over, which must not
    /// make them grow beyond what attention meets in a model.
    fn no_rotation(&self, num_positions: usize, head_dim: usize) -> Result<B::Buffer> {
        let cosines = [1.0_f32.to_le_bytes(), 0.0_f32.to_le_bytes()];
        let row = cosines.map(|value| value.repeat(head_dim / 2)).concat();
        self.vector(num_positions * head_dim, row.repeat(num_positions))
    }

    fn vector(&self, len: usize, bytes: Vec<u8>) -> Result<B::Buffer> {
        let data = TensorData::Owned(bytes.into());
        let (name, dtype) = ("bench".to_owned(), Dtype::F32);
        let tensor = HostTensor { name, dtype, shape: vec![len], data };
        Ok(self.stopwatch.backend.load_vector(&[tensor])?)
    }

    fn random_activations(&self, num_rows: usize, len: usize) -> Result<B::Buffer> {
        let backend = self.stopwatch.backend;
        let x = self.random(num_rows * len)?;
        let ones = self.vector(len, 1_f32.to_le_bytes().repeat(len))?;
        let out = backend.alloc_activations("bench", num_rows * len)?;
        let (weight, eps) = (&ones, 1e-5);
        let args = RmsNorm { x: &x, weight, out: &out, num_rows, len, eps };
        backend.rms_norm(args, &self.stopwatch.stream)?;
        self.stopwatch.finish()?;
        Ok(out)
    }

    fn sequences(&self, num: usize, len: usize) -> Sequences {
        Sequences { num, len, block_size: self.workload.block_size }
    }

    fn attention(&self) -> AttentionShape {
        self.workload.config.attention_shape(self.workload.block_size)
    }

    fn activation_bytes(&self) -> usize {
        if self.stopwatch.backend.activation_dtype() == Dtype::F32 { 4 } else { 2 }
    }
}

fn is_out_of_memory(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(BackendError::OutOfMemory { .. }))
}
