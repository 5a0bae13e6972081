//! The simulated device's and host's memory: what is in it, and who used it last.

use super::order::Uses;

/// Handle to device memory.
#[derive(Clone, Copy, Debug)]
pub struct SimBuffer {
    pub(crate) id: usize,
    /// Elements, words or bytes, as it was asked for.
    pub(crate) len: usize,
}

/// Handle to host memory.
#[derive(Debug)]
pub struct SimHostBuffer {
    pub(crate) id: usize,
    /// Words.
    pub(crate) len: usize,
}

/// A weight matrix of which only the sizes exist.
#[derive(Clone, Copy, Debug)]
pub struct SimMatrix {
    /// Outputs.
    pub(crate) rows: usize,
    /// Inputs.
    pub(crate) cols: usize,
    /// As stored.
    pub(crate) bytes: usize,
    pub(crate) is_fp8: bool,
}

/// Memory of either side. Contents exist only where the engine reads or writes them.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) label: &'static str,
    pub(crate) words: Vec<u32>,
    pub(crate) uses: Uses,
    pub(crate) blocks: Vec<Block>,
}

/// A block of keys and values: on the device, or of the swap space.
#[derive(Clone, Debug, Default)]
pub(crate) struct Block {
    /// By place in the block.
    pub(crate) values: Vec<u64>,
    /// The layer group whose keys and values they are.
    pub(crate) group: usize,
    pub(crate) uses: Uses,
}

impl Memory {
    pub(crate) fn new(label: &'static str) -> Self {
        Self { label, ..Self::default() }
    }

    /// Words from the start, as many as asked for.
    pub(crate) fn words_mut(&mut self, len: usize) -> &mut [u32] {
        if self.words.len() < len {
            self.words.resize(len, 0);
        }
        &mut self.words[..len]
    }

    pub(crate) fn block_mut(&mut self, block: usize) -> &mut Block {
        if self.blocks.len() <= block {
            self.blocks.resize_with(block + 1, Block::default);
        }
        &mut self.blocks[block]
    }
}

impl Block {
    pub(crate) fn place_mut(&mut self, place: usize) -> &mut u64 {
        if self.values.len() <= place {
            self.values.resize(place + 1, 0);
        }
        &mut self.values[place]
    }

    pub(crate) fn place(&self, place: usize) -> u64 {
        self.values.get(place).copied().unwrap_or(0)
    }
}
