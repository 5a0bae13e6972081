//! Turning keys of the KV cache: as few launches as layers and turns allow.

use inflight_kernels::ops::turn_blocks::{TurnBlocks, TurnBlocksParams};

use super::word;
use crate::{
    BackendError, CudaBackend,
    cuda::{loaded::Loaded, stream::CudaStream},
};

/// Enqueues turns.
///
/// # Errors
/// What launches report.
pub(super) fn launch(
    kernel: &Loaded<TurnBlocks>,
    args: &crate::TurnBlocks<'_, CudaBackend>,
    block_bytes: usize,
    stream: &CudaStream,
) -> Result<(), BackendError> {
    let smallest = args.kv.iter().map(|layer| layer.keys.bytes().min(layer.values.bytes())).min();
    let num_blocks = smallest.unwrap_or(0) / block_bytes.max(1);
    let fits = |block: u32| (block as usize) < num_blocks;
    let is_inside = args.turns.iter().all(|turn| fits(turn.from) && fits(turn.to));
    assert!(is_inside, "turn_blocks: a block is out of bounds");
    for layers in args.kv.chunks(TurnBlocks::MAX_LAYERS) {
        let mut parts = [[0; 2]; TurnBlocks::MAX_LAYERS];
        for (part, layer) in parts.iter_mut().zip(layers) {
            *part = [layer.keys.address(), layer.values.address()];
        }
        for chunk in args.turns.chunks(TurnBlocks::MAX_TURNS) {
            let mut turns = [[0; 4]; TurnBlocks::MAX_TURNS];
            for (words, turn) in turns.iter_mut().zip(chunk) {
                *words = [turn.from, turn.to, turn.by, 0];
            }
            let params = TurnBlocksParams {
                parts,
                rotary_table: args.rotary_table.address(),
                rotary_dim: word(args.rotary_dim),
                num_layers: word(layers.len()),
                num_turns: word(chunk.len()),
                num_kv_heads: word(args.attention.num_kv_heads),
                turns,
            };
            kernel.launch(&params, stream)?;
        }
    }
    Ok(())
}
