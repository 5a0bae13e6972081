//! Cutting a prompt to what its end attends to most: four launches a layer, once a prompt.
//!
//! ```text
//! VotePrompt   each query's softmax over the context, by parts
//! VotePrompt   each position's share in all of them: votes
//! ChooseKept   positions that stay, for each key/value head
//! CopyKept     their keys and values, to blocks of their own
//! ```
//!
//! # Source
//! Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024, section 4; as
//! the CPU does it.

use crate::{Budget, DevicePtr, Kernel, KernelError, KernelSpec, KvShape, Launch, Source};

/// What a prompt's last tokens attend to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VotePrompt {
    cache: KvShape,
    /// Whether the softmaxes are known.
    votes: bool,
}

/// Arguments of [`VotePrompt`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct VotePromptParams {
    /// `[num_tokens, qkv_len]`, bf16; only the queries are read.
    pub qkv: DevicePtr,
    /// Strips as in `csrc/kv_cache.cuh`.
    pub keys: DevicePtr,
    pub blocks: DevicePtr,
    /// `[num_rows + 1]`.
    pub block_starts: DevicePtr,
    /// `[num_rows + 1]`.
    pub row_starts: DevicePtr,
    /// [`VotePrompt::part_floats`] of f32.
    pub parts: DevicePtr,
    /// `[num_kv_heads, context_len]`, f32: written by the second launch.
    pub votes: DevicePtr,
    /// Which of the step's rows.
    pub row: u32,
    pub context_len: u32,
    /// Tokens at the row's end that decide.
    pub num_observed: u32,
    pub num_heads: u32,
    pub num_kv_heads: u32,
    /// Multiplies scores before the softmax.
    pub scale: f32,
}

impl VotePrompt {
    /// Blocks that share a head's context.
    const PARTS: u32 = 64;

    /// The first launch, or the one that follows.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] if attention has no kernel for such heads either.
    pub fn new(cache: KvShape, votes: bool) -> Result<Self, KernelError> {
        cache.check("vote_prompt")?;
        Ok(Self { cache, votes })
    }

    /// Floats of `parts`, for so many query heads and tokens that decide.
    pub const fn part_floats(num_heads: usize, num_observed: usize) -> usize {
        2 * Self::PARTS as usize * num_heads * num_observed
    }
}

impl Kernel for VotePrompt {
    type Params = VotePromptParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source {
                file: "vote_prompt.cu",
                text: include_str!("../../csrc/vote_prompt.cu"),
            },
            entry: "vote_prompt",
            defines: [("VOTES", u32::from(self.votes)), ("PARTS", Self::PARTS)]
                .into_iter()
                .chain(self.cache.defines())
                .collect(),
            dynamic_smem: 0,
            params_bytes: size_of::<VotePromptParams>(),
            budget: Budget { registers: 128, static_smem: 24 * 1024 },
        }
    }

    fn launch(&self, params: &VotePromptParams) -> Launch {
        Launch { grid: [Self::PARTS, params.num_kv_heads, 1], block: [256, 1, 1] }
    }
}

/// The positions with the most votes.
#[derive(Clone, Copy, Debug)]
pub struct ChooseKept;

/// Arguments of [`ChooseKept`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ChooseKeptParams {
    /// `[num_kv_heads, context_len]`, f32.
    pub votes: DevicePtr,
    /// Room for as many words.
    pub bits: DevicePtr,
    /// `[num_kv_heads, num_kept]` words, written: positions in order.
    pub kept: DevicePtr,
    /// Tokens of the prompt.
    pub context_len: u32,
    /// Its last ones, which stay.
    pub num_observed: u32,
    /// Tokens that stay: more than decide, fewer than there are.
    pub num_kept: u32,
    /// Key/value heads.
    pub num_kv_heads: u32,
}

impl Kernel for ChooseKept {
    type Params = ChooseKeptParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source {
                file: "choose_kept.cu",
                text: include_str!("../../csrc/choose_kept.cu"),
            },
            entry: "choose_kept",
            defines: vec![("THREADS", 1024)],
            dynamic_smem: 0,
            params_bytes: size_of::<ChooseKeptParams>(),
            budget: Budget { registers: 64, static_smem: 2048 },
        }
    }

    fn launch(&self, params: &ChooseKeptParams) -> Launch {
        Launch::linear(params.num_kv_heads, 1024)
    }
}

/// Copies what stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CopyKept {
    /// Heads are multiples of 16.
    pub cache: KvShape,
}

/// Arguments of [`CopyKept`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct CopyKeptParams {
    /// Strips as in `csrc/kv_cache.cuh`, read and written.
    pub keys: DevicePtr,
    /// As `keys`.
    pub values: DevicePtr,
    pub blocks: DevicePtr,
    /// `[num_rows + 1]`.
    pub block_starts: DevicePtr,
    /// `[num_kv_heads, num_kept]`.
    pub kept: DevicePtr,
    /// Which of the step's rows.
    pub row: u32,
    /// In whole blocks.
    pub num_kept: u32,
    pub num_kv_heads: u32,
    /// Which of all blocks that are filled is the first of `to`.
    pub first: u32,
    /// How many of `to` there are.
    pub num_blocks: u32,
    /// Zero.
    pub reserved: u32,
    /// Blocks that nobody reads.
    pub to: [u32; CopyKept::MAX_BLOCKS],
}

impl CopyKept {
    /// Most blocks of one launch.
    pub const MAX_BLOCKS: usize = 512;
}

impl Kernel for CopyKept {
    type Params = CopyKeptParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source { file: "copy_kept.cu", text: include_str!("../../csrc/copy_kept.cu") },
            entry: "copy_kept",
            defines: [("MAX_BLOCKS", Self::MAX_BLOCKS as u32)]
                .into_iter()
                .chain(self.cache.defines())
                .collect(),
            dynamic_smem: 0,
            params_bytes: size_of::<CopyKeptParams>(),
            budget: Budget { registers: 64, static_smem: 0 },
        }
    }

    fn launch(&self, params: &CopyKeptParams) -> Launch {
        Launch { grid: [params.num_blocks, params.num_kv_heads, 1], block: [128, 1, 1] }
    }
}
