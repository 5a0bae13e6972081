//! Attention: one kernel for rows of one new token, one for rows of several, and the plan by which
//! both divide their work; [`cascade`]: where rows share prefixes.
//!
//! The plan depends on the step and on the layer's window, not on the layer, so it is computed by
//! the first layer of each kind and used by the others.

mod cascade;
mod prefill;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use cudarc::driver::sys::CUdeviceptr;
use inflight_kernels::ops::{
    decode_attention::{DecodeAttention, DecodeAttentionParams},
    fp8_split::SplitRows,
    hopper_gemm::HopperGemm,
    plan_attention::{PlanAttention, PlanAttentionParams, PlanLayout, head_groups},
};

pub(in crate::cuda) use self::cascade::prefix_rule;
use self::{cascade::Cascade, prefill::Prefill};
use super::{check_buffer, kv_shape, max_prefixes, word};
use crate::{
    AttentionShape, BackendError, DeviceBatch, StepShape,
    cuda::{
        backend::CudaBackend,
        by_key::ByKey,
        loaded::{KernelLoader, Loaded, unsupported},
        memory::{CudaBuffer, Element},
        numerics::Numerics,
        stream::{CudaStream, LeftCodes, Scratch},
    },
    ops::Attention,
};

/// No window: a token sees all before it.
const NO_WINDOW: u32 = u32::MAX;

/// The attention kernels, and a plan for every batch and kind of layer.
pub(super) struct AttentionPlans {
    planner: Loaded<PlanAttention>,
    numerics: Numerics,
    /// Counts rows and head groups whose softmax was computed again.
    recomputed: CudaBuffer,
    /// By heads, and whether the products behind have weights in fp8.
    kernels: ByKey<(AttentionShape, bool), Kernels>,
    /// Loaded when rows first share prefixes.
    cascades: ByKey<AttentionShape, Cascade>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Steps enqueued so far with each batch, by the address of its context lengths.
    steps: HashMap<CUdeviceptr, u64>,
    plans: HashMap<PlanKey, Arc<Plan>>,
    /// The step that each plan was last computed for.
    planned: HashMap<PlanKey, u64>,
    /// The step that each batch was last rotated for.
    rotated: HashMap<CUdeviceptr, u64>,
}

impl State {
    /// The step that was last enqueued with a batch, by the address of its context lengths.
    fn step_of(&self, batch: CUdeviceptr) -> u64 {
        self.steps.get(&batch).copied().unwrap_or(0)
    }
}

struct Kernels {
    decode: Loaded<DecodeAttention>,
    prefill: Prefill,
    /// The same kernel for steps whose rows are all of one token, where one kernel must do for all.
    small: Option<Prefill>,
}

/// What a plan depends on besides the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct PlanKey {
    /// Address of the batch's context lengths.
    batch: CUdeviceptr,
    max_rows: usize,
    max_tokens: usize,
    /// 0: steps never tell of any.
    max_prefixes: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    block_size: usize,
    window: u32,
}

/// A plan's memory, and the working memory of the kernels that follow it.
struct Plan {
    layout: PlanLayout,
    words: CudaBuffer,
    partials: CudaBuffer,
    arrivals: CudaBuffer,
    queue: CudaBuffer,
    /// What shared prefixes came to, if steps tell of any.
    prefix_parts: Option<CudaBuffer>,
}

impl AttentionPlans {
    pub(super) fn new(loader: &KernelLoader, numerics: Numerics) -> Result<Self, BackendError> {
        let label = "recomputed rows";
        Ok(Self {
            numerics,
            recomputed: CudaBuffer::zeroed(&loader.device, label, 1, Element::Word)?,
            planner: loader.load(PlanAttention)?,
            kernels: ByKey::default(),
            cascades: ByKey::default(),
            state: Mutex::default(),
        })
    }

    /// Rows and head groups whose softmax was computed again.
    pub(super) fn num_recomputed(&self) -> Result<u32, BackendError> {
        self.recomputed.read_word()
    }

    /// A new step's inputs are about to be in `batch`: its plans are out of date.
    pub(super) fn start_step(&self, batch: &DeviceBatch<CudaBackend>) {
        let others = batch.more_groups.iter().map(|group| &group.context_lens);
        let mut state = self.lock();
        for context_lens in [&batch.context_lens].into_iter().chain(others) {
            *state.steps.entry(context_lens.address()).or_default() += 1;
        }
    }

    /// Whether nothing was rotated yet in the current step; it counts as done then. A rotation
    /// waits before it lets the next kernel begin, so whatever comes after one begins after the
    /// step's inputs were written.
    pub(super) fn rotates_first(&self, batch: &DeviceBatch<CudaBackend>) -> bool {
        let batch = batch.context_lens.address();
        let mut state = self.lock();
        let step = state.step_of(batch);
        state.rotated.insert(batch, step) != Some(step)
    }

    /// `before_codes`: products behind it have weights in fp8.
    pub(super) fn launch(
        &self,
        args: &Attention<'_, CudaBackend>,
        before_codes: bool,
        loader: &KernelLoader,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let (shape, step) = (args.attention, args.step);
        check_buffer(args.qkv, Element::Bf16, step.num_tokens * shape.qkv_len(), "attention: qkv");
        check_buffer(args.out, Element::Bf16, step.num_tokens * shape.q_len(), "attention: out");
        let load = || Kernels::load(loader, shape, self.numerics, before_codes);
        let kernels = self.kernels.get((shape, before_codes), load)?;
        let key = PlanKey::of(args, self.numerics);
        let plan = self.plan(&key, &kernels, loader)?;
        let cascade = self.cascade(&key, args, loader)?;
        if self.is_due(&key) {
            let params = plan_params(&key, &plan, &kernels, args);
            let params = match &cascade {
                Some(cascade) => cascade.plan(&plan, args, params),
                None => params,
            };
            self.planner.launch(&params, stream)?;
        }
        let decodes_only = decodes_only(step);
        if let Some(cascade) = cascade {
            let decode = self.decode_params(&key, &plan, args, SplitRows::default());
            cascade.launch((&key, &plan), args, decode, stream)?;
            stream.set_left(None);
        } else if (decodes_only || step.num_rows > 1) && !self.numerics.batch_invariant {
            let len = shape.q_len();
            let leaves = kernels.decode.kernel().leaves_codes()
                && decodes_only
                && step.num_rows <= HopperGemm::MAX_ROWS as usize;
            let codes = if leaves {
                stream.split_rows((step.num_rows, len), Scratch::First)?
            } else {
                SplitRows::default()
            };
            kernels.decode.launch(&self.decode_params(&key, &plan, args, codes), stream)?;
            stream.set_left(leaves.then(|| LeftCodes { x: args.out.address(), len, codes }));
        }
        if decodes_only && !self.numerics.batch_invariant {
            return Ok(());
        }
        kernels.prefill_of(step).launch(&key, &plan, args, stream)
    }

    /// The kernels for this step's prefixes, if its rows share some and this layer sees them whole.
    fn cascade(
        &self,
        key: &PlanKey,
        args: &Attention<'_, CudaBackend>,
        loader: &KernelLoader,
    ) -> Result<Option<Arc<Cascade>>, BackendError> {
        if args.step.num_prefixes == 0 || key.window != NO_WINDOW || key.max_prefixes == 0 {
            return Ok(None);
        }
        let cache = kv_shape(self.numerics.kv_numbers()?, args.attention);
        self.cascades.get(args.attention, || Cascade::load(loader, cache)).map(Some)
    }

    fn decode_params(
        &self,
        key: &PlanKey,
        plan: &Plan,
        args: &Attention<'_, CudaBackend>,
        split: SplitRows,
    ) -> DecodeAttentionParams {
        DecodeAttentionParams {
            qkv: args.qkv.address(),
            keys: args.kv.keys.address(),
            values: args.kv.values.address(),
            out: args.out.address(),
            blocks: args.batch.blocks.address(),
            block_starts: args.batch.block_starts.address(),
            row_starts: args.batch.row_starts.address(),
            context_lens: args.batch.context_lens.address(),
            plan: plan.words.address(),
            partials: plan.partials.address(),
            arrivals: plan.arrivals.address(),
            unified: 0,
            recomputed: self.recomputed.address(),
            split,
            prefix_spans: 0,
            row_prefixes: 0,
            prefix_parts: 0,
            prefix_tile: 0,
            reserved: 0,
            num_rows: word(args.step.num_rows),
            max_rows: plan.layout.max_rows,
            num_heads: word(key.num_heads),
            num_kv_heads: word(key.num_kv_heads),
            window: key.window,
            scale: args.scale,
        }
    }

    fn plan(
        &self,
        key: &PlanKey,
        kernels: &Kernels,
        loader: &KernelLoader,
    ) -> Result<Arc<Plan>, BackendError> {
        let mut state = self.lock();
        if let Some(plan) = state.plans.get(key) {
            return Ok(Arc::clone(plan));
        }
        let plan = Arc::new(Plan::new(key, kernels, loader)?);
        state.plans.insert(*key, Arc::clone(&plan));
        Ok(plan)
    }

    /// Whether the plan has yet to be computed for the current step; it counts as done then.
    fn is_due(&self, key: &PlanKey) -> bool {
        let mut state = self.lock();
        let step = state.step_of(key.batch);
        state.planned.insert(*key, step) != Some(step)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether all rows are of one token. They have at least one, so there are as many rows as tokens.
fn decodes_only(step: StepShape) -> bool {
    step.num_tokens == step.num_rows
}

impl Kernels {
    fn load(
        loader: &KernelLoader,
        shape: AttentionShape,
        numerics: Numerics,
        before_codes: bool,
    ) -> Result<Self, BackendError> {
        let cache = kv_shape(numerics.kv_numbers()?, shape);
        let decode = DecodeAttention::new(&loader.gpu, cache, numerics.softmax);
        let decode = decode.map_err(unsupported)?;
        let leaving_codes = decode.leaving_codes().filter(|_| before_codes);
        let decode = leaving_codes.unwrap_or(decode);
        thread::scope(|scope| {
            let decode = loader.begin(scope, decode);
            let (prefill, small) = if numerics.batch_invariant {
                (Prefill::common(loader, cache)?, Some(Prefill::small(loader, cache)?))
            } else {
                (Prefill::load(loader, shape, cache)?, None)
            };
            Ok(Self { decode: decode.end()?, prefill, small })
        })
    }

    /// The kernel for a step's rows of several tokens, or for all of them.
    fn prefill_of(&self, step: StepShape) -> &Prefill {
        self.small.as_ref().filter(|_| decodes_only(step)).unwrap_or(&self.prefill)
    }
}

impl PlanKey {
    fn of(args: &Attention<'_, CudaBackend>, numerics: Numerics) -> Self {
        let AttentionShape { num_heads, num_kv_heads, head_dim, block_size } = args.attention;
        Self {
            batch: args.batch.context_lens.address(),
            max_rows: args.batch.context_lens.len(),
            max_tokens: args.batch.token_ids.len(),
            max_prefixes: if numerics.cascades() { max_prefixes(args.batch) } else { 0 },
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            window: args.window.map_or(NO_WINDOW, word),
        }
    }

    fn head_groups(&self) -> u32 {
        head_groups(word(self.num_heads), word(self.num_kv_heads))
    }

    /// Query heads of a key/value head.
    fn group(&self) -> u32 {
        word(self.num_heads / self.num_kv_heads)
    }
}

impl Plan {
    fn new(key: &PlanKey, kernels: &Kernels, loader: &KernelLoader) -> Result<Self, BackendError> {
        let decode = kernels.decode.kernel();
        let (max_rows, max_tokens) = (word(key.max_rows), word(key.max_tokens));
        let tile = kernels.prefill.tile(key.group());
        let tiles = PlanLayout::prefill_tiles(max_tokens, max_rows, key.group(), tile);
        let small_tiles = kernels.small.as_ref().map_or(0, |kernel| {
            let tile = kernel.tile(key.group());
            PlanLayout::prefill_tiles(max_rows, max_rows, key.group(), tile)
        });
        let layout = PlanLayout {
            max_rows,
            num_ctas: decode.num_ctas(),
            max_prefill_tiles: tiles.max(small_tiles),
            max_prefixes: word(key.max_prefixes),
        };
        let shares = key.max_prefixes > 0 && key.window == NO_WINDOW;
        let cache = decode.cache();
        let prefix_parts = shares.then(|| cascade::parts(key, cache, loader)).transpose()?;
        let (num_heads, num_kv_heads) = (word(key.num_heads), word(key.num_kv_heads));
        let num_arrivals = DecodeAttention::arrival_words(max_rows, num_heads, num_kv_heads);
        let alloc = |label, len, element| CudaBuffer::zeroed(&loader.device, label, len, element);
        Ok(Self {
            layout,
            words: alloc("attention plan", layout.num_words(), Element::Word)?,
            partials: alloc("attention partials", decode.partial_floats(), Element::F32)?,
            arrivals: alloc("attention arrivals", num_arrivals, Element::Word)?,
            queue: alloc("attention queue", 2, Element::Word)?,
            prefix_parts,
        })
    }
}

fn plan_params(
    key: &PlanKey,
    plan: &Plan,
    kernels: &Kernels,
    args: &Attention<'_, CudaBackend>,
) -> PlanAttentionParams {
    PlanAttentionParams {
        context_lens: args.batch.context_lens.address(),
        row_starts: args.batch.row_starts.address(),
        plan: plan.words.address(),
        num_rows: word(args.step.num_rows),
        max_rows: plan.layout.max_rows,
        num_ctas: plan.layout.num_ctas,
        max_prefill_tiles: plan.layout.max_prefill_tiles,
        head_groups: key.head_groups(),
        group: key.group(),
        prefill_tile: kernels.prefill_of(args.step).tile(key.group()),
        window: key.window,
        one_kernel: u32::from(kernels.small.is_some()),
        prefix_tile: 0,
        prefixes: 0,
        prefix_rows: 0,
        prefix_spans: 0,
        row_prefixes: 0,
        num_prefix_ctas: 0,
        num_kv_heads: word(key.num_kv_heads),
    }
}
