//! How long attention takes on this machine, one layer at a time, from cold memory.
//!
//! ```text
//! cargo run --release -p inflight-backend --example attention_bench [heads kv_heads head_dim]
//! ```
//!
//! Many layers' caches are gone through in turn, so that none is left in the processor's caches
//! from the last time, as in a real step. Without arguments: the heads of SmolLM2-135M.

use std::{error::Error, time::Duration};

use inflight_backend::{
    AttentionShape, Backend, CpuBackend, CpuConfig, DeviceBatch, HostTensor, KvLayer, RowState,
    StepCapacity, StepInputs, StepShape, TensorData,
    ops::{Attention, RopeAndCache},
};

const BLOCK_SIZE: usize = 16;
const MAX_TOKENS: usize = 512;
/// Bytes of keys and values that are gone through before a layer comes up again.
const COLD_BYTES: usize = 300 << 20;
const REPEATS: usize = 7;

type Fallible<T> = Result<T, Box<dyn Error>>;
type Buffer<B> = <B as Backend>::Buffer;

/// Rows of the same context, of which the last `new` tokens are new.
#[derive(Clone, Copy)]
struct Case {
    num_rows: usize,
    context: usize,
    new: usize,
}

struct Bench<B: Backend> {
    backend: B,
    stream: B::Stream,
    attention: AttentionShape,
    batch: DeviceBatch<B>,
    packed: Buffer<B>,
    outputs: Buffer<B>,
    host: B::HostBuffer,
    qkv: Buffer<B>,
    rotary_table: Buffer<B>,
    out: Buffer<B>,
}

fn main() -> Fallible<()> {
    let numbers: Vec<usize> =
        std::env::args().skip(1).map(|arg| arg.parse()).collect::<Result<_, _>>()?;
    let (num_heads, num_kv_heads, head_dim) = match numbers[..] {
        [] => (9, 3, 64),
        [num_heads, num_kv_heads, head_dim] => (num_heads, num_kv_heads, head_dim),
        _ => return Err("give heads, kv_heads and head_dim, or nothing".into()),
    };
    let attention = AttentionShape { num_heads, num_kv_heads, head_dim, block_size: BLOCK_SIZE };
    let mut bench = Bench::new(CpuBackend::new(CpuConfig::detect())?, attention)?;
    println!("{}; {attention:?}", bench.backend.description());
    println!(
        "{:>8} {:>5} {:>8} {:>12} {:>9} {:>9}",
        "", "rows", "context", "us / layer", "GB/s", "GFLOP/s"
    );
    for context in [128, 512, 2048] {
        for num_rows in [1, 8, 32] {
            bench.report("decode", Case { num_rows, context, new: 1 })?;
        }
    }
    for context in [512, 2048] {
        bench.report("prefill", Case { num_rows: 1, context, new: 512 })?;
    }
    Ok(())
}

impl<B: Backend> Bench<B> {
    fn new(backend: B, attention: AttentionShape) -> Fallible<Self> {
        let capacity = StepCapacity {
            max_tokens: MAX_TOKENS,
            max_rows: 32,
            max_blocks: 32 * (2048 / BLOCK_SIZE),
            max_bias: 0,
            num_more_groups: 0,
            max_prefixes: 0,
        };
        let num_words = capacity.shape().num_words();
        let random = |name: &str, len, std| HostTensor {
            name: name.into(),
            dtype: inflight_backend::Dtype::F32,
            shape: vec![len],
            data: TensorData::Random { seed: 1, std },
        };
        let qkv = random("qkv", MAX_TOKENS * attention.qkv_len(), 1.0);
        let table = random("rotary table", 2048 * attention.head_dim, 0.7);
        Ok(Self {
            stream: backend.create_stream("compute")?,
            batch: DeviceBatch::new(&backend, capacity)?,
            packed: backend.alloc_words("packed", num_words)?,
            outputs: backend.alloc_words("outputs", 32)?,
            host: backend.alloc_host("inputs", num_words)?,
            qkv: backend.load_vector(&[qkv])?,
            rotary_table: backend.load_vector(&[table])?,
            out: backend.alloc_activations("out", MAX_TOKENS * attention.q_len())?,
            attention,
            backend,
        })
    }

    /// Measures `case` and prints a line.
    fn report(&mut self, name: &str, case: Case) -> Fallible<()> {
        let heads = self.attention;
        let num_tokens = case.num_rows * case.context;
        let block_bytes = self.backend.kv_layout(heads).block_bytes();
        let kv_bytes = 2 * num_tokens.div_ceil(BLOCK_SIZE) * block_bytes;
        let layers = self.layers(case, COLD_BYTES.div_ceil(kv_bytes).max(2))?;
        let time = self.measure(case, &layers)?;
        let pairs = case.num_rows * case.new * (2 * case.context - case.new + 1) / 2;
        let operations = 4 * pairs * heads.q_len();
        let Case { num_rows, context, .. } = case;
        println!(
            "{name:>8} {num_rows:>5} {context:>8} {:>12.1} {:>9.1} {:>9.1}",
            time * 1e6,
            kv_bytes as f64 / time / 1e9,
            operations as f64 / time / 1e9,
        );
        Ok(())
    }

    /// Caches of several layers, filled by the operator that fills them in a step.
    fn layers(&mut self, case: Case, num_layers: usize) -> Fallible<Vec<KvLayer<B>>> {
        let heads = self.attention;
        let num_blocks = case.num_rows * case.context.div_ceil(BLOCK_SIZE);
        let bytes = num_blocks * self.backend.kv_layout(heads).block_bytes();
        let mut layers = Vec::new();
        for _ in 0..num_layers {
            let keys = self.backend.alloc_kv("keys", bytes)?;
            layers.push(KvLayer { keys, values: self.backend.alloc_kv("values", bytes)? });
        }
        for row in 0..case.num_rows {
            for start in (0..case.context).step_by(MAX_TOKENS) {
                let end = case.context.min(start + MAX_TOKENS);
                let mut inputs = StepInputs::default();
                inputs.clear();
                add_row(&mut inputs, case, row, start..end);
                let step = self.launch(&inputs)?;
                for kv in &layers {
                    self.rope_and_cache(kv, step)?;
                }
            }
        }
        Ok(layers)
    }

    /// Seconds that one layer takes, at best.
    fn measure(&mut self, case: Case, layers: &[KvLayer<B>]) -> Fallible<f64> {
        let mut inputs = StepInputs::default();
        inputs.clear();
        for row in 0..case.num_rows {
            add_row(&mut inputs, case, row, case.context - case.new..case.context);
        }
        let step = self.launch(&inputs)?;
        let (start, end) = (self.backend.create_event()?, self.backend.create_event()?);
        let mut best = Duration::MAX;
        for _ in 0..REPEATS {
            self.backend.record(&start, &self.stream)?;
            for kv in layers {
                self.attention(kv, step)?;
            }
            self.backend.record(&end, &self.stream)?;
            self.backend.synchronize(&end)?;
            best = best.min(self.backend.elapsed(&start, &end)?);
        }
        Ok(best.as_secs_f64() / layers.len() as f64)
    }

    /// Brings a step's inputs to the device.
    fn launch(&mut self, inputs: &StepInputs) -> Fallible<StepShape> {
        let step = self.backend.write_host(&mut self.host, |words| inputs.pack(words));
        let (backend, stream) = (&self.backend, &self.stream);
        backend.copy_to_device(&self.host, &self.packed, step.num_words(), stream)?;
        backend.unpack(&self.packed, &self.outputs, step, &self.batch, stream)?;
        let event = backend.create_event()?;
        backend.record(&event, stream)?;
        backend.synchronize(&event)?;
        Ok(step)
    }

    fn rope_and_cache(&self, kv: &KvLayer<B>, step: StepShape) -> Fallible<()> {
        let args = RopeAndCache {
            qkv: &self.qkv,
            rotary_table: &self.rotary_table,
            rotary_dim: self.attention.head_dim,
            interleaved: false,
            qk_norm: None,
            eps: 1e-5,
            attention: self.attention,
            kv,
            batch: &self.batch,
            step,
        };
        Ok(self.backend.rope_and_cache(args, &self.stream)?)
    }

    fn attention(&self, kv: &KvLayer<B>, step: StepShape) -> Fallible<()> {
        let args = Attention {
            qkv: &self.qkv,
            kv,
            out: &self.out,
            attention: self.attention,
            scale: (self.attention.head_dim as f32).sqrt().recip(),
            window: None,
            batch: &self.batch,
            step,
        };
        Ok(self.backend.attention(args, &self.stream)?)
    }
}

/// Adds row `row`'s tokens at `positions`. Blocks are dealt to rows in turn, as while decoding.
fn add_row(inputs: &mut StepInputs, case: Case, row: usize, positions: std::ops::Range<usize>) {
    let block = |position: usize| (position / BLOCK_SIZE * case.num_rows + row) as u32;
    for position in positions.clone() {
        inputs.token_ids.push(0);
        inputs.carry_over.push(-1);
        inputs.positions.push(position as u32);
        let slot = block(position) * BLOCK_SIZE as u32 + (position % BLOCK_SIZE) as u32;
        inputs.slot_mapping.push(slot);
    }
    inputs.row_starts.push(inputs.token_ids.len() as u32);
    inputs.context_lens.push(positions.end as u32);
    inputs.blocks.extend((0..positions.end).step_by(BLOCK_SIZE).map(block));
    inputs.block_starts.push(inputs.blocks.len() as u32);
    inputs.row_states.push(RowState { state_slot: None, prompt_len: 0, fresh: false });
}
