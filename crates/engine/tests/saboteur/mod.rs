//! The CPU backend with one of its waits removed, or one that is lost after a while.

#![allow(dead_code, unreachable_pub, reason = "each test uses some of it")]

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use inflight_backend::{
    Backend, BackendError, CpuBackend, DeviceBatch, GroupPlaces, HistoryShape, HostTensor,
    KvBlocks, KvDtype, KvLayer, MoveBlocks, MoveWay, StepShape, TurnBlocks,
    ops::{Attention, Embed, GateAndMul, Matmul, RmsNorm, RopeAndCache, Sample, SamplingState},
};

/// A wait of the two-slot protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The compute stream waits for `h2d_done` before a forward pass.
    ComputeForH2d,
    /// The compute stream waits for `late_ready` between a forward pass and sampling.
    ComputeForLate,
    /// The H2D stream waits for the previous batch's `compute_done` before blocks come back.
    H2dForCompute,
    /// The D2H stream waits for `compute_done`.
    D2hForCompute,
    /// The D2H stream waits for blocks that come back before it calls a batch done.
    D2hForSwapIn,
    /// The host waits for `d2h_done`.
    HostForD2h,
}

/// Does all that the CPU backend does, but for what was sabotaged.
#[derive(Clone)]
pub struct Saboteur {
    cpu: CpuBackend,
    removed: Option<Wait>,
    /// Waits enqueued until the device is lost.
    lost_after: usize,
    num_waits: Arc<AtomicUsize>,
    /// A forward pass was enqueued whose sampling was not.
    is_computing: Arc<AtomicBool>,
    /// Outputs were enqueued to be copied, and their batch was not called done.
    has_copied: Arc<AtomicBool>,
}

type Done = Result<(), BackendError>;
type Buffer = <CpuBackend as Backend>::Buffer;
type Host = <CpuBackend as Backend>::HostBuffer;
type Event = <CpuBackend as Backend>::Event;

/// A stream that knows its name.
pub struct Stream {
    name: &'static str,
    cpu: <CpuBackend as Backend>::Stream,
}

impl Saboteur {
    pub fn new(cpu: CpuBackend, removed: Option<Wait>) -> Self {
        Self {
            cpu,
            removed,
            lost_after: usize::MAX,
            num_waits: Arc::default(),
            is_computing: Arc::default(),
            has_copied: Arc::default(),
        }
    }

    pub fn lost_after(cpu: CpuBackend, num_waits: usize) -> Self {
        Self { lost_after: num_waits, ..Self::new(cpu, None) }
    }
}

fn batch(batch: &DeviceBatch<Saboteur>) -> DeviceBatch<CpuBackend> {
    let batch = batch.clone();
    DeviceBatch {
        token_ids: batch.token_ids,
        positions: batch.positions,
        slot_mapping: batch.slot_mapping,
        row_starts: batch.row_starts,
        context_lens: batch.context_lens,
        block_starts: batch.block_starts,
        row_states: batch.row_states,
        blocks: batch.blocks,
        sample_indices: batch.sample_indices,
        sampling: batch.sampling,
        bias_ids: batch.bias_ids,
        bias_values: batch.bias_values,
        more_groups: batch
            .more_groups
            .into_iter()
            .map(|group| GroupPlaces {
                slot_mapping: group.slot_mapping,
                context_lens: group.context_lens,
                block_starts: group.block_starts,
            })
            .collect(),
        prefixes: batch.prefixes,
        prefix_rows: batch.prefix_rows,
    }
}

fn kv(layer: &KvLayer<Saboteur>) -> KvLayer<CpuBackend> {
    KvLayer { keys: layer.keys.clone(), values: layer.values.clone() }
}

fn state(state: &SamplingState<Saboteur>) -> SamplingState<CpuBackend> {
    let token_counts = state.token_counts.clone();
    SamplingState { token_counts, vocab_size: state.vocab_size }
}

impl Backend for Saboteur {
    type Buffer = Buffer;
    type HostBuffer = Host;
    type Matrix = <CpuBackend as Backend>::Matrix;
    type Embedding = <CpuBackend as Backend>::Embedding;
    type Stream = Stream;
    type Event = Event;

    fn wait(&self, event: &Event, stream: &Stream) -> Done {
        let num_waits = self.num_waits.fetch_add(1, Ordering::Relaxed);
        if num_waits >= self.lost_after {
            return Err(BackendError::DeviceLost("sabotaged".to_owned()));
        }
        let wait = match (stream.name, self.is_computing.load(Ordering::Relaxed)) {
            ("h2d", _) => Wait::H2dForCompute,
            ("d2h", _) if self.has_copied.load(Ordering::Relaxed) => Wait::D2hForSwapIn,
            ("d2h", _) => Wait::D2hForCompute,
            (_, false) => Wait::ComputeForH2d,
            (_, true) => Wait::ComputeForLate,
        };
        match wait {
            Wait::ComputeForH2d => self.is_computing.store(true, Ordering::Relaxed),
            Wait::ComputeForLate => self.is_computing.store(false, Ordering::Relaxed),
            Wait::D2hForCompute => self.is_computing.store(false, Ordering::Relaxed),
            Wait::H2dForCompute | Wait::D2hForSwapIn | Wait::HostForD2h => {}
        }
        if self.removed == Some(wait) { Ok(()) } else { self.cpu.wait(event, &stream.cpu) }
    }

    fn synchronize(&self, event: &Event) -> Done {
        if self.removed == Some(Wait::HostForD2h) { Ok(()) } else { self.cpu.synchronize(event) }
    }

    fn description(&self) -> String {
        self.cpu.description()
    }

    fn kv_dtype(&self) -> KvDtype {
        self.cpu.kv_dtype()
    }

    fn alloc_activations(&self, label: &'static str, len: usize) -> Result<Buffer, BackendError> {
        self.cpu.alloc_activations(label, len)
    }

    fn alloc_words(&self, label: &'static str, len: usize) -> Result<Buffer, BackendError> {
        self.cpu.alloc_words(label, len)
    }

    fn alloc_kv(&self, label: &'static str, bytes: usize) -> Result<Buffer, BackendError> {
        self.cpu.alloc_kv(label, bytes)
    }

    fn alloc_host(&self, label: &'static str, len: usize) -> Result<Host, BackendError> {
        self.cpu.alloc_host(label, len)
    }

    fn load_matrix(&self, parts: &[HostTensor]) -> Result<Self::Matrix, BackendError> {
        self.cpu.load_matrix(parts)
    }

    fn load_embedding(&self, table: &HostTensor) -> Result<Self::Embedding, BackendError> {
        self.cpu.load_embedding(table)
    }

    fn load_vector(&self, parts: &[HostTensor]) -> Result<Buffer, BackendError> {
        self.cpu.load_vector(parts)
    }

    fn matrix_bytes(&self, matrix: &Self::Matrix) -> usize {
        self.cpu.matrix_bytes(matrix)
    }

    fn write_host<R>(&self, host: &mut Host, write: impl FnOnce(&mut [u32]) -> R) -> R {
        self.cpu.write_host(host, write)
    }

    fn read_host<R>(&self, host: &Host, read: impl FnOnce(&[u32]) -> R) -> R {
        self.cpu.read_host(host, read)
    }

    fn create_stream(&self, name: &'static str) -> Result<Stream, BackendError> {
        Ok(Stream { name, cpu: self.cpu.create_stream(name)? })
    }

    fn create_event(&self) -> Result<Event, BackendError> {
        self.cpu.create_event()
    }

    fn record(&self, event: &Event, stream: &Stream) -> Done {
        if stream.name == "compute" {
            self.has_copied.store(false, Ordering::Relaxed);
        }
        self.cpu.record(event, &stream.cpu)
    }

    fn elapsed(&self, earlier: &Event, later: &Event) -> Result<Duration, BackendError> {
        self.cpu.elapsed(earlier, later)
    }

    fn copy_to_device(&self, src: &Host, dst: &Buffer, words: usize, stream: &Stream) -> Done {
        self.cpu.copy_to_device(src, dst, words, &stream.cpu)
    }

    fn copy_to_host(&self, src: &Buffer, dst: &Host, words: usize, stream: &Stream) -> Done {
        self.has_copied.store(true, Ordering::Relaxed);
        self.cpu.copy_to_host(src, dst, words, &stream.cpu)
    }

    fn move_blocks(&self, args: MoveBlocks<'_, Self>, stream: &Stream) -> Done {
        let way = match args.way {
            MoveWay::WithinDevice => MoveWay::WithinDevice,
            MoveWay::ToHost(host) => MoveWay::ToHost(host),
            MoveWay::FromHost(host) => MoveWay::FromHost(host),
        };
        let args = MoveBlocks { kv: &KvBlocks::of(args.kv), pairs: args.pairs, way };
        self.cpu.move_blocks(args, &stream.cpu)
    }

    fn turn_blocks(&self, args: TurnBlocks<'_, Self>, stream: &Stream) -> Done {
        let TurnBlocks { attention, rotary_table, rotary_dim, interleaved, turns, .. } = args;
        let layers: Vec<_> = args.kv.iter().map(kv).collect();
        let kv = &layers;
        let args = TurnBlocks { kv, attention, rotary_table, rotary_dim, interleaved, turns };
        self.cpu.turn_blocks(args, &stream.cpu)
    }

    fn count_history(
        &self,
        words: &Buffer,
        shape: HistoryShape,
        counts: &SamplingState<Self>,
        stream: &Stream,
    ) -> Done {
        self.cpu.count_history(words, shape, &state(counts), &stream.cpu)
    }

    fn unpack(
        &self,
        packed: &Buffer,
        previous: &Buffer,
        shape: StepShape,
        into: &DeviceBatch<Self>,
        stream: &Stream,
    ) -> Done {
        self.cpu.unpack(packed, previous, shape, &batch(into), &stream.cpu)
    }

    fn track_tokens(
        &self,
        rows: &DeviceBatch<Self>,
        shape: StepShape,
        counts: &SamplingState<Self>,
        stream: &Stream,
    ) -> Done {
        self.cpu.track_tokens(&batch(rows), shape, &state(counts), &stream.cpu)
    }

    fn embed(&self, args: Embed<'_, Self>, stream: &Stream) -> Done {
        let Embed { table, out, scale, step, .. } = args;
        self.cpu.embed(Embed { table, out, scale, batch: &batch(args.batch), step }, &stream.cpu)
    }

    fn rms_norm(&self, args: RmsNorm<'_, Self>, stream: &Stream) -> Done {
        let RmsNorm { x, weight, out, num_rows, len, eps } = args;
        self.cpu.rms_norm(RmsNorm { x, weight, out, num_rows, len, eps }, &stream.cpu)
    }

    fn matmul(&self, args: Matmul<'_, Self>, stream: &Stream) -> Done {
        let Matmul { x, weight, bias, out, num_rows, accumulate } = args;
        self.cpu.matmul(Matmul { x, weight, bias, out, num_rows, accumulate }, &stream.cpu)
    }

    fn rope_and_cache(&self, args: RopeAndCache<'_, Self>, stream: &Stream) -> Done {
        let args = RopeAndCache {
            qkv: args.qkv,
            rotary_table: args.rotary_table,
            rotary_dim: args.rotary_dim,
            interleaved: args.interleaved,
            qk_norm: args.qk_norm,
            eps: args.eps,
            attention: args.attention,
            kv: &kv(args.kv),
            batch: &batch(args.batch),
            step: args.step,
        };
        self.cpu.rope_and_cache(args, &stream.cpu)
    }

    fn attention(&self, args: Attention<'_, Self>, stream: &Stream) -> Done {
        let args = Attention {
            qkv: args.qkv,
            kv: &kv(args.kv),
            out: args.out,
            attention: args.attention,
            scale: args.scale,
            window: args.window,
            batch: &batch(args.batch),
            step: args.step,
        };
        self.cpu.attention(args, &stream.cpu)
    }

    fn gate_and_mul(&self, args: GateAndMul<'_, Self>, stream: &Stream) -> Done {
        let GateAndMul { gate_up, out, num_rows, len, activation } = args;
        self.cpu.gate_and_mul(GateAndMul { gate_up, out, num_rows, len, activation }, &stream.cpu)
    }

    fn gather_sampled(
        &self,
        x: &Buffer,
        rows: &DeviceBatch<Self>,
        shape: StepShape,
        len: usize,
        out: &Buffer,
        stream: &Stream,
    ) -> Done {
        self.cpu.gather_sampled(x, &batch(rows), shape, len, out, &stream.cpu)
    }

    fn sample(&self, args: Sample<'_, Self>, stream: &Stream) -> Done {
        let args = Sample {
            logits: args.logits,
            state: &state(args.state),
            batch: &batch(args.batch),
            step: args.step,
            is_unusual: args.is_unusual,
            late: args.late,
            outputs: args.outputs,
            max_rows: args.max_rows,
        };
        self.cpu.sample(args, &stream.cpu)
    }
}
