//! The CPU's [`Backend`]: every operator leases its buffers on the stream's thread and calls a
//! kernel on plain slices.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use half::{bf16, f16};

use super::{
    attention_ops::{AttentionOperands, CutOperands, RopeOperands, TurnOperands},
    block_checks::CheckOperands,
    block_moves::MoveOperands,
    buffer::CpuBuffer,
    event::CpuEvent,
    kernels::{self, Cores, Fp8, Int4, Int8},
    matmul::{self, MatmulArgs, MatmulScratch, PackedMatrix, WeightMemory, WeightPrecision},
    pool::ThreadPool,
    simd::SimdLevel,
    stream::{CpuStream, Fault},
};
use crate::{
    Backend, BackendError, Ceilings, CheckBlocks, CutPrompts, DeviceBatch, Dtype, GroupPlaces,
    HistoryShape, HostTensor, KvDtype, MoveBlocks, OutputLayout, StepShape, TurnBlocks,
    ops::{Attention, Embed, GateAndMul, Matmul, RmsNorm, RopeAndCache, Sample, SamplingState},
    sync::Arc,
};

/// How the CPU backend computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuConfig {
    /// Threads that compute, the compute stream's own among them.
    pub num_threads: usize,
    /// Element type of the KV cache.
    pub kv_dtype: KvDtype,
    /// Whether weights keep their stored type or become f32.
    pub weights: WeightPrecision,
    /// Most capable instructions to use.
    pub simd: SimdLevel,
}

/// The CPU as a device. Cloning gives another handle to the same device.
#[derive(Clone)]
pub struct CpuBackend {
    device: Arc<Device>,
}

struct Device {
    config: CpuConfig,
    pool: ThreadPool,
    /// Only the compute stream takes it, so the lock is never contended.
    matmul_scratch: Mutex<MatmulScratch>,
    weights: WeightMemory,
    fault: Fault,
}

/// Host memory for copies.
pub struct CpuHostBuffer(pub(super) CpuBuffer);

impl CpuBackend {
    /// A CPU device.
    ///
    /// # Errors
    /// If the processor lacks `simd`, or threads cannot be made.
    pub fn new(config: CpuConfig) -> Result<Self, BackendError> {
        if !config.simd.is_available() {
            let message = format!("this processor lacks {:?} instructions", config.simd);
            return Err(BackendError::Unsupported(message));
        }
        let pool = ThreadPool::new(config.num_threads)?;
        let matmul_scratch = Mutex::new(MatmulScratch::with_level(config.simd));
        let (weights, fault) = (WeightMemory::default(), Fault::default());
        let device = Device { config, pool, matmul_scratch, weights, fault };
        Ok(Self { device: Arc::new(device) })
    }

    /// Enqueues an operator.
    fn enqueue(
        &self,
        stream: &CpuStream,
        operator: impl FnOnce(&Device) + Send + 'static,
    ) -> Result<(), BackendError> {
        let device = Arc::clone(&self.device);
        stream.run(move || operator(&device));
        Ok(())
    }

    fn norm(
        &self,
        args: &RmsNorm<'_, Self>,
        accumulate: bool,
        stream: &CpuStream,
    ) -> Result<(), BackendError> {
        let RmsNorm { num_rows, len, eps, .. } = *args;
        let (x, weight, out) = (args.x.clone(), args.weight.clone(), args.out.clone());
        self.enqueue(stream, move |device| {
            let (x, weight, out) = (&x.read(), &weight.read(), &mut out.write());
            let args = kernels::RmsNorm { x, weight, out, num_rows, len, eps, accumulate };
            kernels::rms_norm(device.cores(), args);
        })
    }
}

impl CpuConfig {
    /// All of this machine's cores, weights as stored and a KV cache in f16.
    pub fn detect() -> Self {
        let num_threads = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            num_threads,
            kv_dtype: KvDtype::F16,
            weights: WeightPrecision::Native,
            simd: SimdLevel::detect(),
        }
    }
}

impl Device {
    fn cores(&self) -> Cores<'_> {
        Cores { pool: &self.pool, simd: self.config.simd }
    }
}

/// Runs `operands` for the KV cache's element type.
macro_rules! with_kv_type {
    ($device:expr, $operands:ident.run()) => {
        match $device.config.kv_dtype {
            KvDtype::F32 => $operands.run::<f32>($device.cores()),
            KvDtype::F16 => $operands.run::<f16>($device.cores()),
            KvDtype::Bf16 => $operands.run::<bf16>($device.cores()),
            KvDtype::Fp8 => $operands.run::<Fp8>($device.cores()),
            KvDtype::Int8 => $operands.run::<Int8>($device.cores()),
            KvDtype::Int4 => $operands.run::<Int4>($device.cores()),
        }
    };
}

impl Backend for CpuBackend {
    type Buffer = CpuBuffer;
    type HostBuffer = CpuHostBuffer;
    type Matrix = Arc<PackedMatrix>;
    type Embedding = Arc<HostTensor>;
    type Stream = CpuStream;
    type Event = CpuEvent;

    fn description(&self) -> String {
        let CpuConfig { num_threads, simd, .. } = &self.device.config;
        format!("CPU, {num_threads} threads, {simd:?}")
    }

    fn kv_dtype(&self) -> KvDtype {
        self.device.config.kv_dtype
    }

    fn alloc_activations(&self, label: &'static str, len: usize) -> Allocated {
        CpuBuffer::zeroed(label, len * size_of::<f32>())
    }

    fn alloc_words(&self, label: &'static str, len: usize) -> Allocated {
        CpuBuffer::zeroed(label, len * size_of::<u32>())
    }

    fn alloc_kv(&self, label: &'static str, bytes: usize) -> Allocated {
        CpuBuffer::zeroed(label, bytes)
    }

    fn alloc_host(&self, label: &'static str, len: usize) -> Result<CpuHostBuffer, BackendError> {
        CpuBuffer::zeroed(label, len * size_of::<u32>()).map(CpuHostBuffer)
    }

    fn load_matrix(&self, parts: &[HostTensor]) -> Result<Self::Matrix, BackendError> {
        let Device { pool, config, weights, .. } = &*self.device;
        PackedMatrix::pack(weights, pool, parts, config.weights, config.simd).map(Arc::new)
    }

    fn load_embedding(&self, table: &HostTensor) -> Result<Self::Embedding, BackendError> {
        if table.shape.len() != 2 {
            return Err(table.error("an embedding has two dimensions"));
        }
        Ok(Arc::new(table.clone()))
    }

    fn load_vector(&self, parts: &[HostTensor]) -> Allocated {
        let values: Vec<f32> = parts.iter().flat_map(HostTensor::to_f32).collect();
        let buffer = self.alloc_activations("vector", values.len())?;
        buffer.write::<f32>()[..values.len()].copy_from_slice(&values);
        Ok(buffer)
    }

    fn matrix_bytes(&self, matrix: &Self::Matrix) -> usize {
        matrix.bytes()
    }

    fn write_host<R>(&self, host: &mut CpuHostBuffer, write: impl FnOnce(&mut [u32]) -> R) -> R {
        write(&mut host.0.write::<u32>())
    }

    fn read_host<R>(&self, host: &CpuHostBuffer, read: impl FnOnce(&[u32]) -> R) -> R {
        read(&host.0.read::<u32>())
    }

    fn read_host_part(
        &self,
        CpuHostBuffer(host): &CpuHostBuffer,
        start: usize,
        words: &mut [u32],
    ) -> Result<(), BackendError> {
        let _turn = host.take_turns();
        words.copy_from_slice(&host.read::<u32>()[start..start + words.len()]);
        Ok(())
    }

    fn write_host_part(
        &self,
        CpuHostBuffer(host): &CpuHostBuffer,
        start: usize,
        words: &[u32],
    ) -> Result<(), BackendError> {
        let _turn = host.take_turns();
        host.write::<u32>()[start..start + words.len()].copy_from_slice(words);
        Ok(())
    }

    fn create_stream(&self, name: &'static str) -> Result<CpuStream, BackendError> {
        CpuStream::spawn(name, self.device.fault.clone())
    }

    fn create_event(&self) -> Result<CpuEvent, BackendError> {
        Ok(CpuEvent::default())
    }

    fn record(&self, event: &CpuEvent, stream: &CpuStream) -> Result<(), BackendError> {
        stream.record(event);
        Ok(())
    }

    fn wait(&self, event: &CpuEvent, stream: &CpuStream) -> Result<(), BackendError> {
        stream.wait(event);
        Ok(())
    }

    fn synchronize(&self, event: &CpuEvent) -> Result<(), BackendError> {
        event.block_until(event.latest());
        self.device.fault.check()
    }

    fn elapsed(&self, earlier: &CpuEvent, later: &CpuEvent) -> Result<Duration, BackendError> {
        Ok(earlier.elapsed_to(later))
    }

    fn copy_to_device(
        &self,
        src: &CpuHostBuffer,
        dst: &CpuBuffer,
        num_words: usize,
        stream: &CpuStream,
    ) -> Result<(), BackendError> {
        self.copy(&src.0, dst, num_words, stream)
    }

    fn copy_to_host(
        &self,
        src: &CpuBuffer,
        dst: &CpuHostBuffer,
        num_words: usize,
        stream: &CpuStream,
    ) -> Result<(), BackendError> {
        self.copy(src, &dst.0, num_words, stream)
    }

    fn unpack(
        &self,
        packed: &CpuBuffer,
        previous: &CpuBuffer,
        shape: StepShape,
        batch: &DeviceBatch<Self>,
        stream: &CpuStream,
    ) -> Result<(), BackendError> {
        let (packed, previous, batch) = (packed.clone(), previous.clone(), batch.clone());
        self.enqueue(stream, move |_| {
            let groups = batch.more_groups.iter();
            let mut groups: Vec<_> = groups
                .map(|group| {
                    let GroupPlaces { slot_mapping, context_lens, block_starts } = group;
                    (slot_mapping.write(), context_lens.write(), block_starts.write())
                })
                .collect();
            let groups = groups.iter_mut().map(|(slots, lens, starts)| kernels::GroupMut {
                slot_mapping: slots,
                context_lens: lens,
                block_starts: starts,
            });
            let batch = kernels::BatchMut {
                token_ids: &mut batch.token_ids.write(),
                positions: &mut batch.positions.write(),
                slot_mapping: &mut batch.slot_mapping.write(),
                row_starts: &mut batch.row_starts.write(),
                context_lens: &mut batch.context_lens.write(),
                block_starts: &mut batch.block_starts.write(),
                row_states: &mut batch.row_states.write(),
                blocks: &mut batch.blocks.write(),
                sample_indices: &mut batch.sample_indices.write(),
                sampling: &mut batch.sampling.write(),
                bias_ids: &mut batch.bias_ids.write(),
                bias_values: &mut batch.bias_values.write(),
                more_groups: groups.collect(),
            };
            kernels::unpack(&packed.read(), &previous.read(), shape, batch);
        })
    }

    fn track_tokens(
        &self,
        batch: &DeviceBatch<Self>,
        shape: StepShape,
        state: &SamplingState<Self>,
        stream: &CpuStream,
    ) -> Result<(), BackendError> {
        let (batch, state) = (batch.clone(), state.clone());
        self.enqueue(stream, move |_| {
            kernels::track_tokens(kernels::TrackTokens {
                token_ids: &batch.token_ids.read(),
                positions: &batch.positions.read(),
                row_starts: &batch.row_starts.read(),
                row_states: &batch.row_states.read(),
                token_counts: &mut state.token_counts.write(),
                num_rows: shape.num_rows,
                vocab_size: state.vocab_size,
            });
        })
    }

    fn move_blocks(
        &self,
        args: MoveBlocks<'_, Self>,
        stream: &CpuStream,
    ) -> Result<(), BackendError> {
        let operands = MoveOperands::new(&args);
        self.enqueue(stream, move |_| operands.run())
    }

    fn turn_blocks(
        &self,
        args: TurnBlocks<'_, Self>,
        stream: &CpuStream,
    ) -> Result<(), BackendError> {
        let operands = TurnOperands::new(&args);
        self.enqueue(stream, move |device| {
            with_kv_type!(device, operands.run());
        })
    }

    fn cut_prompts(
        &self,
        args: CutPrompts<'_, Self>,
        stream: &CpuStream,
    ) -> Result<(), BackendError> {
        let operands = CutOperands::new(&args);
        self.enqueue(stream, move |device| {
            with_kv_type!(device, operands.run());
        })
    }

    fn cuts_prompts(&self) -> bool {
        true
    }

    fn check_blocks(
        &self,
        args: CheckBlocks<'_, Self>,
        stream: &CpuStream,
    ) -> Result<(), BackendError> {
        let operands = CheckOperands::new(&args);
        self.enqueue(stream, move |_| operands.run())
    }

    fn checks_blocks(&self) -> bool {
        true
    }

    fn count_history(
        &self,
        words: &CpuBuffer,
        shape: HistoryShape,
        state: &SamplingState<Self>,
        stream: &CpuStream,
    ) -> Result<(), BackendError> {
        let (words, state, at) = (words.clone(), state.clone(), shape.layout());
        self.enqueue(stream, move |_| {
            let words = words.read();
            kernels::track_tokens(kernels::TrackTokens {
                token_ids: &words[at.token_ids],
                positions: &words[at.positions],
                row_starts: &words[at.row_starts],
                row_states: &words[at.row_states],
                token_counts: &mut state.token_counts.write(),
                num_rows: shape.num_rows,
                vocab_size: state.vocab_size,
            });
        })
    }

    fn embed(&self, args: Embed<'_, Self>, stream: &CpuStream) -> Result<(), BackendError> {
        let (table, tokens) = (Arc::clone(args.table), args.batch.token_ids.clone());
        let (out, num_tokens, scale) = (args.out.clone(), args.step.num_tokens, args.scale);
        self.enqueue(stream, move |device| {
            let tokens = &tokens.read()[..num_tokens];
            kernels::embed(device.cores(), (&table, scale), tokens, &mut out.write());
        })
    }

    fn rms_norm(&self, args: RmsNorm<'_, Self>, stream: &CpuStream) -> Result<(), BackendError> {
        self.norm(&args, false, stream)
    }

    fn add_rms_norm(
        &self,
        args: RmsNorm<'_, Self>,
        stream: &CpuStream,
    ) -> Result<(), BackendError> {
        self.norm(&args, true, stream)
    }

    fn matmul(&self, args: Matmul<'_, Self>, stream: &CpuStream) -> Result<(), BackendError> {
        let Matmul { num_rows, accumulate, .. } = args;
        let (x, weight, out) = (args.x.clone(), Arc::clone(args.weight), args.out.clone());
        let bias = args.bias.cloned();
        self.enqueue(stream, move |device| {
            let bias = bias.as_ref().map(CpuBuffer::read);
            let args = MatmulArgs {
                x: &x.read(),
                weight: &weight,
                bias: bias.as_deref(),
                out: &mut out.write(),
                num_rows,
                accumulate,
            };
            let scratch = device.matmul_scratch.lock();
            let mut scratch = scratch.unwrap_or_else(PoisonError::into_inner);
            matmul::matmul(&device.pool, args, &mut scratch);
        })
    }

    fn ceilings(&self, weights: Dtype) -> Result<Ceilings, BackendError> {
        kernels::measure_ceilings(self.device.cores(), weights)
    }

    fn rope_and_cache(
        &self,
        args: RopeAndCache<'_, Self>,
        stream: &CpuStream,
    ) -> Result<(), BackendError> {
        let operands = RopeOperands::new(&args);
        self.enqueue(stream, move |device| {
            with_kv_type!(device, operands.run());
        })
    }

    fn attention(&self, args: Attention<'_, Self>, stream: &CpuStream) -> Result<(), BackendError> {
        let operands = AttentionOperands::new(&args);
        self.enqueue(stream, move |device| {
            with_kv_type!(device, operands.run());
        })
    }

    fn gate_and_mul(
        &self,
        args: GateAndMul<'_, Self>,
        stream: &CpuStream,
    ) -> Result<(), BackendError> {
        let GateAndMul { num_rows, len, activation, .. } = args;
        let (gate_up, out) = (args.gate_up.clone(), args.out.clone());
        self.enqueue(stream, move |device| {
            let (gate_up, out) = (&gate_up.read(), &mut out.write());
            let args = kernels::GateAndMul { gate_up, out, num_rows, len, activation };
            kernels::gate_and_mul(device.cores(), args);
        })
    }

    fn gather_sampled(
        &self,
        x: &CpuBuffer,
        batch: &DeviceBatch<Self>,
        shape: StepShape,
        len: usize,
        out: &CpuBuffer,
        stream: &CpuStream,
    ) -> Result<(), BackendError> {
        let (x, indices, out) = (x.clone(), batch.sample_indices.clone(), out.clone());
        self.enqueue(stream, move |device| {
            let sample_indices = &indices.read()[..shape.num_sampled];
            let (x, out) = (&x.read(), &mut out.write());
            let args = kernels::GatherSampled { x, sample_indices, out, len };
            kernels::gather_sampled(device.cores(), args);
        })
    }

    fn sample(&self, args: Sample<'_, Self>, stream: &CpuStream) -> Result<(), BackendError> {
        let (logits, outputs) = (args.logits.clone(), args.outputs.clone());
        let (state, batch, late) = (args.state.clone(), args.batch.clone(), args.late.clone());
        let (num_sampled, max_rows) = (args.step.num_sampled, args.max_rows);
        self.enqueue(stream, move |device| {
            let args = kernels::Sample {
                logits: &logits.read(),
                token_counts: &state.token_counts.read(),
                sampling: &batch.sampling.read(),
                bias_ids: &batch.bias_ids.read(),
                bias_values: &batch.bias_values.read(),
                late: &late.read(),
                outputs: &mut outputs.write(),
                layout: OutputLayout { max_rows },
                num_sampled,
                vocab_size: state.vocab_size,
            };
            kernels::sample(device.cores(), args);
        })
    }
}

type Allocated = Result<CpuBuffer, BackendError>;

impl CpuBackend {
    fn copy(
        &self,
        src: &CpuBuffer,
        dst: &CpuBuffer,
        num_words: usize,
        stream: &CpuStream,
    ) -> Result<(), BackendError> {
        let (src, dst) = (src.clone(), dst.clone());
        self.enqueue(stream, move |_| {
            dst.write::<u32>()[..num_words].copy_from_slice(&src.read::<u32>()[..num_words]);
        })
    }
}
