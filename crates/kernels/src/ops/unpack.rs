//! Spreading a step's packed words over the arrays that operators read.

use crate::{Budget, DevicePtr, Kernel, KernelSpec, Launch, Source};

/// Copies every section to its array, replaces carried-over tokens, and fills the arrays up to the
/// padded shape with rows that do nothing.
///
/// The real counts are read from the packed words' header. A padding token has id 0, position 0 and
/// the slot `u32::MAX`, which nobody writes to; a padding row has context length 0, no blocks, no
/// state, and owns one padding token while there are any; a padding sample reads token 0 greedily.
#[derive(Clone, Copy, Debug)]
pub struct Unpack;

/// Most layer groups of a step behind the first.
pub const MAX_MORE_GROUPS: usize = 7;

/// What a layer group behind the first has of its own.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
#[allow(missing_docs)]
pub struct UnpackGroup {
    pub slot_mapping: DevicePtr,
    pub context_lens: DevicePtr,
    pub block_starts: DevicePtr,
}

/// Arguments of [`Unpack`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct UnpackParams {
    /// The step's packed words.
    pub packed: DevicePtr,
    /// Output words of the step before.
    pub previous: DevicePtr,
    pub token_ids: DevicePtr,
    pub positions: DevicePtr,
    pub slot_mapping: DevicePtr,
    pub row_starts: DevicePtr,
    pub context_lens: DevicePtr,
    pub block_starts: DevicePtr,
    pub row_states: DevicePtr,
    pub blocks: DevicePtr,
    pub sample_indices: DevicePtr,
    pub sampling: DevicePtr,
    pub bias_ids: DevicePtr,
    pub bias_values: DevicePtr,
    pub more_groups: [UnpackGroup; MAX_MORE_GROUPS],
    /// As [`super::prefix_attention::PrefixAttentionParams`] has them.
    pub prefixes: DevicePtr,
    pub prefix_rows: DevicePtr,
    /// Padded, as are the next two.
    pub num_tokens: u32,
    pub num_rows: u32,
    pub num_sampled: u32,
    pub num_more_groups: u32,
}

impl Unpack {
    const THREADS: u32 = 256;
    /// Enough for block tables of any length: the loop strides over the grid.
    const BLOCKS: u32 = 64;
}

impl Kernel for Unpack {
    type Params = UnpackParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source { file: "unpack.cu", text: include_str!("../../csrc/unpack.cu") },
            entry: "unpack",
            defines: vec![("THREADS", Self::THREADS)],
            dynamic_smem: 0,
            params_bytes: size_of::<UnpackParams>(),
            budget: Budget { registers: 64, static_smem: 0 },
        }
    }

    fn launch(&self, _: &UnpackParams) -> Launch {
        Launch::linear(Self::BLOCKS, Self::THREADS)
    }
}
