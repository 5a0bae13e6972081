//! Attention of rows of several new tokens, by the best kernel that the GPU and the shape allow.

use inflight_kernels::{
    KvShape, TensorMap,
    ops::{
        plan_attention::PlanLayout,
        prefill_attention::{PrefillAttention, PrefillAttentionParams},
        prefill_hopper::{PrefillHopper, PrefillHopperParams},
    },
};

use super::{Plan, PlanKey};
use crate::{
    AttentionShape, BackendError,
    cuda::{
        backend::CudaBackend,
        loaded::{KernelLoader, Loaded, unsupported},
        memory::CudaBuffer,
        operators::word,
        stream::CudaStream,
        tensor_map::{Boxes, tensor_map},
    },
    ops::Attention,
};

/// The kernel of one shape of heads.
pub(super) enum Prefill {
    Hopper(Loaded<PrefillHopper>),
    Common(Loaded<PrefillAttention>),
}

impl Prefill {
    pub(super) fn load(
        loader: &KernelLoader,
        shape: AttentionShape,
        cache: KvShape,
    ) -> Result<Self, BackendError> {
        let group = word(shape.num_heads / shape.num_kv_heads);
        match PrefillHopper::new(&loader.gpu, cache, group) {
            Some(kernel) => Ok(Self::Hopper(loader.load(kernel)?)),
            None => Self::common(loader, cache),
        }
    }

    /// The kernel that all GPUs have.
    pub(super) fn common(loader: &KernelLoader, cache: KvShape) -> Result<Self, BackendError> {
        let kernel = PrefillAttention::new(&loader.gpu, cache).map_err(unsupported)?;
        Ok(Self::Common(loader.load(kernel)?))
    }

    /// As [`Prefill::common`], with the same bits, for rows of one token.
    pub(super) fn small(loader: &KernelLoader, cache: KvShape) -> Result<Self, BackendError> {
        let kernel = PrefillAttention::new(&loader.gpu, cache).map_err(unsupported)?;
        Ok(Self::Common(loader.load(kernel.with_small_tiles())?))
    }

    /// Query rows of a tile.
    pub(super) fn tile(&self, group: u32) -> u32 {
        match self {
            Self::Hopper(_) => PrefillHopper::tile(group),
            Self::Common(kernel) => kernel.kernel().tile(),
        }
    }

    pub(super) fn launch(
        &self,
        key: &PlanKey,
        plan: &Plan,
        args: &Attention<'_, CudaBackend>,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        match self {
            Self::Hopper(kernel) => kernel.launch(&hopper_params(key, plan, args)?, stream),
            Self::Common(kernel) => kernel.launch(&common_params(key, plan, args), stream),
        }
    }
}

fn common_params(
    key: &PlanKey,
    plan: &Plan,
    args: &Attention<'_, CudaBackend>,
) -> PrefillAttentionParams {
    PrefillAttentionParams {
        qkv: args.qkv.address(),
        keys: args.kv.keys.address(),
        values: args.kv.values.address(),
        out: args.out.address(),
        blocks: args.batch.blocks.address(),
        block_starts: args.batch.block_starts.address(),
        row_starts: args.batch.row_starts.address(),
        context_lens: args.batch.context_lens.address(),
        plan: plan.words.address(),
        num_tokens: word(args.step.num_tokens),
        num_rows: word(args.step.num_rows),
        max_rows: plan.layout.max_rows,
        num_ctas: plan.layout.num_ctas,
        num_heads: word(key.num_heads),
        num_kv_heads: word(key.num_kv_heads),
        window: key.window,
        scale: args.scale,
    }
}

fn hopper_params(
    key: &PlanKey,
    plan: &Plan,
    args: &Attention<'_, CudaBackend>,
) -> Result<PrefillHopperParams, BackendError> {
    let (group, step) = (key.group(), args.step);
    let (num_tokens, num_rows) = (word(step.num_tokens), word(step.num_rows));
    let tile = PrefillHopper::tile(group);
    Ok(PrefillHopperParams {
        queries: queries_map(key, args)?,
        keys: cache_map(key, &args.kv.keys)?,
        values: cache_map(key, &args.kv.values)?,
        key_strips: args.kv.keys.address(),
        value_strips: args.kv.values.address(),
        out: args.out.address(),
        blocks: args.batch.blocks.address(),
        block_starts: args.batch.block_starts.address(),
        row_starts: args.batch.row_starts.address(),
        context_lens: args.batch.context_lens.address(),
        plan: plan.words.address(),
        queue: plan.queue.address(),
        prefill_tiles_at: plan.layout.prefill_tiles_at(),
        num_heads: word(key.num_heads),
        num_kv_heads: word(key.num_kv_heads),
        window: key.window,
        scale: args.scale,
        max_tiles: PlanLayout::prefill_tiles(num_tokens, num_rows, group, tile),
    })
}

/// Boxes of a tile's queries.
fn queries_map(
    key: &PlanKey,
    args: &Attention<'_, CudaBackend>,
) -> Result<TensorMap, BackendError> {
    let num_heads = key.num_heads + 2 * key.num_kv_heads;
    let (group, row_bytes) = (key.group(), 2 * key.head_dim);
    tensor_map(&Boxes {
        address: args.qkv.address(),
        dims: &[key.head_dim, num_heads, args.step.num_tokens],
        strides: &[row_bytes, num_heads * row_bytes],
        sides: &[PrefillHopper::PANEL, group, PrefillHopper::tokens(group)],
    })
}

/// Boxes of a block of keys or values of one head, if they are bf16; otherwise of no use.
fn cache_map(key: &PlanKey, cache: &CudaBuffer) -> Result<TensorMap, BackendError> {
    let row_bytes = 2 * key.head_dim;
    tensor_map(&Boxes {
        address: cache.address(),
        dims: &[key.head_dim, cache.bytes() / row_bytes],
        strides: &[row_bytes],
        sides: &[PrefillHopper::PANEL, word(key.block_size)],
    })
}
