//! The KV cache as blocks to copy and to move: whatever a block consists of, it is copied whole.

use crate::{Backend, KvLayer, KvLayout};

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
