//! The [`Backend`] trait: memory, streams, events and operators.
//!
//! Every operator is enqueued on a stream and returns at once. Sizes known to the host come in a
//! [`StepShape`]; everything else an operator needs it reads from device memory at fixed addresses
//! ([`DeviceBatch`]), so that a backend may capture a step as a graph.

use std::time::Duration;

mod arguments;

use crate::{
    AttentionShape, BackendError, Ceilings, CheckBlocks, Clock, CutPrompts, DeviceBatch, Dtype,
    Graph, HistoryShape, HostTensor, KvDtype, KvLayout, MoveBlocks, PrefixRule, StepCapacity,
    StepShape, TurnBlocks,
};

pub use self::arguments::{
    Activation, Attention, Embed, GateAndMul, GatedMatmul, Matmul, RmsNorm, RopeAndCache, Sample,
    SamplingState,
};

/// A device that runs operators in order on streams.
///
/// # Ordering
/// Operations of one stream run in the order enqueued. Operations of two streams are ordered only
/// by events: `record` on one, `wait` on the other. A buffer must never be written while another
/// operation uses it; the CPU backend checks this and reports a violation as a lost device.
pub trait Backend: Clone + Send + Sync + Sized + 'static {
    /// Device memory. Cloning gives another handle to the same memory.
    type Buffer: Clone + Send + Sync;
    /// Host memory that copies can read and write while the host goes on.
    type HostBuffer: Send;
    /// A weight matrix, stored as this device likes it.
    type Matrix: Send + Sync;
    /// A table whose rows are looked up one at a time.
    type Embedding: Send + Sync;
    /// An ordered queue of operations.
    type Stream: Send + Sync;
    /// A point in a stream that others can wait for.
    type Event: Send + Sync;

    /// Name for people: the processor or the GPU, and what of it is used.
    fn description(&self) -> String;

    /// The clock by which the host of this device lives.
    fn clock(&self) -> Clock {
        Clock::real()
    }

    /// Element type of the KV cache.
    fn kv_dtype(&self) -> KvDtype;

    /// How the KV cache of such a layer lies.
    fn kv_layout(&self, attention: AttentionShape) -> KvLayout {
        KvLayout::new(self.kv_dtype(), attention)
    }

    /// Element type of [`Backend::alloc_activations`].
    fn activation_dtype(&self) -> Dtype {
        Dtype::F32
    }

    // --- memory ---

    /// Allocations of device memory so far, where somebody counts them: for traces, since one in
    /// the loop would make the device wait.
    fn num_allocations(&self) -> u64 {
        0
    }

    /// Allocates `len` activations of [`Backend::activation_dtype`], zeroed. `label` names it in
    /// messages.
    fn alloc_activations(
        &self,
        label: &'static str,
        len: usize,
    ) -> Result<Self::Buffer, BackendError>;

    /// Allocates `len` activations that are f32 on every device, zeroed: the state between layers,
    /// and logits.
    fn alloc_f32(&self, label: &'static str, len: usize) -> Result<Self::Buffer, BackendError> {
        self.alloc_activations(label, len)
    }

    /// Allocates `len` 32-bit words, zeroed.
    fn alloc_words(&self, label: &'static str, len: usize) -> Result<Self::Buffer, BackendError>;

    /// Allocates `bytes` bytes for keys or values, zeroed; see [`KvLayout`].
    fn alloc_kv(&self, label: &'static str, bytes: usize) -> Result<Self::Buffer, BackendError>;

    /// Allocates `len` 32-bit words of host memory, zeroed.
    fn alloc_host(&self, label: &'static str, len: usize)
    -> Result<Self::HostBuffer, BackendError>;

    /// Takes one matrix made of `parts` stacked along their rows.
    ///
    /// # Shapes
    /// Each part `[rows_i, cols]`; the result `[sum of rows_i, cols]`.
    fn load_matrix(&self, parts: &[HostTensor]) -> Result<Self::Matrix, BackendError>;

    /// Takes a table of rows to look up, `[rows, cols]`.
    fn load_embedding(&self, table: &HostTensor) -> Result<Self::Embedding, BackendError>;

    /// Takes vectors, one after the other, as f32 (norm weights, biases, rotary tables).
    fn load_vector(&self, parts: &[HostTensor]) -> Result<Self::Buffer, BackendError>;

    /// Bytes the device holds for a matrix.
    fn matrix_bytes(&self, matrix: &Self::Matrix) -> usize;

    /// Runs `write` on host memory that no enqueued copy is using.
    fn write_host<R>(
        &self,
        buffer: &mut Self::HostBuffer,
        write: impl FnOnce(&mut [u32]) -> R,
    ) -> R;

    /// Runs `read` on host memory that no enqueued copy is writing.
    fn read_host<R>(&self, buffer: &Self::HostBuffer, read: impl FnOnce(&[u32]) -> R) -> R;

    /// Copies the words from `start` on out of host memory of which enqueued moves may be using
    /// other parts.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] on a device that cannot.
    fn read_host_part(
        &self,
        buffer: &Self::HostBuffer,
        start: usize,
        words: &mut [u32],
    ) -> Result<(), BackendError> {
        let _ = (buffer, start, words);
        Err(BackendError::Unsupported(format!("{}: no parts of memory", self.description())))
    }

    /// The other way round.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] on a device that cannot.
    fn write_host_part(
        &self,
        buffer: &Self::HostBuffer,
        start: usize,
        words: &[u32],
    ) -> Result<(), BackendError> {
        let _ = (buffer, start, words);
        Err(BackendError::Unsupported(format!("{}: no parts of memory", self.description())))
    }

    // --- streams and events ---

    /// A new stream; `name` is its thread or profiler name.
    fn create_stream(&self, name: &'static str) -> Result<Self::Stream, BackendError>;

    /// A new event, never recorded: waiting for it returns at once.
    fn create_event(&self) -> Result<Self::Event, BackendError>;

    /// Marks the end of what is enqueued on `stream` so far.
    fn record(&self, event: &Self::Event, stream: &Self::Stream) -> Result<(), BackendError>;

    /// Holds back what is enqueued on `stream` from now on until `event`, as last recorded,
    /// happened.
    fn wait(&self, event: &Self::Event, stream: &Self::Stream) -> Result<(), BackendError>;

    /// Blocks the calling thread until `event`, as last recorded, happened.
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`] if any operation failed since the backend was made.
    fn synchronize(&self, event: &Self::Event) -> Result<(), BackendError>;

    /// Time from `earlier` to `later`, both recorded and happened; zero if out of order.
    fn elapsed(&self, earlier: &Self::Event, later: &Self::Event)
    -> Result<Duration, BackendError>;

    // --- copies ---

    /// Copies the first `num_words` words of `src` to the start of `dst`.
    fn copy_to_device(
        &self,
        src: &Self::HostBuffer,
        dst: &Self::Buffer,
        num_words: usize,
        stream: &Self::Stream,
    ) -> Result<(), BackendError>;

    /// Copies the first `num_words` words of `src` to the start of `dst`.
    fn copy_to_host(
        &self,
        src: &Self::Buffer,
        dst: &Self::HostBuffer,
        num_words: usize,
        stream: &Self::Stream,
    ) -> Result<(), BackendError>;

    /// Copies whole blocks of the KV cache: on the compute stream within the device, on the streams
    /// of copies to and from the host.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] on a device that cannot.
    fn move_blocks(
        &self,
        args: MoveBlocks<'_, Self>,
        stream: &Self::Stream,
    ) -> Result<(), BackendError> {
        let _ = (args, stream);
        Err(BackendError::Unsupported(format!("{}: no moves of blocks", self.description())))
    }

    /// Copies blocks of the KV cache with keys turned to other positions. On the compute stream.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] on a device that cannot.
    fn turn_blocks(
        &self,
        args: TurnBlocks<'_, Self>,
        stream: &Self::Stream,
    ) -> Result<(), BackendError> {
        let _ = (args, stream);
        Err(BackendError::Unsupported(format!("{}: no turning of keys", self.description())))
    }

    /// Copies of each prompt's keys and values those that the prompt's end attends to most, each
    /// head's own, to other blocks.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] on a device that cannot.
    fn cut_prompts(
        &self,
        args: CutPrompts<'_, Self>,
        stream: &Self::Stream,
    ) -> Result<(), BackendError> {
        let _ = (args, stream);
        Err(BackendError::Unsupported(format!("{}: no cutting of prompts", self.description())))
    }

    /// Whether [`Backend::cut_prompts`] works.
    fn cuts_prompts(&self) -> bool {
        false
    }

    /// Notes or verifies checksums of blocks of the KV cache, on any stream. For debugging.
    ///
    /// A block that changed though nobody was to write to it is a fault: the device is lost.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] on a device that cannot.
    fn check_blocks(
        &self,
        args: CheckBlocks<'_, Self>,
        stream: &Self::Stream,
    ) -> Result<(), BackendError> {
        let _ = (args, stream);
        Err(BackendError::Unsupported(format!("{}: no checksums", self.description())))
    }

    /// Whether [`Backend::check_blocks`] works.
    fn checks_blocks(&self) -> bool {
        false
    }

    // --- operators ---

    /// Spreads the packed inputs over `batch`, taking carried-over tokens from `previous`, the
    /// output words of the step before.
    fn unpack(
        &self,
        packed: &Self::Buffer,
        previous: &Self::Buffer,
        shape: StepShape,
        batch: &DeviceBatch<Self>,
        stream: &Self::Stream,
    ) -> Result<(), BackendError>;

    /// Counts the step's input tokens for the rows that are tracked, clearing fresh ones first.
    fn track_tokens(
        &self,
        batch: &DeviceBatch<Self>,
        shape: StepShape,
        state: &SamplingState<Self>,
        stream: &Self::Stream,
    ) -> Result<(), BackendError>;

    /// As [`Backend::track_tokens`], for tokens that no step computes: `words` are packed by
    /// [`crate::HistoryInputs`].
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] on a device that cannot.
    fn count_history(
        &self,
        words: &Self::Buffer,
        shape: HistoryShape,
        state: &SamplingState<Self>,
        stream: &Self::Stream,
    ) -> Result<(), BackendError> {
        let _ = (words, shape, state, stream);
        Err(BackendError::Unsupported(format!("{}: no history", self.description())))
    }

    /// `out[t] = table[token_ids[t]] * scale`, `[num_tokens, hidden]`.
    fn embed(&self, args: Embed<'_, Self>, stream: &Self::Stream) -> Result<(), BackendError>;

    /// `out = x / rms(x) * weight`, each of `num_rows` rows of `weight`'s length.
    fn rms_norm(&self, args: RmsNorm<'_, Self>, stream: &Self::Stream) -> Result<(), BackendError>;

    /// `out += x / rms(x) * weight`: a norm behind a branch, before it joins the state. `x` and
    /// `out` are f32 on every device.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] on a device that cannot.
    fn add_rms_norm(
        &self,
        args: RmsNorm<'_, Self>,
        stream: &Self::Stream,
    ) -> Result<(), BackendError> {
        let _ = (args, stream);
        Err(BackendError::Unsupported(format!("{}: no norms of branches", self.description())))
    }

    /// `out = x * weight^T (+ bias)`, or `out += ...`.
    fn matmul(&self, args: Matmul<'_, Self>, stream: &Self::Stream) -> Result<(), BackendError>;

    /// `matmul`, which adds to its output, then `norm` of that output.
    fn add_matmul_and_norm(
        &self,
        matmul: Matmul<'_, Self>,
        norm: RmsNorm<'_, Self>,
        stream: &Self::Stream,
    ) -> Result<(), BackendError> {
        self.matmul(matmul, stream)?;
        self.rms_norm(norm, stream)
    }

    /// `out = f(x * gate^T) * (x * up^T)`, the two matrices one above the other.
    fn gated_matmul(
        &self,
        args: GatedMatmul<'_, Self>,
        stream: &Self::Stream,
    ) -> Result<(), BackendError> {
        self.matmul(args.matmul(), stream)?;
        self.gate_and_mul(args.gate(), stream)
    }

    /// Normalises (if asked) and rotates queries and keys; writes keys and values to the KV cache.
    fn rope_and_cache(
        &self,
        args: RopeAndCache<'_, Self>,
        stream: &Self::Stream,
    ) -> Result<(), BackendError>;

    /// `matmul`, whose output is `rope.qkv`, then `rope_and_cache`. Of what the product wrote only
    /// the queries may remain.
    fn matmul_and_rope(
        &self,
        matmul: Matmul<'_, Self>,
        rope: RopeAndCache<'_, Self>,
        stream: &Self::Stream,
    ) -> Result<(), BackendError> {
        self.matmul(matmul, stream)?;
        self.rope_and_cache(rope, stream)
    }

    /// Causal attention of every row's new tokens over its paged context.
    fn attention(
        &self,
        args: Attention<'_, Self>,
        stream: &Self::Stream,
    ) -> Result<(), BackendError>;

    /// `out[t, i] = f(gate_up[t, i]) * gate_up[t, len + i]`, `[num_rows, len]`.
    fn gate_and_mul(
        &self,
        args: GateAndMul<'_, Self>,
        stream: &Self::Stream,
    ) -> Result<(), BackendError>;

    /// `out[s] = x[sample_indices[s]]`, `[num_sampled, len]`.
    fn gather_sampled(
        &self,
        x: &Self::Buffer,
        batch: &DeviceBatch<Self>,
        shape: StepShape,
        len: usize,
        out: &Self::Buffer,
        stream: &Self::Stream,
    ) -> Result<(), BackendError>;

    /// Draws one token for every sampled row and writes it, and what else the row asked for, to
    /// the output words.
    fn sample(&self, args: Sample<'_, Self>, stream: &Self::Stream) -> Result<(), BackendError>;

    // --- to compare with ---

    /// [`Backend::matmul`] by the library of the device's maker alone.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] where there is none.
    fn matmul_by_library(
        &self,
        args: Matmul<'_, Self>,
        stream: &Self::Stream,
    ) -> Result<(), BackendError> {
        let _ = (args, stream);
        Err(BackendError::Unsupported(format!("{}: no library", self.description())))
    }

    /// Measures what the hardware can do at best, with weights stored as `weights`; takes some
    /// tenths of a second.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] where that means nothing.
    fn ceilings(&self, weights: Dtype) -> Result<Ceilings, BackendError> {
        let _ = weights;
        Err(BackendError::Unsupported(format!("{}: no ceilings", self.description())))
    }

    /// When steps are to tell of prefixes that their rows share; `None`: never. Told or not, the
    /// results are the same but for rounding.
    fn prefix_rule(&self, attention: AttentionShape) -> Option<PrefixRule> {
        let _ = attention;
        None
    }

    // --- graphs ---

    /// The shape to pad `step` to, if a graph captured for that shape can stand for it; its rows
    /// beyond the step's own do nothing. `None`: enqueue the step's operators one by one.
    fn padded_shape(&self, step: StepShape, capacity: StepCapacity) -> Option<StepShape> {
        let _ = (step, capacity);
        None
    }

    /// Captures what `enqueue` enqueues on `stream`, without running it. `enqueue` may be called
    /// more than once and must enqueue the same each time; its buffers must outlive the graph.
    fn capture(
        &self,
        stream: &Self::Stream,
        enqueue: &dyn Fn() -> Result<(), BackendError>,
    ) -> Result<Graph, BackendError> {
        let _ = (stream, enqueue);
        Err(BackendError::Unsupported(format!("{}: no graphs", self.description())))
    }

    /// Enqueues what `graph` captured.
    fn replay(&self, graph: &Graph, stream: &Self::Stream) -> Result<(), BackendError> {
        let _ = (graph, stream);
        Err(BackendError::Unsupported(format!("{}: no graphs", self.description())))
    }
}
