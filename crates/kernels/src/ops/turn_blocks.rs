//! Copying blocks of the KV cache with keys turned to other positions.

use crate::{Budget, DevicePtr, Kernel, KernelSpec, KvShape, Launch, Source};

/// Copies values as they are and keys rotated by some positions more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TurnBlocks {
    /// Heads are multiples of eight, at most 512 elements.
    pub cache: KvShape,
    /// Whether pairs are neighbours or half a head apart.
    pub interleaved: bool,
}

/// Arguments of [`TurnBlocks`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TurnBlocksParams {
    /// Keys and values of each layer, strips as in `csrc/kv_cache.cuh`.
    pub parts: [[DevicePtr; 2]; TurnBlocks::MAX_LAYERS],
    /// `[max_positions, rotary_dim]`, f32: cosines, then sines.
    pub rotary_table: DevicePtr,
    /// Even, at most `head_dim`.
    pub rotary_dim: u32,
    /// How many of `parts` there are.
    pub num_layers: u32,
    /// How many of `turns` there are.
    pub num_turns: u32,
    /// Key/value heads.
    pub num_kv_heads: u32,
    /// Blocks to copy from and to, by how many positions, and zero.
    pub turns: [[u32; 4]; TurnBlocks::MAX_TURNS],
}

impl TurnBlocks {
    /// Most layers of one launch.
    pub const MAX_LAYERS: usize = 64;
    /// Most blocks of one launch.
    pub const MAX_TURNS: usize = 64;
    const WARPS: u32 = 4;
}

impl Kernel for TurnBlocks {
    type Params = TurnBlocksParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source {
                file: "turn_blocks.cu",
                text: include_str!("../../csrc/turn_blocks.cu"),
            },
            entry: "turn_blocks",
            defines: [
                ("WARPS", Self::WARPS),
                ("INTERLEAVED", u32::from(self.interleaved)),
                ("MAX_LAYERS", Self::MAX_LAYERS as u32),
                ("MAX_TURNS", Self::MAX_TURNS as u32),
            ]
            .into_iter()
            .chain(self.cache.defines())
            .collect(),
            dynamic_smem: 0,
            params_bytes: size_of::<TurnBlocksParams>(),
            budget: Budget {
                registers: 64,
                static_smem: (Self::WARPS + 1) * self.cache.head_dim * 4,
            },
        }
    }

    fn launch(&self, params: &TurnBlocksParams) -> Launch {
        Launch {
            grid: [params.num_kv_heads, params.num_turns, params.num_layers],
            block: [32 * Self::WARPS, 1, 1],
        }
    }
}
