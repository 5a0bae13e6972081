//! Times every operator at the sizes of an 8B model, inside graphs and with cold caches, beside
//! what memory bandwidth allows:
//! `cuda_bench [attention|fp8|fp8-kv|int8-kv|unified|invariant...] [CACHE_FOLDER] [ROWS...]`. With
//! `fp8`, layers have weights in fp8; with `attention`, nothing else is timed.

use std::{error::Error, time::Duration};

use inflight_backend::{
    AttentionShape, Backend, BackendError, CudaBackend, CudaConfig, DeviceBatch, Dtype, HostTensor,
    KvDtype, KvLayer, RowState, SamplingRow, StepCapacity, StepInputs, StepShape, TensorData,
    cuda::{Numerics, Softmax, usual_library_folders},
    ops::{
        Activation, Attention, GateAndMul, Matmul, RmsNorm, RopeAndCache, Sample, SamplingState,
    },
};

type Failure = Box<dyn Error>;
type Buffer = <CudaBackend as Backend>::Buffer;
type Matrix = <CudaBackend as Backend>::Matrix;

/// Bytes a second that a copy moves on an H200, reading and writing.
const BANDWIDTH: f64 = 4.3e12;
/// Layers between which every operator turns, so that nothing it reads is in the L2 cache.
const NUM_LAYERS: usize = 8;
const HIDDEN: usize = 4096;
const FFN: usize = 14336;
const VOCAB: usize = 128_256;
const SHAPE: AttentionShape =
    AttentionShape { num_heads: 32, num_kv_heads: 8, head_dim: 128, block_size: 16 };
/// Most rows that attention is timed with: more are tokens of a prefill.
const MAX_DECODE_ROWS: usize = 256;
/// Context lengths that attention is timed at.
const CONTEXTS: [usize; 3] = [576, 2048, 4096];

fn main() -> Result<(), Failure> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let (mut numerics, mut parts) = (Numerics::default(), Parts::default());
    arguments.retain(|argument| {
        match argument.as_str() {
            "fp8" => parts.fp8 = true,
            "fp8-kv" => numerics.kv_dtype = KvDtype::Fp8,
            "int8-kv" => numerics.kv_dtype = KvDtype::Int8,
            "unified" => numerics.softmax = Softmax::Unified,
            "invariant" => numerics.batch_invariant = true,
            "attention" => parts.only_attention = true,
            _ => return true,
        }
        false
    });
    let backend = CudaBackend::new(CudaConfig {
        ordinal: 0,
        library_folders: usual_library_folders(|name| std::env::var_os(name)),
        cache: arguments.first().map(Into::into),
        keeps_fastest: true,
        graphs: true,
        blocking_waits: false,
        numerics,
    })?;
    println!("{}", backend.description());
    let rows = arguments.iter().skip(1).map(|rows| rows.parse()).collect::<Result<Vec<_>, _>>()?;
    let rows = if rows.is_empty() { vec![1, 8, 32, 128] } else { rows };
    let bench = Bench::new(&backend, *rows.iter().max().expect("not empty"), parts)?;
    for num_rows in rows {
        bench.run(num_rows)?;
    }
    Ok(())
}

/// What is timed.
#[derive(Clone, Copy, Default)]
struct Parts {
    /// Whether layers have weights in fp8.
    fp8: bool,
    only_attention: bool,
}

struct Bench<'a> {
    only_attention: bool,
    backend: &'a CudaBackend,
    /// Bytes of an element of the layers' weights.
    weight_bytes: usize,
    stream: <CudaBackend as Backend>::Stream,
    started: <CudaBackend as Backend>::Event,
    ended: <CudaBackend as Backend>::Event,
    layers: Vec<Layer>,
    output: Matrix,
    vector: Buffer,
    rotary: Buffer,
    state: Buffer,
    narrow: Buffer,
    wide: Buffer,
    logits: Buffer,
}

struct Layer {
    qkv: Matrix,
    out: Matrix,
    gate_up: Matrix,
    down: Matrix,
    kv: KvLayer<CudaBackend>,
}

/// What one operator moved and how long it took.
struct Timing {
    name: String,
    time: Duration,
    bytes: usize,
}

impl<'a> Bench<'a> {
    fn new(backend: &'a CudaBackend, max_rows: usize, parts: Parts) -> Result<Self, Failure> {
        let num_tokens = max_rows.min(MAX_DECODE_ROWS) * (CONTEXTS[2] + 16);
        let block_bytes = backend.kv_layout(SHAPE).block_bytes();
        let kv_bytes = num_tokens.div_ceil(SHAPE.block_size) * block_bytes;
        let layer = |i: u64| {
            // Matrices that nobody uses need not be large.
            let side = |len: usize| if parts.only_attention { 64 } else { len };
            let matrix = |rows, cols, j| {
                let random = random(side(rows), side(cols), 10 * i + j);
                backend.load_matrix(&[if parts.fp8 { random.rounded_to_fp8() } else { random }])
            };
            let kv = |label| backend.alloc_kv(label, kv_bytes);
            Ok::<_, Failure>(Layer {
                qkv: matrix(SHAPE.qkv_len(), HIDDEN, 0)?,
                out: matrix(HIDDEN, SHAPE.q_len(), 1)?,
                gate_up: matrix(2 * FFN, HIDDEN, 2)?,
                down: matrix(HIDDEN, FFN, 3)?,
                kv: KvLayer { keys: kv("keys")?, values: kv("values")? },
            })
        };
        let layers = (0..NUM_LAYERS as u64).map(layer).collect::<Result<_, _>>()?;
        Ok(Self {
            weight_bytes: if parts.fp8 { 1 } else { 2 },
            stream: backend.create_stream("bench")?,
            started: backend.create_event()?,
            ended: backend.create_event()?,
            layers,
            output: backend.load_matrix(&[random(
                if parts.only_attention { 64 } else { VOCAB },
                HIDDEN,
                5,
            )])?,
            vector: backend.load_vector(&[random(1, FFN, 6)])?,
            rotary: backend.load_vector(&[random(8192, SHAPE.head_dim, 7)])?,
            state: backend.alloc_f32("state", max_rows * HIDDEN)?,
            narrow: backend.alloc_activations("narrow", max_rows * FFN)?,
            wide: backend.alloc_activations("wide", max_rows * 2 * FFN)?,
            logits: backend.alloc_f32("logits", max_rows.min(MAX_DECODE_ROWS) * VOCAB)?,
            backend,
            only_attention: parts.only_attention,
        })
    }

    fn run(&self, num_rows: usize) -> Result<(), Failure> {
        let mut timings = if self.only_attention { Vec::new() } else { self.dense(num_rows)? };
        for context_len in CONTEXTS.into_iter().filter(|_| num_rows <= MAX_DECODE_ROWS) {
            timings.extend(self.context(num_rows, context_len)?);
        }
        println!("\n{num_rows:<4} rows                       us      GB/s   of copy   TFLOP/s");
        for Timing { name, time, bytes } in &timings {
            let rate = *bytes as f64 / time.as_secs_f64();
            let us = time.as_secs_f64() * 1e6;
            let flops = *bytes as f64 * num_rows as f64 / time.as_secs_f64() / 1e12;
            let share = rate / BANDWIDTH * 100.0;
            println!("{name:24} {us:9.2} {:9.0} {share:8.1} % {flops:9.1}", rate / 1e9);
        }
        Ok(())
    }

    fn dense(&self, num_rows: usize) -> Result<Vec<Timing>, Failure> {
        let (state, narrow, wide) = (&self.state, &self.narrow, &self.wide);
        let weights = |rows: usize, cols: usize| rows * cols * self.weight_bytes;
        Ok(vec![
            self.time("qkv", weights(SHAPE.qkv_len(), HIDDEN), &|layer| {
                self.product(num_rows, narrow, &layer.qkv, wide, false)
            })?,
            self.time("attention output", weights(HIDDEN, SHAPE.q_len()), &|layer| {
                self.product(num_rows, narrow, &layer.out, state, true)
            })?,
            self.time("gate and up", weights(2 * FFN, HIDDEN), &|layer| {
                self.product(num_rows, narrow, &layer.gate_up, wide, false)
            })?,
            self.time("down", weights(HIDDEN, FFN), &|layer| {
                self.product(num_rows, narrow, &layer.down, state, true)
            })?,
            self.time("logits", VOCAB * HIDDEN * 2, &|_| {
                self.product(
                    num_rows.min(MAX_DECODE_ROWS),
                    narrow,
                    &self.output,
                    &self.logits,
                    false,
                )
            })?,
            self.time("rms_norm", num_rows * HIDDEN * 6, &|_| {
                let (x, weight, out) = (state, &self.vector, narrow);
                let args = RmsNorm { x, weight, out, num_rows, len: HIDDEN, eps: 1e-5 };
                self.backend.rms_norm(args, &self.stream)
            })?,
            self.time("silu_and_mul", num_rows * FFN * 6, &|_| {
                let (gate_up, out, len) = (wide, narrow, FFN);
                let activation = Activation::Silu;
                let args = GateAndMul { gate_up, out, num_rows, len, activation };
                self.backend.gate_and_mul(args, &self.stream)
            })?,
        ])
    }

    fn product(
        &self,
        num_rows: usize,
        x: &Buffer,
        weight: &Matrix,
        out: &Buffer,
        accumulate: bool,
    ) -> Result<(), BackendError> {
        let args = Matmul { x, weight, bias: None, out, num_rows, accumulate };
        self.backend.matmul(args, &self.stream)
    }

    fn context(&self, num_rows: usize, context_len: usize) -> Result<Vec<Timing>, Failure> {
        let inputs = decode_step(num_rows, context_len);
        let step = inputs.shape();
        let capacity = StepCapacity {
            max_tokens: step.num_tokens,
            max_rows: num_rows,
            max_blocks: step.num_blocks,
            max_bias: 0,
            num_more_groups: 0,
            max_prefixes: 0,
        };
        let batch = &DeviceBatch::new(self.backend, capacity)?;
        let packed = self.backend.alloc_words("packed", step.num_words())?;
        let mut host = self.backend.alloc_host("packed", step.num_words())?;
        self.backend.write_host(&mut host, |words| inputs.pack(words));
        self.backend.copy_to_device(&host, &packed, step.num_words(), &self.stream)?;
        let outputs = self.backend.alloc_words("outputs", num_rows * 42)?;
        let unpack = || self.backend.unpack(&packed, &outputs, step, batch, &self.stream);
        unpack()?;
        let attend = |layer: &Layer| {
            let args = Attention {
                qkv: &self.wide,
                kv: &layer.kv,
                out: &self.narrow,
                attention: SHAPE,
                scale: 0.09,
                window: None,
                batch,
                step,
            };
            self.backend.attention(args, &self.stream)
        };
        let block_bytes = self.backend.kv_layout(SHAPE).block_bytes();
        let kv_bytes = 2 * num_rows * context_len.div_ceil(SHAPE.block_size) * block_bytes;
        // Outside of the timed graph: the first call makes the plan that the others share.
        attend(&self.layers[0])?;
        let mut timings =
            vec![self.time(&format!("attention at {context_len}"), kv_bytes, &attend)?];
        if context_len == CONTEXTS[0] {
            timings.extend(self.small(batch, step, &outputs, &unpack)?);
        }
        self.finish()?;
        Ok(timings)
    }

    /// Operators whose time does not depend on the context.
    fn small(
        &self,
        batch: &DeviceBatch<CudaBackend>,
        step: StepShape,
        outputs: &Buffer,
        unpack: &dyn Fn() -> Result<(), BackendError>,
    ) -> Result<Vec<Timing>, Failure> {
        let num_rows = step.num_rows;
        let counts = self.backend.alloc_words("counts", num_rows * VOCAB)?;
        let state = &SamplingState { token_counts: counts, vocab_size: VOCAB };
        Ok(vec![
            self.time("rope_and_cache", num_rows * SHAPE.qkv_len() * 4, &|layer| {
                let args = RopeAndCache {
                    qkv: &self.wide,
                    rotary_table: &self.rotary,
                    rotary_dim: SHAPE.head_dim,
                    interleaved: false,
                    qk_norm: None,
                    eps: 1e-5,
                    attention: SHAPE,
                    kv: &layer.kv,
                    batch,
                    step,
                };
                self.backend.rope_and_cache(args, &self.stream)
            })?,
            self.time("sample (greedy)", num_rows * VOCAB * 4, &|_| {
                let logits = &self.logits;
                let late = outputs; // no row has late inputs
                let max_rows = num_rows;
                let is_unusual = false;
                let args =
                    Sample { logits, state, batch, step, is_unusual, late, outputs, max_rows };
                self.backend.sample(args, &self.stream)
            })?,
            self.time("unpack", step.num_words() * 8, &|_| unpack())?,
            self.time("track_tokens", 0, &|_| {
                self.backend.track_tokens(batch, step, state, &self.stream)
            })?,
        ])
    }

    /// Median time of one call of `enqueue` in a graph of several rounds over all layers.
    fn time(
        &self,
        name: &str,
        bytes: usize,
        enqueue: &dyn Fn(&Layer) -> Result<(), BackendError>,
    ) -> Result<Timing, Failure> {
        const ROUNDS: usize = 4;
        let graph = self.backend.capture(&self.stream, &|| {
            for _ in 0..ROUNDS {
                self.layers.iter().try_for_each(enqueue)?;
            }
            Ok(())
        })?;
        let mut times = Vec::new();
        for _ in 0..5 {
            self.backend.record(&self.started, &self.stream)?;
            self.backend.replay(&graph, &self.stream)?;
            self.finish()?;
            times.push(self.backend.elapsed(&self.started, &self.ended)?);
        }
        times.sort();
        let time = times[times.len() / 2] / (ROUNDS * NUM_LAYERS) as u32;
        Ok(Timing { name: name.to_owned(), time, bytes })
    }

    fn finish(&self) -> Result<(), Failure> {
        self.backend.record(&self.ended, &self.stream)?;
        Ok(self.backend.synchronize(&self.ended)?)
    }
}

fn random(rows: usize, cols: usize, seed: u64) -> HostTensor {
    let shape = if rows == 1 { vec![cols] } else { vec![rows, cols] };
    let data = TensorData::Random { seed, std: 0.02 };
    HostTensor { name: "bench".into(), dtype: Dtype::F32, shape, data }
}

/// A step of rows that each decode one token after `context_len - 1` others.
fn decode_step(num_rows: usize, context_len: usize) -> StepInputs {
    let word = |value: usize| u32::try_from(value).expect("benchmarks are small");
    let mut inputs = StepInputs::default();
    inputs.clear();
    let num_blocks = context_len.div_ceil(SHAPE.block_size);
    for row in 0..num_rows {
        inputs.token_ids.push(word(row));
        inputs.carry_over.push(-1);
        inputs.positions.push(word(context_len - 1));
        // Neighbours in a sequence lie apart in the cache, as in a server that has run for a while.
        let block = |i: usize| word(i * num_rows + row);
        inputs.blocks.extend((0..num_blocks).map(block));
        let last = block(num_blocks - 1) as usize * SHAPE.block_size;
        inputs.slot_mapping.push(word(last + (context_len - 1) % SHAPE.block_size));
        inputs.row_starts.push(word(row + 1));
        inputs.context_lens.push(word(context_len));
        inputs.block_starts.push(word(inputs.blocks.len()));
        inputs.row_states.push(RowState { state_slot: None, prompt_len: 1, fresh: false });
        inputs.sample_indices.push(word(row));
        inputs.sampling.push(SamplingRow::GREEDY);
    }
    inputs
}
