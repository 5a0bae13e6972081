//! The operators that touch the KV cache: their operands while they wait in a stream's queue, and
//! the call for each element type that the cache may have.

use super::{
    CpuBackend, CpuBuffer,
    buffer::Element,
    kernels::{self, Cores, KvElement},
};
use crate::{
    AttentionShape, BlockTurn, CutPrompts, DeviceBatch, KvLayer, PromptCut, StepShape, TurnBlocks,
    ops::{Attention, RopeAndCache},
};

/// [`RopeAndCache`] with handles instead of references.
pub(super) struct RopeOperands {
    qkv: CpuBuffer,
    rotary_table: CpuBuffer,
    rotary_dim: usize,
    interleaved: bool,
    qk_norm: Option<(CpuBuffer, CpuBuffer)>,
    eps: f32,
    attention: AttentionShape,
    kv: KvLayer<CpuBackend>,
    batch: DeviceBatch<CpuBackend>,
    step: StepShape,
}

impl RopeOperands {
    pub(super) fn new(args: &RopeAndCache<'_, CpuBackend>) -> Self {
        Self {
            qkv: args.qkv.clone(),
            rotary_table: args.rotary_table.clone(),
            rotary_dim: args.rotary_dim,
            interleaved: args.interleaved,
            qk_norm: args.qk_norm.map(|(q, k)| (q.clone(), k.clone())),
            eps: args.eps,
            attention: args.attention,
            kv: args.kv.clone(),
            batch: args.batch.clone(),
            step: args.step,
        }
    }

    /// Runs the operator on a KV cache of `K`.
    pub(super) fn run<K: KvElement + Element>(&self, cores: Cores<'_>) {
        let _turns = (self.kv.keys.take_turns(), self.kv.values.take_turns());
        let norms = self.qk_norm.as_ref().map(|(q, k)| (q.read::<f32>(), k.read::<f32>()));
        let args = kernels::RopeAndCache {
            qkv: &mut self.qkv.write(),
            rotary_table: &self.rotary_table.read(),
            rotary_dim: self.rotary_dim,
            interleaved: self.interleaved,
            qk_norm: norms.as_ref().map(|(q, k)| (&**q, &**k)),
            eps: self.eps,
            attention: self.attention,
            positions: &self.batch.positions.read()[..self.step.num_tokens],
            slot_mapping: &self.batch.slot_mapping.read()[..self.step.num_tokens],
            keys: &mut self.kv.keys.write::<K>(),
            values: &mut self.kv.values.write::<K>(),
        };
        kernels::rope_and_cache(cores, args);
    }
}

/// [`TurnBlocks`] with handles instead of references.
pub(super) struct TurnOperands {
    kv: Vec<KvLayer<CpuBackend>>,
    attention: AttentionShape,
    rotary_table: CpuBuffer,
    rotary_dim: usize,
    interleaved: bool,
    turns: Vec<BlockTurn>,
}

impl TurnOperands {
    pub(super) fn new(args: &TurnBlocks<'_, CpuBackend>) -> Self {
        Self {
            kv: args.kv.to_vec(),
            attention: args.attention,
            rotary_table: args.rotary_table.clone(),
            rotary_dim: args.rotary_dim,
            interleaved: args.interleaved,
            turns: args.turns.to_vec(),
        }
    }

    /// Runs the operator on a KV cache of `K`, layer by layer.
    pub(super) fn run<K: KvElement + Element>(&self, _cores: Cores<'_>) {
        for layer in &self.kv {
            let _turns = (layer.keys.take_turns(), layer.values.take_turns());
            kernels::turn_blocks(kernels::TurnBlocks {
                keys: &mut layer.keys.write::<K>(),
                values: &mut layer.values.write::<K>(),
                attention: self.attention,
                rotary_table: &self.rotary_table.read(),
                rotary_dim: self.rotary_dim,
                interleaved: self.interleaved,
                turns: &self.turns,
            });
        }
    }
}

/// [`CutPrompts`] with handles instead of references.
pub(super) struct CutOperands {
    qkv: CpuBuffer,
    kv: KvLayer<CpuBackend>,
    attention: AttentionShape,
    scale: f32,
    batch: DeviceBatch<CpuBackend>,
    cuts: Vec<PromptCut>,
}

impl CutOperands {
    pub(super) fn new(args: &CutPrompts<'_, CpuBackend>) -> Self {
        Self {
            qkv: args.qkv.clone(),
            kv: args.kv.clone(),
            attention: args.attention,
            scale: args.scale,
            batch: args.batch.clone(),
            cuts: args.cuts.to_vec(),
        }
    }

    /// Runs the operator on a KV cache of `K`.
    pub(super) fn run<K: KvElement + Element>(&self, cores: Cores<'_>) {
        let _turns = (self.kv.keys.take_turns(), self.kv.values.take_turns());
        let args = kernels::CutPrompts {
            qkv: &self.qkv.read(),
            keys: &mut self.kv.keys.write::<K>(),
            values: &mut self.kv.values.write::<K>(),
            attention: self.attention,
            scale: self.scale,
            row_starts: &self.batch.row_starts.read(),
            block_starts: &self.batch.block_starts.read(),
            blocks: &self.batch.blocks.read(),
            cuts: &self.cuts,
        };
        kernels::cut_prompts(cores, args);
    }
}

/// [`Attention`] with handles instead of references.
pub(super) struct AttentionOperands {
    qkv: CpuBuffer,
    kv: KvLayer<CpuBackend>,
    out: CpuBuffer,
    attention: AttentionShape,
    scale: f32,
    window: Option<usize>,
    batch: DeviceBatch<CpuBackend>,
    step: StepShape,
}

impl AttentionOperands {
    pub(super) fn new(args: &Attention<'_, CpuBackend>) -> Self {
        Self {
            qkv: args.qkv.clone(),
            kv: args.kv.clone(),
            out: args.out.clone(),
            attention: args.attention,
            scale: args.scale,
            window: args.window,
            batch: args.batch.clone(),
            step: args.step,
        }
    }

    /// Runs the operator on a KV cache of `K`.
    pub(super) fn run<K: KvElement + Element>(&self, cores: Cores<'_>) {
        let _turns = (self.kv.keys.take_turns(), self.kv.values.take_turns());
        let args = kernels::Attention {
            qkv: &self.qkv.read(),
            keys: &self.kv.keys.read::<K>(),
            values: &self.kv.values.read::<K>(),
            out: &mut self.out.write(),
            attention: self.attention,
            scale: self.scale,
            window: self.window,
            row_starts: &self.batch.row_starts.read(),
            context_lens: &self.batch.context_lens.read(),
            block_starts: &self.batch.block_starts.read(),
            blocks: &self.batch.blocks.read(),
            num_rows: self.step.num_rows,
        };
        kernels::attention(cores, args);
    }
}
