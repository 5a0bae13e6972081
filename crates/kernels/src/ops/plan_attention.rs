//! Dividing a step's attention among the blocks of a grid that never changes.
//!
//! A row of one new token is a decode row. Its context is cut into tiles of [`TILE_LEN`] positions,
//! counted from position 0; a unit of work is one tile of one head group (up to eight query heads
//! that share a key/value head). All units in order of (row, head group, tile) form one line, of
//! which every block of the decode kernel takes an equal stretch:
//!
//! ```text
//! row         0                     1       2
//! head group  0       1             0   1   0         1
//! units       ......................................................
//! blocks      |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ----|-4-|
//! ```
//!
//! Where all rows are of one length and blocks get at most a fifteenth more work by it, stretches
//! are rounded up to whole rows: nothing is to be merged then. Where there are more blocks than
//! pieces, each row and head group begins with a block, as if it had tiles for all of its last one.
//!
//! A row that shares a prefix with others (see [`super::prefix_attention`]) has units behind it
//! alone. A piece (a block's share of one row and head group) that is not the whole leaves its sums
//! in a slot; the last block to arrive adds them up in order. Rows of several new tokens are cut
//! into tiles of query rows for the prefill kernel instead. The plan is computed on the device,
//! once a step and window; all layers of that window share it.
//!
//! # Source
//! The equal stretches are those of stream-K (Osama et al., 2023), applied to the context as in
//! Flash-Decoding (2023) and FlashInfer's and FlashMLA's plans.

use crate::{Budget, DevicePtr, Kernel, KernelSpec, Launch, Source};

/// Positions of a tile of the context.
pub const TILE_LEN: u32 = 64;
/// Most query heads of a head group.
pub const GROUP_HEADS: u32 = 8;
/// Fewest units that a block takes, so that little work is not cut into crumbs.
pub const MIN_UNITS: u32 = 2;
/// Twice as many where a row would be cut into more pieces than this: they are merged in turn.
pub const MANY_PIECES: u32 = 16;
/// Fewest units of shared prefixes that a block takes.
pub const MIN_PREFIX_UNITS: u32 = 4;

/// Computes the plan of one step.
#[derive(Clone, Copy, Debug)]
pub struct PlanAttention;

/// Arguments of [`PlanAttention`].
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
#[allow(missing_docs)]
pub struct PlanAttentionParams {
    /// `[num_rows]`.
    pub context_lens: DevicePtr,
    /// `[num_rows + 1]`.
    pub row_starts: DevicePtr,
    /// [`PlanLayout::num_words`] words, written.
    pub plan: DevicePtr,
    pub num_rows: u32,
    /// Of [`PlanLayout`], as are the next two.
    pub max_rows: u32,
    pub num_ctas: u32,
    pub max_prefill_tiles: u32,
    /// [`head_groups`] of the layer.
    pub head_groups: u32,
    /// Query heads of a key/value head.
    pub group: u32,
    /// Query rows (tokens times heads of a group) of a prefill tile.
    pub prefill_tile: u32,
    /// Tokens a token sees, itself included; `u32::MAX`: all before it.
    pub window: u32,
    /// 1: rows of one new token are cut into tiles of query rows as well; the decode kernel has no
    /// rows then.
    pub one_kernel: u32,
    /// Of [`PrefixAttention`], as is `num_prefix_ctas`.
    pub prefix_tile: u32,
    /// As [`PrefixAttentionParams`] has them; null: no row leaves a prefix to that kernel.
    ///
    /// [`PrefixAttentionParams`]: super::prefix_attention::PrefixAttentionParams
    pub prefixes: DevicePtr,
    pub prefix_rows: DevicePtr,
    /// In `plan`, as is the next.
    pub prefix_spans: DevicePtr,
    pub row_prefixes: DevicePtr,
    pub num_prefix_ctas: u32,
    pub num_kv_heads: u32,
}

/// Head groups of a layer.
pub const fn head_groups(num_heads: u32, num_kv_heads: u32) -> u32 {
    num_kv_heads * (num_heads / num_kv_heads).div_ceil(GROUP_HEADS)
}

/// Where the parts of a plan lie.
///
/// ```text
/// header        [8]                      units of a block, all units, decode rows, prefill tiles,
///                                        longest context of those; units of a block and all
///                                        units of shared prefixes
/// decode_rows   [max_rows * 4]           row, its first unit, its tiles, its first tile
/// cta_rows      [num_ctas, made even]    index in `decode_rows` where a block starts
/// prefill_tiles [max_prefill_tiles * 2]  row, first query row
/// prefix_spans  [max_prefixes * 4]       first unit, tiles, first strip
/// row_prefixes  [max_rows * 2]           prefix or NONE, place among its rows; none if no prefixes
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanLayout {
    /// Most rows of a step.
    pub max_rows: u32,
    /// Blocks of the decode kernel: [`super::decode_attention::DecodeAttention::num_ctas`].
    pub num_ctas: u32,
    /// [`PlanLayout::prefill_tiles`] of the largest step.
    pub max_prefill_tiles: u32,
    /// Most prefixes that rows of a step share.
    pub max_prefixes: u32,
}

impl PlanLayout {
    /// Most prefill tiles of a step of this shape: a row may leave its last tile part empty.
    pub const fn prefill_tiles(num_tokens: u32, num_rows: u32, group: u32, tile: u32) -> u32 {
        let rows = if num_rows < num_tokens { num_rows } else { num_tokens };
        num_tokens * group / tile + rows
    }

    /// Where `prefill_tiles` begins, in words.
    pub const fn prefill_tiles_at(&self) -> u32 {
        8 + 4 * self.max_rows + self.num_ctas.next_multiple_of(2)
    }

    /// Where `prefix_spans` begins, in words; aligned for reads of four.
    pub const fn prefix_spans_at(&self) -> u32 {
        (self.prefill_tiles_at() + 2 * self.max_prefill_tiles).next_multiple_of(4)
    }

    /// Where `row_prefixes` begins, in words.
    pub const fn row_prefixes_at(&self) -> u32 {
        self.prefix_spans_at() + 4 * self.max_prefixes
    }

    /// All words.
    pub const fn num_words(&self) -> usize {
        let rows = if self.max_prefixes == 0 { 0 } else { self.max_rows };
        self.row_prefixes_at() as usize + 2 * rows as usize
    }
}

impl PlanAttention {
    const THREADS: u32 = 1024;
}

impl Kernel for PlanAttention {
    type Params = PlanAttentionParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source {
                file: "plan_attention.cu",
                text: include_str!("../../csrc/plan_attention.cu"),
            },
            entry: "plan_attention",
            defines: vec![
                ("THREADS", Self::THREADS),
                ("TILE_LEN", TILE_LEN),
                ("MIN_UNITS", MIN_UNITS),
                ("MANY_PIECES", MANY_PIECES),
                ("MIN_PREFIX_UNITS", MIN_PREFIX_UNITS),
            ],
            dynamic_smem: 0,
            params_bytes: size_of::<PlanAttentionParams>(),
            budget: Budget { registers: 64, static_smem: 1024 },
        }
    }

    fn launch(&self, _: &PlanAttentionParams) -> Launch {
        Launch::linear(1, Self::THREADS)
    }
}
