//! Moving blocks of the KV cache: as few launches as parts and pairs allow.

use inflight_kernels::ops::move_blocks::{MoveBlocks, MoveBlocksParams};

use super::word;
use crate::{
    BackendError, CudaBackend, MoveWay,
    cuda::{loaded::Loaded, stream::CudaStream},
};

/// Enqueues a move.
///
/// # Errors
/// [`BackendError::Unsupported`] if blocks cannot be copied 16 bytes at a time.
pub(super) fn launch(
    kernel: &Loaded<MoveBlocks>,
    args: &crate::MoveBlocks<'_, CudaBackend>,
    stream: &CudaStream,
) -> Result<(), BackendError> {
    let (part_bytes, stride) = (args.kv.part_bytes(), args.kv.block_bytes());
    if !part_bytes.is_multiple_of(16) {
        let reason = format!("blocks of {part_bytes} bytes a layer; moves need a multiple of 16");
        return Err(BackendError::Unsupported(reason));
    }
    let (way, host) = match args.way {
        MoveWay::WithinDevice => (0, None),
        MoveWay::ToHost(host) => (1, Some(host)),
        MoveWay::FromHost(host) => (2, Some(host)),
    };
    check_bounds(args, host.map(|host| host.bytes()));
    let chunks = args.kv.parts().chunks(MoveBlocks::MAX_PARTS).enumerate();
    for (number, buffers) in chunks {
        let mut parts = [0; MoveBlocks::MAX_PARTS];
        for (part, buffer) in parts.iter_mut().zip(buffers) {
            *part = buffer.address();
        }
        // With unified addressing the device knows pinned memory by the host's address.
        let first_part = (number * MoveBlocks::MAX_PARTS * part_bytes) as u64;
        let host = host.map_or(0, |host| host.as_ptr() as u64 + first_part);
        for chunk in args.pairs.chunks(MoveBlocks::MAX_PAIRS) {
            let mut pairs = [[0; 2]; MoveBlocks::MAX_PAIRS];
            for (words, pair) in pairs.iter_mut().zip(chunk) {
                *words = [pair.from, pair.to];
            }
            let params = MoveBlocksParams {
                parts,
                host,
                host_stride: stride as u64,
                part_bytes: word(part_bytes),
                num_parts: word(buffers.len()),
                num_pairs: word(chunk.len()),
                way,
                pairs,
            };
            kernel.launch(&params, stream)?;
        }
    }
    Ok(())
}

/// Asserts that every block lies in the memory that has it.
fn check_bounds(args: &crate::MoveBlocks<'_, CudaBackend>, host_bytes: Option<usize>) {
    let blocks = |bytes: usize, stride: usize| bytes / stride.max(1);
    let on_device = args.kv.parts().iter().map(|part| blocks(part.bytes(), args.kv.part_bytes()));
    let on_device = on_device.min().unwrap_or(0);
    let on_host = host_bytes.map_or(on_device, |bytes| blocks(bytes, args.kv.block_bytes()));
    let (from, to) = match args.way {
        MoveWay::WithinDevice => (on_device, on_device),
        MoveWay::ToHost(_) => (on_device, on_host),
        MoveWay::FromHost(_) => (on_host, on_device),
    };
    let fits = |pair: &crate::BlockPair| (pair.from as usize) < from && (pair.to as usize) < to;
    assert!(args.pairs.iter().all(fits), "move_blocks: a block is out of bounds");
}
