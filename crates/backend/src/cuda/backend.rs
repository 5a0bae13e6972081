//! A GPU's [`Backend`]: checks arguments against buffers and enqueues.

use std::{
    path::PathBuf,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use cudarc::driver::sys;

use super::{
    ceilings,
    check::check,
    device::{Device, DeviceInfo},
    event::CudaEvent,
    fixed_gemm::FixedGemm,
    gemm::{Bias, Gemm, MethodStore, Next, Norm, Product, Tuned, TunedProduct},
    graph::{self, CapturedGraph},
    loaded::KernelLoader,
    memory::{CudaBuffer, CudaHostBuffer, Element},
    memory_plan::MemoryPlan,
    numerics::Numerics,
    operators::{self, Gather, Operators},
    probe::{CudaProbe, check_capability, probe, version},
    rehearsal,
    stream::CudaStream,
    weights::{CudaEmbedding, CudaMatrix, Weights},
};
use crate::{
    Activation, AttentionShape, Backend, BackendError, Ceilings, CutPrompts, DeviceBatch, Dtype,
    Graph, HistoryShape, HostTensor, KvDtype, MoveBlocks, PrefixRule, StepCapacity, StepShape,
    TurnBlocks,
    ops::{
        Attention, Embed, GateAndMul, GatedMatmul, Matmul, RmsNorm, RopeAndCache, Sample,
        SamplingState,
    },
};

/// How the CUDA backend is set up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaConfig {
    /// Which GPU, as the driver counts.
    pub ordinal: usize,
    /// Where to look for NVRTC and cuBLASLt besides the loader's path; see
    /// [`usual_library_folders`](super::usual_library_folders).
    pub library_folders: Vec<PathBuf>,
    /// Folder that keeps compiled kernels and the fastest matrix products between runs; `None`:
    /// kernels are kept in the user's cache folder, matrix products are timed anew.
    pub cache: Option<PathBuf>,
    /// Whether the fastest matrix products are added to the cache. Not where the device has other
    /// work while they are timed.
    pub keeps_fastest: bool,
    /// Whether decode steps are replayed as graphs. Without, launching costs the host more.
    pub graphs: bool,
    /// Whether the host sleeps while it waits for the device. Spinning wakes some microseconds
    /// earlier and keeps a core busy.
    pub blocking_waits: bool,
    /// How it computes where there is a choice.
    pub numerics: Numerics,
}

/// An NVIDIA GPU as a device. Cloning gives another handle to the same device.
#[derive(Clone)]
pub struct CudaBackend {
    shared: Arc<Shared>,
}

struct Shared {
    config: CudaConfig,
    found: CudaProbe,
    device: Arc<Device>,
    gemm: Gemm,
    /// Computes all products where they must not depend on the number of rows.
    fixed_gemm: Option<FixedGemm>,
    operators: Operators,
    /// Idle but for the anchors of long measurements of time.
    clock: CudaStream,
    weights: Weights,
}

impl CudaBackend {
    /// Opens the GPU that `config` names and compiles the kernels that all models need.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] with one line that says what is missing.
    pub fn new(config: CudaConfig) -> Result<Self, BackendError> {
        let found = probe(&config.library_folders)?;
        if config.ordinal >= found.num_devices {
            let (ordinal, num) = (config.ordinal, found.num_devices);
            let reason = format!("no CUDA device number {ordinal}: the driver shows {num}");
            return Err(BackendError::Unsupported(reason));
        }
        let device = Device::open(config.ordinal, found.driver_version)?;
        check_capability(&device.info.name, device.info.compute_capability)?;
        let cache = config.cache.as_deref();
        let kernels = Arc::new(KernelLoader::new(&device, cache)?);
        let store = MethodStore::open(cache, &device.info, found.cublaslt_version);
        let store = if config.keeps_fastest { store } else { store.without_file() };
        let gemm = Gemm::new(&kernels, store)?;
        let fixed_gemm = config.numerics.batch_invariant.then(|| FixedGemm::new(&kernels));
        let operators = Operators::new(&kernels, config.numerics)?;
        let (clock, weights) = (CudaStream::new(&device)?, Weights::new(&device));
        let shared = Shared { config, found, device, gemm, fixed_gemm, operators, clock, weights };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// What the GPU is.
    pub fn info(&self) -> &DeviceInfo {
        &self.shared.device.info
    }

    /// Versions of what was found.
    pub fn found(&self) -> &CudaProbe {
        &self.shared.found
    }

    /// Rows and head groups whose softmax was computed again in the steps waited for, because the
    /// number that their weights were relative to was too far off
    /// ([`Softmax::Unified`](super::Softmax)).
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`].
    pub fn num_recomputed(&self) -> Result<u32, BackendError> {
        self.shared.operators.num_recomputed()
    }

    /// Free and total bytes of device memory.
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`].
    pub fn memory(&self) -> Result<(usize, usize), BackendError> {
        self.shared.device.memory()
    }

    /// Divides the memory; to be called when the weights are loaded. Steps need buffers of
    /// `working` bytes.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] if nothing is left for the KV cache.
    pub fn memory_plan(
        &self,
        utilization: f64,
        working: usize,
    ) -> Result<MemoryPlan, BackendError> {
        MemoryPlan::new(self.memory()?, utilization, working)
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.shared.device
    }

    /// How `product` is computed and how long it takes, chosen anew if `again`: one line of the
    /// table that products are looked up in. Weights of its sides must have been loaded, enough
    /// that the L2 cache does not hold them all.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] if there are none, or no memory for the rest.
    pub fn tune(&self, product: &TunedProduct, again: bool) -> Result<Tuned, BackendError> {
        self.shared.gemm.tuned(product, again, &CudaStream::new(&self.shared.device)?)
    }

    fn alloc(&self, label: &str, len: usize, element: Element) -> Result<CudaBuffer, BackendError> {
        CudaBuffer::zeroed(&self.shared.device, label, len, element)
    }

    fn product(&self, args: &Matmul<'_, Self>) -> Product {
        let Matmul { x, weight, bias, out, num_rows, accumulate } = *args;
        let (n, k) = (weight.rows, weight.cols);
        assert!(x.element() == Element::Bf16 && x.len() >= num_rows * k, "matmul: x is too short");
        assert!(out.len() >= num_rows * n, "matmul: out is too short");
        let bias = bias.map(|bias| Bias {
            f32: bias.address(),
            like_out: match out.element() {
                Element::Bf16 => bias.bf16_address().expect("a bias is a vector"),
                Element::F32 | Element::Word | Element::Fp8 => bias.address(),
            },
        });
        Product {
            x: x.address(),
            weight: weight.elements.place(),
            bias,
            out: out.address(),
            out_element: out.element(),
            num_rows,
            n,
            k,
            accumulate,
            next: Next::Nothing,
        }
    }

    /// Enqueues a product; whether what comes next is done as well. In a rehearsal it is not, so
    /// that its own kernels are prepared too.
    fn multiply(&self, product: &Product, stream: &CudaStream) -> Result<bool, BackendError> {
        if let Some(fixed) = &self.shared.fixed_gemm {
            return fixed.enqueue(product, stream).map(|()| false);
        }
        self.shared.gemm.prepare(product, stream)?;
        if rehearsal::is_on() {
            return Ok(false);
        }
        self.shared.gemm.enqueue(product, stream)
    }
}

impl Backend for CudaBackend {
    type Buffer = CudaBuffer;
    type HostBuffer = CudaHostBuffer;
    type Matrix = CudaMatrix;
    type Embedding = CudaEmbedding;
    type Stream = CudaStream;
    type Event = CudaEvent;

    fn description(&self) -> String {
        let info = self.info();
        let (major, minor) = info.compute_capability;
        let gib = info.memory_bytes as f64 / f64::from(1 << 30);
        let (driver, nvrtc) =
            (version(info.driver_version), version(self.shared.found.nvrtc_version));
        format!(
            "{}, {gib:.0} GiB, compute capability {major}.{minor}, CUDA {driver}, NVRTC {nvrtc}",
            info.name
        )
    }

    fn kv_dtype(&self) -> KvDtype {
        self.shared.config.numerics.kv_dtype
    }

    fn num_allocations(&self) -> u64 {
        self.shared.device.num_allocations.load(Ordering::Relaxed)
    }

    fn activation_dtype(&self) -> Dtype {
        Dtype::BF16
    }

    fn alloc_activations(
        &self,
        label: &'static str,
        len: usize,
    ) -> Result<CudaBuffer, BackendError> {
        self.alloc(label, len, Element::Bf16)
    }

    fn alloc_f32(&self, label: &'static str, len: usize) -> Result<CudaBuffer, BackendError> {
        self.alloc(label, len, Element::F32)
    }

    fn alloc_words(&self, label: &'static str, len: usize) -> Result<CudaBuffer, BackendError> {
        self.alloc(label, len, Element::Word)
    }

    fn alloc_kv(&self, label: &'static str, bytes: usize) -> Result<CudaBuffer, BackendError> {
        self.alloc(label, bytes.div_ceil(4), Element::Word)
    }

    fn alloc_host(&self, label: &'static str, len: usize) -> Result<CudaHostBuffer, BackendError> {
        CudaHostBuffer::zeroed(&self.shared.device, label, len.saturating_mul(4))
    }

    fn load_matrix(&self, parts: &[HostTensor]) -> Result<CudaMatrix, BackendError> {
        let matrix = self.shared.weights.matrix(parts, &self.shared.operators)?;
        self.shared.gemm.add_weight(&matrix.elements, matrix.rows, matrix.cols);
        Ok(matrix)
    }

    fn load_embedding(&self, table: &HostTensor) -> Result<CudaEmbedding, BackendError> {
        self.shared.weights.embedding(table, &self.shared.operators)
    }

    fn load_vector(&self, parts: &[HostTensor]) -> Result<CudaBuffer, BackendError> {
        self.shared.weights.vector(parts, &self.shared.operators)
    }

    fn matrix_bytes(&self, matrix: &CudaMatrix) -> usize {
        matrix.elements.bytes()
    }

    fn write_host<R>(&self, buffer: &mut CudaHostBuffer, write: impl FnOnce(&mut [u32]) -> R) -> R {
        // SAFETY: the caller promises that no enqueued copy uses the buffer: a slot is restaged
        // only after its last batch was collected, that is, after `d2h_done` happened.
        write(unsafe { buffer.words_mut() })
    }

    fn read_host<R>(&self, buffer: &CudaHostBuffer, read: impl FnOnce(&[u32]) -> R) -> R {
        // SAFETY: the caller promises that no enqueued copy writes the buffer: it has waited for
        // the event after the copy.
        read(unsafe { buffer.words() })
    }

    fn create_stream(&self, _name: &'static str) -> Result<CudaStream, BackendError> {
        CudaStream::new(&self.shared.device)
    }

    fn create_event(&self) -> Result<CudaEvent, BackendError> {
        CudaEvent::new(&self.shared.device, self.shared.config.blocking_waits)
    }

    fn record(&self, event: &CudaEvent, stream: &CudaStream) -> Result<(), BackendError> {
        event.record(stream)
    }

    fn wait(&self, event: &CudaEvent, stream: &CudaStream) -> Result<(), BackendError> {
        event.hold(stream)
    }

    fn synchronize(&self, event: &CudaEvent) -> Result<(), BackendError> {
        event.synchronize()
    }

    fn elapsed(&self, earlier: &CudaEvent, later: &CudaEvent) -> Result<Duration, BackendError> {
        earlier.elapsed_to(later, &self.shared.clock)
    }

    fn copy_to_device(
        &self,
        src: &CudaHostBuffer,
        dst: &CudaBuffer,
        num_words: usize,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let bytes = num_words * 4;
        assert!(bytes <= src.bytes() && bytes <= dst.bytes(), "copy_to_device: out of bounds");
        self.shared.device.bind()?;
        // SAFETY: both ranges lie in their allocations, which live until the stream has used them.
        let copied =
            unsafe { sys::cuMemcpyHtoDAsync_v2(dst.address(), src.as_ptr(), bytes, stream.raw()) };
        check("cuMemcpyHtoDAsync", copied)
    }

    fn copy_to_host(
        &self,
        src: &CudaBuffer,
        dst: &CudaHostBuffer,
        num_words: usize,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let bytes = num_words * 4;
        assert!(bytes <= src.bytes() && bytes <= dst.bytes(), "copy_to_host: out of bounds");
        self.shared.device.bind()?;
        // SAFETY: both ranges lie in their allocations, which live until the stream has used them.
        let copied =
            unsafe { sys::cuMemcpyDtoHAsync_v2(dst.as_ptr(), src.address(), bytes, stream.raw()) };
        check("cuMemcpyDtoHAsync", copied)
    }

    fn unpack(
        &self,
        packed: &CudaBuffer,
        previous: &CudaBuffer,
        shape: StepShape,
        batch: &DeviceBatch<Self>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        self.shared.operators.unpack(packed, previous, shape, batch, stream)
    }

    fn track_tokens(
        &self,
        batch: &DeviceBatch<Self>,
        shape: StepShape,
        state: &SamplingState<Self>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        self.shared.operators.track_tokens(batch, shape, state, stream)
    }

    fn move_blocks(
        &self,
        args: MoveBlocks<'_, Self>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        self.shared.operators.move_blocks(&args, stream)
    }

    fn turn_blocks(
        &self,
        args: TurnBlocks<'_, Self>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let block_bytes = self.kv_layout(args.attention).block_bytes();
        self.shared.operators.turn_blocks(&args, block_bytes, stream)
    }

    fn cut_prompts(
        &self,
        args: CutPrompts<'_, Self>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let layout = self.kv_layout(args.attention);
        self.shared.operators.cut_prompts(&args, layout, stream)
    }

    fn cuts_prompts(&self) -> bool {
        true
    }

    fn count_history(
        &self,
        words: &CudaBuffer,
        shape: HistoryShape,
        state: &SamplingState<Self>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        self.shared.operators.count_history(words, shape, state, stream)
    }

    fn embed(&self, args: Embed<'_, Self>, stream: &CudaStream) -> Result<(), BackendError> {
        self.shared.operators.embed(&args, stream)
    }

    fn rms_norm(&self, args: RmsNorm<'_, Self>, stream: &CudaStream) -> Result<(), BackendError> {
        self.shared.operators.rms_norm(&args, stream)
    }

    fn add_rms_norm(
        &self,
        args: RmsNorm<'_, Self>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        self.shared.operators.add_rms_norm(&args, stream)
    }

    fn matmul(&self, args: Matmul<'_, Self>, stream: &CudaStream) -> Result<(), BackendError> {
        self.multiply(&self.product(&args), stream).map(drop)
    }

    fn matmul_by_library(
        &self,
        args: Matmul<'_, Self>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let product = self.product(&args);
        self.shared.gemm.prepare_by_library(&product, stream)?;
        if rehearsal::is_on() {
            return Ok(());
        }
        self.shared.gemm.enqueue_by_library(&product, stream)
    }

    fn ceilings(&self, _: Dtype) -> Result<Ceilings, BackendError> {
        ceilings::measure(self)
    }

    fn add_matmul_and_norm(
        &self,
        matmul: Matmul<'_, Self>,
        norm: RmsNorm<'_, Self>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        assert_eq!(norm.x.address(), matmul.out.address(), "the norm is of what was added to");
        let (weight, out, eps) = (norm.weight.address(), norm.out.address(), norm.eps);
        let next = Next::Norm(Norm { weight, out, eps });
        if self.multiply(&Product { next, ..self.product(&matmul) }, stream)? {
            return Ok(());
        }
        self.rms_norm(norm, stream)
    }

    fn gated_matmul(
        &self,
        args: GatedMatmul<'_, Self>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let next = match args.activation {
            Activation::Silu => Next::Silu { out: args.out.address() },
            Activation::GeluTanh => Next::Nothing,
        };
        let is_gated = self.multiply(&Product { next, ..self.product(&args.matmul()) }, stream)?;
        if is_gated && args.activation == Activation::Silu {
            return Ok(());
        }
        self.gate_and_mul(args.gate(), stream)
    }

    fn rope_and_cache(
        &self,
        args: RopeAndCache<'_, Self>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        self.shared.operators.rope_and_cache(&args, None, stream)
    }

    fn matmul_and_rope(
        &self,
        matmul: Matmul<'_, Self>,
        rope: RopeAndCache<'_, Self>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        assert_eq!(rope.qkv.address(), matmul.out.address(), "what is rotated was multiplied");
        let product = Product { next: Next::Rope, ..self.product(&matmul) };
        let parts = if self.multiply(&product, stream)? {
            Some(self.shared.gemm.parts(&product, stream)?)
        } else {
            None
        };
        self.shared.operators.rope_and_cache(&rope, parts, stream)
    }

    fn attention(
        &self,
        args: Attention<'_, Self>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let before_codes = self.shared.gemm.takes_codes();
        self.shared.operators.attention(&args, before_codes, stream)
    }

    fn gate_and_mul(
        &self,
        args: GateAndMul<'_, Self>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        self.shared.operators.gate_and_mul(&args, stream)
    }

    fn gather_sampled(
        &self,
        x: &CudaBuffer,
        batch: &DeviceBatch<Self>,
        shape: StepShape,
        len: usize,
        out: &CudaBuffer,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let gather = Gather { x, batch, shape, len, out };
        self.shared.operators.gather_sampled(&gather, stream)
    }

    fn sample(&self, args: Sample<'_, Self>, stream: &CudaStream) -> Result<(), BackendError> {
        self.shared.operators.sample(&args, stream)
    }

    fn prefix_rule(&self, attention: AttentionShape) -> Option<PrefixRule> {
        let cascades = self.shared.config.numerics.cascades();
        cascades.then(|| operators::prefix_rule(attention, self.kv_layout(attention))).flatten()
    }

    fn padded_shape(&self, step: StepShape, capacity: StepCapacity) -> Option<StepShape> {
        if self.shared.config.graphs { graph::padded_shape(step, capacity) } else { None }
    }

    fn capture(
        &self,
        stream: &CudaStream,
        enqueue: &dyn Fn() -> Result<(), BackendError>,
    ) -> Result<Graph, BackendError> {
        // Whatever needs memory or time on the device is prepared now: a capture allows neither.
        rehearsal::run(enqueue)?;
        Ok(Graph::new(CapturedGraph::capture(&self.shared.device, stream, enqueue)?))
    }

    fn replay(&self, graph: &Graph, stream: &CudaStream) -> Result<(), BackendError> {
        let graph = graph.get::<CapturedGraph>().expect("this backend captured it");
        graph.launch(stream)
    }
}
