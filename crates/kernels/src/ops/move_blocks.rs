//! Copying whole blocks of the KV cache, within the device or to and from the host.

use crate::{Budget, DevicePtr, Kernel, KernelSpec, Launch, Source};

/// Copies parts of blocks between two places that have them.
///
/// Host memory is reached over the bus by the kernel itself: a block's many parts cost one launch
/// instead of one copy each. It keeps to a few processors, since the bus is the bottleneck and
/// steps need the others.
#[derive(Clone, Copy, Debug)]
pub struct MoveBlocks;

/// Arguments of [`MoveBlocks`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct MoveBlocksParams {
    /// Buffers on the device, `[num_blocks, part_bytes]` each.
    pub parts: [DevicePtr; MoveBlocks::MAX_PARTS],
    /// Where the first of these parts begins in the host's first block; 0 within the device.
    pub host: u64,
    /// Bytes from one block of the host to the next.
    pub host_stride: u64,
    /// A multiple of 16.
    pub part_bytes: u32,
    /// How many of `parts` there are.
    pub num_parts: u32,
    /// How many of `pairs` there are.
    pub num_pairs: u32,
    /// 0 within the device, 1 to the host, 2 from the host.
    pub way: u32,
    /// Blocks to copy from and to.
    pub pairs: [[u32; 2]; MoveBlocks::MAX_PAIRS],
}

impl MoveBlocks {
    /// Most parts of one launch.
    pub const MAX_PARTS: usize = 64;
    /// Most blocks of one launch.
    pub const MAX_PAIRS: usize = 128;
    const THREADS: u32 = 256;
    /// Blocks of threads that keep the bus busy: 32 of 256 threads with 8 loads of 16 bytes each
    /// are 1 MiB in flight.
    const MOST_OVER_THE_BUS: u32 = 32;
}

impl Kernel for MoveBlocks {
    type Params = MoveBlocksParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source {
                file: "move_blocks.cu",
                text: include_str!("../../csrc/move_blocks.cu"),
            },
            entry: "move_blocks",
            defines: vec![
                ("THREADS", Self::THREADS),
                ("MAX_PARTS", Self::MAX_PARTS as u32),
                ("MAX_PAIRS", Self::MAX_PAIRS as u32),
            ],
            dynamic_smem: 0,
            params_bytes: size_of::<MoveBlocksParams>(),
            budget: Budget { registers: 72, static_smem: 0 },
        }
    }

    fn launch(&self, params: &MoveBlocksParams) -> Launch {
        let items = params.num_pairs * params.num_parts;
        let most = if params.way == 0 { items } else { Self::MOST_OVER_THE_BUS };
        Launch::linear(items.min(most), Self::THREADS)
    }
}
