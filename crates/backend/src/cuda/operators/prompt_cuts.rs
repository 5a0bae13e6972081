//! Cutting prompts: what their ends attend to most, found and copied, all on the device.

use std::sync::Arc;

use inflight_kernels::{
    KvShape,
    ops::cut_prompt::{
        ChooseKept, ChooseKeptParams, CopyKept, CopyKeptParams, VotePrompt, VotePromptParams,
    },
};

use super::{check_buffer, word};
use crate::{
    AttentionShape, BackendError, CudaBackend, CutPrompts, KvLayout, PromptCut,
    cuda::{
        by_key::ByKey,
        loaded::{KernelLoader, Loaded, unsupported},
        memory::{CudaBuffer, Element},
        stream::CudaStream,
    },
};

/// The kernels, loaded when a prompt is first cut, and their working memory.
#[derive(Default)]
pub(super) struct PromptCuts {
    kernels: ByKey<KvShape, Kernels>,
    /// By lengths that are powers of two, so that there are few.
    rooms: ByKey<RoomKey, Room>,
}

struct Kernels {
    sum_up: Loaded<VotePrompt>,
    vote: Loaded<VotePrompt>,
    choose: Loaded<ChooseKept>,
    copy: Loaded<CopyKept>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct RoomKey {
    attention: AttentionShape,
    num_observed: usize,
    context_len: usize,
}

/// One prompt's, used by all layers and prompts in turn: they share a stream.
struct Room {
    parts: CudaBuffer,
    votes: CudaBuffer,
    bits: CudaBuffer,
    kept: CudaBuffer,
}

impl PromptCuts {
    pub(super) fn launch(
        &self,
        args: &CutPrompts<'_, CudaBackend>,
        cache: KvShape,
        layout: KvLayout,
        loader: &KernelLoader,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let qkv_len = args.step.num_tokens * args.attention.qkv_len();
        check_buffer(args.qkv, Element::Bf16, qkv_len, "cut_prompts: qkv");
        let kernels = self.kernels.get(cache, || Kernels::load(loader, cache))?;
        let num_blocks = args.kv.keys.bytes().min(args.kv.values.bytes()) / layout.block_bytes();
        for cut in args.cuts {
            let is_inside = cut.blocks.iter().all(|block| (*block as usize) < num_blocks);
            assert!(is_inside, "cut_prompts: a block is out of bounds");
            let num_kept = cut.blocks.len() * args.attention.block_size;
            let is_cut = cut.num_observed < num_kept && num_kept < cut.context_len;
            assert!(is_cut && cut.row < args.step.num_rows, "cut_prompts: nothing to cut");
            let room = self.room(args, cut, loader)?;
            kernels.choose(args, cut, &room, stream)?;
            kernels.copy(args, cut, &room, stream)?;
        }
        Ok(())
    }

    fn room(
        &self,
        args: &CutPrompts<'_, CudaBackend>,
        cut: &PromptCut,
        loader: &KernelLoader,
    ) -> Result<Arc<Room>, BackendError> {
        let key = RoomKey {
            attention: args.attention,
            num_observed: cut.num_observed,
            context_len: cut.context_len.next_power_of_two(),
        };
        self.rooms.get(key, || Room::new(&key, loader))
    }
}

impl Kernels {
    fn load(loader: &KernelLoader, cache: KvShape) -> Result<Self, BackendError> {
        let vote = |votes| loader.load(VotePrompt::new(cache, votes).map_err(unsupported)?);
        Ok(Self {
            sum_up: vote(false)?,
            vote: vote(true)?,
            choose: loader.load(ChooseKept)?,
            copy: loader.load(CopyKept { cache })?,
        })
    }

    /// Leaves the positions that stay.
    fn choose(
        &self,
        args: &CutPrompts<'_, CudaBackend>,
        cut: &PromptCut,
        room: &Room,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let AttentionShape { num_heads, num_kv_heads, block_size, .. } = args.attention;
        let params = VotePromptParams {
            qkv: args.qkv.address(),
            keys: args.kv.keys.address(),
            blocks: args.batch.blocks.address(),
            block_starts: args.batch.block_starts.address(),
            row_starts: args.batch.row_starts.address(),
            parts: room.parts.address(),
            votes: room.votes.address(),
            row: word(cut.row),
            context_len: word(cut.context_len),
            num_observed: word(cut.num_observed),
            num_heads: word(num_heads),
            num_kv_heads: word(num_kv_heads),
            scale: args.scale,
        };
        self.sum_up.launch(&params, stream)?;
        self.vote.launch(&params, stream)?;
        let params = ChooseKeptParams {
            votes: room.votes.address(),
            bits: room.bits.address(),
            kept: room.kept.address(),
            context_len: word(cut.context_len),
            num_observed: word(cut.num_observed),
            num_kept: word(cut.blocks.len() * block_size),
            num_kv_heads: word(num_kv_heads),
        };
        self.choose.launch(&params, stream)
    }

    fn copy(
        &self,
        args: &CutPrompts<'_, CudaBackend>,
        cut: &PromptCut,
        room: &Room,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        for (number, blocks) in cut.blocks.chunks(CopyKept::MAX_BLOCKS).enumerate() {
            let mut to = [0; CopyKept::MAX_BLOCKS];
            to[..blocks.len()].copy_from_slice(blocks);
            let params = CopyKeptParams {
                keys: args.kv.keys.address(),
                values: args.kv.values.address(),
                blocks: args.batch.blocks.address(),
                block_starts: args.batch.block_starts.address(),
                kept: room.kept.address(),
                row: word(cut.row),
                num_kept: word(cut.blocks.len() * args.attention.block_size),
                num_kv_heads: word(args.attention.num_kv_heads),
                first: word(number * CopyKept::MAX_BLOCKS),
                num_blocks: word(blocks.len()),
                reserved: 0,
                to,
            };
            self.copy.launch(&params, stream)?;
        }
        Ok(())
    }
}

impl Room {
    fn new(key: &RoomKey, loader: &KernelLoader) -> Result<Self, BackendError> {
        let AttentionShape { num_heads, num_kv_heads, .. } = key.attention;
        let alloc = |label, len, element| CudaBuffer::zeroed(&loader.device, label, len, element);
        let num_parts = VotePrompt::part_floats(num_heads, key.num_observed);
        let len = num_kv_heads * key.context_len;
        Ok(Self {
            parts: alloc("prompt softmaxes", num_parts, Element::F32)?,
            votes: alloc("prompt votes", len, Element::F32)?,
            bits: alloc("prompt order", len, Element::Word)?,
            kept: alloc("prompt choice", len, Element::Word)?,
        })
    }
}
