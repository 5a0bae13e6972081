//! The KV cache as blocks to copy and to move: whatever a block consists of, it is copied whole.

use crate::{AttentionShape, Backend, DeviceBatch, KvLayout, StepShape};

/// The KV cache of one layer, both as [`Backend::kv_layout`] has it.
#[derive(Clone)]
#[allow(missing_docs)]
pub struct KvLayer<B: Backend> {
    pub keys: B::Buffer,
    pub values: B::Buffer,
}

/// All memory of a KV cache, in parts that each have the block as outermost extent.
///
/// ```text
///   device   part 0  [num_blocks, part_bytes]               keys of layer 0
///            part 1  [num_blocks, part_bytes]               values of layer 0
///            ...
///   host     [num_host_blocks, num_parts, part_bytes]       a block's parts lie side by side
/// ```
pub struct KvBlocks<B: Backend> {
    parts: Vec<B::Buffer>,
    part_bytes: usize,
}

/// A block to copy from and one to copy to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct BlockPair {
    pub from: u32,
    pub to: u32,
}

/// Arguments of [`Backend::move_blocks`].
#[allow(missing_docs)]
pub struct MoveBlocks<'a, B: Backend> {
    pub kv: &'a KvBlocks<B>,
    /// No block is written twice, or written and read.
    pub pairs: &'a [BlockPair],
    pub way: MoveWay<'a, B>,
}

/// Between which memories blocks move. Host memory is as long as its blocks need.
#[allow(missing_docs)]
pub enum MoveWay<'a, B: Backend> {
    WithinDevice,
    ToHost(&'a B::HostBuffer),
    FromHost(&'a B::HostBuffer),
}

/// A block to copy with keys that were rotated to other positions than they are to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct BlockTurn {
    pub from: u32,
    pub to: u32,
    /// By how many positions the keys move on; there is a row of the rotary table for it.
    pub by: u32,
}

/// Arguments of [`Backend::turn_blocks`].
#[allow(missing_docs)]
pub struct TurnBlocks<'a, B: Backend> {
    /// All layers.
    pub kv: &'a [KvLayer<B>],
    pub attention: AttentionShape,
    /// As for [`crate::ops::RopeAndCache`]. Factors that it has beside rotation do not count: keys
    /// have had them.
    pub rotary_table: &'a B::Buffer,
    pub rotary_dim: usize,
    pub interleaved: bool,
    /// No block is written twice, or written and read.
    pub turns: &'a [BlockTurn],
}

/// A row whose prompt ends with it and is to be cut.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct PromptCut {
    /// Which of the step's rows.
    pub row: usize,
    /// Tokens of the prompt: what the row sees.
    pub context_len: usize,
    /// New tokens at the row's end that decide, and that stay.
    pub num_observed: usize,
    /// Where what stays is copied to, in the order of tokens; all full.
    pub blocks: Vec<u32>,
}

/// Arguments of [`Backend::cut_prompts`]: those of the attention before it.
#[allow(missing_docs)]
pub struct CutPrompts<'a, B: Backend> {
    /// `[num_tokens, qkv_len]`; only the queries are read.
    pub qkv: &'a B::Buffer,
    pub kv: &'a KvLayer<B>,
    pub attention: AttentionShape,
    pub scale: f32,
    pub batch: &'a DeviceBatch<B>,
    pub step: StepShape,
    pub cuts: &'a [PromptCut],
}

impl<B: Backend> KvBlocks<B> {
    /// The blocks of these layers' KV cache.
    pub fn new(layers: &[KvLayer<B>], layout: KvLayout) -> Self {
        let parts = layers.iter().flat_map(|layer| [layer.keys.clone(), layer.values.clone()]);
        Self { parts: parts.collect(), part_bytes: layout.block_bytes() }
    }

    /// The same memory as another backend of the same device sees it.
    pub fn of<C: Backend<Buffer = B::Buffer>>(other: &KvBlocks<C>) -> Self {
        Self { parts: other.parts.clone(), part_bytes: other.part_bytes }
    }

    /// The buffers.
    pub fn parts(&self) -> &[B::Buffer] {
        &self.parts
    }

    /// Bytes of a block in one part.
    pub fn part_bytes(&self) -> usize {
        self.part_bytes
    }

    /// Bytes of a block in all parts together: what it takes on the host.
    pub fn block_bytes(&self) -> usize {
        self.parts.len() * self.part_bytes
    }
}
