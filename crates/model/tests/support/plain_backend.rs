//! A backend that computes at once, in plain loops: slow, and easy to check by reading.
//!
//! It shares no code with the CPU backend's operators: a model whose logits are right on both is
//! described rightly, and one whose logits are right on this one only points at the operators.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use inflight_backend::{
    AttentionShape, Backend, BackendError, DeviceBatch, HostTensor, KvDtype, KvLayer, StepShape,
    ops::{
        Activation, Attention, Embed, GateAndMul, Matmul, RmsNorm, RopeAndCache, Sample,
        SamplingState,
    },
};

type Done = Result<(), BackendError>;

#[derive(Clone)]
pub struct PlainBackend;

/// Words, or the bits of f32 values.
#[derive(Clone)]
pub struct Memory(Arc<Mutex<Vec<u32>>>);

impl Memory {
    fn new(words: Vec<u32>) -> Self {
        Self(Arc::new(Mutex::new(words)))
    }

    fn words(&self) -> Vec<u32> {
        self.0.lock().unwrap().clone()
    }

    fn floats(&self) -> Vec<f32> {
        self.0.lock().unwrap().iter().map(|word| f32::from_bits(*word)).collect()
    }

    fn set_words(&self, start: usize, words: &[u32]) {
        self.0.lock().unwrap()[start..start + words.len()].copy_from_slice(words);
    }

    fn set(&self, start: usize, values: &[f32]) {
        let words: Vec<u32> = values.iter().map(|value| value.to_bits()).collect();
        self.set_words(start, &words);
    }
}

pub struct Table {
    rows: usize,
    cols: usize,
    values: Vec<f32>,
}

impl Backend for PlainBackend {
    type Buffer = Memory;
    type HostBuffer = Memory;
    type Matrix = Table;
    type Embedding = Table;
    type Stream = ();
    type Event = ();

    fn description(&self) -> String {
        "plain loops".into()
    }

    fn kv_dtype(&self) -> KvDtype {
        KvDtype::F32
    }

    fn alloc_activations(&self, label: &'static str, len: usize) -> Result<Memory, BackendError> {
        self.alloc_words(label, len)
    }

    fn alloc_words(&self, _: &'static str, len: usize) -> Result<Memory, BackendError> {
        Ok(Memory::new(vec![0; len]))
    }

    fn alloc_kv(&self, label: &'static str, bytes: usize) -> Result<Memory, BackendError> {
        self.alloc_words(label, bytes / 4)
    }

    fn alloc_host(&self, label: &'static str, len: usize) -> Result<Memory, BackendError> {
        self.alloc_words(label, len)
    }

    fn load_matrix(&self, parts: &[HostTensor]) -> Result<Table, BackendError> {
        Ok(Table {
            rows: parts.iter().map(HostTensor::num_rows).sum(),
            cols: parts[0].row_len(),
            values: parts.iter().flat_map(HostTensor::to_f32).collect(),
        })
    }

    fn load_embedding(&self, table: &HostTensor) -> Result<Table, BackendError> {
        self.load_matrix(std::slice::from_ref(table))
    }

    fn load_vector(&self, parts: &[HostTensor]) -> Result<Memory, BackendError> {
        let values = parts.iter().flat_map(HostTensor::to_f32);
        Ok(Memory::new(values.map(f32::to_bits).collect()))
    }

    fn matrix_bytes(&self, matrix: &Table) -> usize {
        4 * matrix.values.len()
    }

    fn write_host<R>(&self, buffer: &mut Memory, write: impl FnOnce(&mut [u32]) -> R) -> R {
        write(&mut buffer.0.lock().unwrap())
    }

    fn read_host<R>(&self, buffer: &Memory, read: impl FnOnce(&[u32]) -> R) -> R {
        read(&buffer.0.lock().unwrap())
    }

    fn create_stream(&self, _: &'static str) -> Done {
        Ok(())
    }

    fn create_event(&self) -> Done {
        Ok(())
    }

    fn record(&self, (): &(), (): &()) -> Done {
        Ok(())
    }

    fn wait(&self, (): &(), (): &()) -> Done {
        Ok(())
    }

    fn synchronize(&self, (): &()) -> Done {
        Ok(())
    }

    fn elapsed(&self, (): &(), (): &()) -> Result<Duration, BackendError> {
        Ok(Duration::ZERO)
    }

    fn copy_to_device(&self, src: &Memory, dst: &Memory, num_words: usize, (): &()) -> Done {
        dst.set_words(0, &src.words()[..num_words]);
        Ok(())
    }

    fn copy_to_host(&self, src: &Memory, dst: &Memory, num_words: usize, (): &()) -> Done {
        dst.set_words(0, &src.words()[..num_words]);
        Ok(())
    }

    fn unpack(
        &self,
        packed: &Memory,
        previous: &Memory,
        shape: StepShape,
        batch: &DeviceBatch<Self>,
        (): &(),
    ) -> Done {
        let (words, at) = (packed.words(), shape.layout());
        batch.token_ids.set_words(0, &words[at.token_ids]);
        for (token, row) in words[at.carry_over].iter().enumerate() {
            if let Ok(row) = usize::try_from(row.cast_signed()) {
                batch.token_ids.set_words(token, &previous.words()[row..=row]);
            }
        }
        batch.positions.set_words(0, &words[at.positions]);
        batch.slot_mapping.set_words(0, &words[at.slot_mapping]);
        batch.row_starts.set_words(0, &words[at.row_starts]);
        batch.context_lens.set_words(0, &words[at.context_lens]);
        batch.block_starts.set_words(0, &words[at.block_starts]);
        batch.blocks.set_words(0, &words[at.blocks]);
        batch.sample_indices.set_words(0, &words[at.sample_indices]);
        for (group, at) in batch.more_groups.iter().zip(at.more_groups) {
            group.slot_mapping.set_words(0, &words[at.slot_mapping]);
            group.context_lens.set_words(0, &words[at.context_lens]);
            group.block_starts.set_words(0, &words[at.block_starts]);
        }
        Ok(())
    }

    fn track_tokens(
        &self,
        _: &DeviceBatch<Self>,
        _: StepShape,
        _: &SamplingState<Self>,
        (): &(),
    ) -> Done {
        Err(BackendError::Unsupported("it computes logits only".into()))
    }

    fn embed(&self, args: Embed<'_, Self>, (): &()) -> Done {
        let Table { cols, values, .. } = args.table;
        for (t, id) in args.batch.token_ids.words()[..args.step.num_tokens].iter().enumerate() {
            let row = &values[*id as usize * cols..][..*cols];
            let scaled: Vec<f32> = row.iter().map(|x| x * args.scale).collect();
            args.out.set(t * cols, &scaled);
        }
        Ok(())
    }

    fn rms_norm(&self, args: RmsNorm<'_, Self>, (): &()) -> Done {
        let (x, weight) = (args.x.floats(), args.weight.floats());
        for row in 0..args.num_rows {
            let x = &x[row * args.len..][..args.len];
            args.out.set(row * args.len, &normed(x, &weight, args.eps));
        }
        Ok(())
    }

    fn add_rms_norm(&self, args: RmsNorm<'_, Self>, (): &()) -> Done {
        let (x, weight, out) = (args.x.floats(), args.weight.floats(), args.out.floats());
        for start in (0..args.num_rows).map(|row| row * args.len) {
            let normed = normed(&x[start..start + args.len], &weight, args.eps);
            let sums = normed.iter().zip(&out[start..]).map(|(normed, out)| normed + out);
            args.out.set(start, &sums.collect::<Vec<_>>());
        }
        Ok(())
    }

    fn matmul(&self, args: Matmul<'_, Self>, (): &()) -> Done {
        let Table { rows, cols, values } = args.weight;
        let (x, mut out) = (args.x.floats(), args.out.floats());
        let bias = args.bias.map_or(vec![0.0; *rows], Memory::floats);
        for (x, out) in x.chunks(*cols).zip(out.chunks_mut(*rows)).take(args.num_rows) {
            for ((out, weight), bias) in out.iter_mut().zip(values.chunks(*cols)).zip(&bias) {
                *out = dot(x, weight) + bias + if args.accumulate { *out } else { 0.0 };
            }
        }
        args.out.set(0, &out);
        Ok(())
    }

    fn rope_and_cache(&self, args: RopeAndCache<'_, Self>, (): &()) -> Done {
        let shape = args.attention;
        let (mut qkv, table) = (args.qkv.floats(), args.rotary_table.floats());
        let positions = args.batch.positions.words();
        let slots = args.batch.slot_mapping.words();
        let tokens = qkv.chunks_mut(shape.qkv_len()).take(args.step.num_tokens);
        for (t, token) in tokens.enumerate() {
            let row = &table[positions[t] as usize * args.rotary_dim..][..args.rotary_dim];
            for (h, head) in token.chunks_mut(shape.head_dim).enumerate() {
                if h >= shape.num_heads + shape.num_kv_heads {
                    break;
                }
                if let Some((query, key)) = args.qk_norm {
                    let weight = if h < shape.num_heads { query } else { key };
                    head.copy_from_slice(&normed(head, &weight.floats(), args.eps));
                }
                rotate(head, row, args.interleaved);
            }
            let heads: Vec<&[f32]> = token.chunks(shape.head_dim).skip(shape.num_heads).collect();
            for kv_head in 0..shape.num_kv_heads {
                let place = kv_place(shape, slots[t] as usize, kv_head);
                args.kv.keys.set(place, heads[kv_head]);
                args.kv.values.set(place, heads[shape.num_kv_heads + kv_head]);
            }
        }
        args.qkv.set(0, &qkv);
        Ok(())
    }

    fn attention(&self, args: Attention<'_, Self>, (): &()) -> Done {
        let shape = args.attention;
        let (qkv, positions) = (args.qkv.floats(), args.batch.positions.words());
        let row_starts = args.batch.row_starts.words();
        for row in 0..args.step.num_rows {
            for t in row_starts[row] as usize..row_starts[row + 1] as usize {
                let end = positions[t] as usize + 1;
                let start = args.window.map_or(0, |window| end.saturating_sub(window));
                let slots = slots_of(args.batch, shape, row, start..end);
                for head in 0..shape.num_heads {
                    let query = &qkv[t * shape.qkv_len() + head * shape.head_dim..];
                    let query = &query[..shape.head_dim];
                    let kv_head = head * shape.num_kv_heads / shape.num_heads;
                    let places = slots.iter().map(|slot| kv_place(shape, *slot, kv_head));
                    let attended = attend(query, args.kv, places.collect(), args.scale);
                    args.out.set(t * shape.q_len() + head * shape.head_dim, &attended);
                }
            }
        }
        Ok(())
    }

    fn gate_and_mul(&self, args: GateAndMul<'_, Self>, (): &()) -> Done {
        let GateAndMul { len, activation, .. } = args;
        let activate = |x: f32| match activation {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::GeluTanh => {
                let y = (2.0 / std::f32::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
                0.5 * x * (1.0 + y.tanh())
            }
        };
        let gate_up = args.gate_up.floats();
        for (row, both) in gate_up.chunks(2 * len).take(args.num_rows).enumerate() {
            let (gate, up) = both.split_at(len);
            let product = gate.iter().zip(up).map(|(gate, up)| activate(*gate) * up);
            args.out.set(row * len, &product.collect::<Vec<_>>());
        }
        Ok(())
    }

    fn gather_sampled(
        &self,
        x: &Memory,
        batch: &DeviceBatch<Self>,
        shape: StepShape,
        len: usize,
        out: &Memory,
        (): &(),
    ) -> Done {
        let (x, indices) = (x.floats(), batch.sample_indices.words());
        for (row, index) in indices[..shape.num_sampled].iter().enumerate() {
            out.set(row * len, &x[*index as usize * len..][..len]);
        }
        Ok(())
    }

    fn sample(&self, _: Sample<'_, Self>, (): &()) -> Done {
        Err(BackendError::Unsupported("it computes logits only".into()))
    }
}

/// In double precision, so that the order of summation does not matter.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() as f32
}

fn normed(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mean = dot(x, x) / x.len() as f32;
    let scale = 1.0 / (mean + eps).sqrt();
    x.iter().zip(weight).map(|(x, weight)| x * scale * weight).collect()
}

fn rotate(head: &mut [f32], row: &[f32], interleaved: bool) {
    let half = row.len() / 2;
    let (cosines, sines) = row.split_at(half);
    for i in 0..half {
        let (a, b) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
        let (x, y) = (head[a], head[b]);
        head[a] = x * cosines[i] - y * sines[i];
        head[b] = x * sines[i] + y * cosines[i];
    }
}

/// Where a head of a slot lies in `[num_blocks, num_kv_heads, block_size, head_dim]`.
fn kv_place(shape: AttentionShape, slot: usize, kv_head: usize) -> usize {
    let (block, offset) = (slot / shape.block_size, slot % shape.block_size);
    ((block * shape.num_kv_heads + kv_head) * shape.block_size + offset) * shape.head_dim
}

/// Slots of a row's tokens at `positions`, by its block table.
fn slots_of(
    batch: &DeviceBatch<PlainBackend>,
    shape: AttentionShape,
    row: usize,
    positions: std::ops::Range<usize>,
) -> Vec<usize> {
    let (blocks, starts) = (batch.blocks.words(), batch.block_starts.words());
    let block_of = |position| blocks[starts[row] as usize + position / shape.block_size] as usize;
    let slot = |position| block_of(position) * shape.block_size + position % shape.block_size;
    positions.map(slot).collect()
}

fn attend(query: &[f32], kv: &KvLayer<PlainBackend>, places: Vec<usize>, scale: f32) -> Vec<f32> {
    let (keys, values) = (kv.keys.floats(), kv.values.floats());
    let score = |place: &usize| dot(query, &keys[*place..*place + query.len()]) * scale;
    let scores: Vec<f32> = places.iter().map(score).collect();
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f32> = scores.iter().map(|score| (score - max).exp()).collect();
    let sum: f32 = weights.iter().sum();
    let column = |i: usize| {
        let parts = places.iter().zip(&weights).map(|(place, weight)| weight * values[place + i]);
        parts.sum::<f32>() / sum
    };
    (0..query.len()).map(column).collect()
}
