//! The operators other than matrix products, on plain slices.
//!
//! Reading order: [`lanes`] (vector instructions), [`exp`]; then in a step's order [`batch`],
//! [`tracking`], [`embedding`], [`norm`], [`rope`], [`attention`], [`activation`], [`sampling`].
//! [`kv`] converts to and from the KV cache's element type, [`turn`] moves keys on,
//! [`cut`] keeps of a prompt what matters.
//!
//! Slices may be longer than what an operator uses: buffers are sized for the largest step.
//!
//! Invariant: a token's numbers never depend on other rows, on how its prefill was cut into chunks,
//! or on the number of threads: work is cut where nothing is summed across, or at absolute
//! positions.

mod activation;
mod attention;
mod batch;
mod ceilings;
mod cut;
mod embedding;
mod exp;
mod kv;
mod lanes;
mod norm;
mod rope;
mod sampling;
mod tracking;
mod turn;

pub(crate) use activation::{GateAndMul, gate_and_mul};
pub(crate) use attention::{Attention, attention};
pub(crate) use batch::{BatchMut, GatherSampled, GroupMut, gather_sampled, unpack};
pub(crate) use ceilings::measure_ceilings;
pub(crate) use cut::{CutPrompts, cut_prompts};
pub(crate) use embedding::embed;
pub(crate) use kv::{Fp8, Int4, Int8, KvElement};
pub(crate) use norm::{RmsNorm, rms_norm};
pub(crate) use rope::{RopeAndCache, rope_and_cache};
pub(crate) use sampling::{Sample, sample};
pub(crate) use tracking::{TrackTokens, track_tokens};
pub(crate) use turn::{TurnBlocks, turn_blocks};

use super::{pool::ThreadPool, simd::SimdLevel};

/// What operators run on.
#[derive(Clone, Copy)]
pub(crate) struct Cores<'a> {
    /// The threads.
    pub(crate) pool: &'a ThreadPool,
    /// The instructions.
    pub(crate) simd: SimdLevel,
}

impl Cores<'_> {
    /// Fewest elements worth a task of their own: about as long to compute as a task is to start.
    const MIN_ELEMENTS: usize = 8192;

    /// Calls `task` with ranges of rows that cover `0..num_rows`, on all threads if there is
    /// enough to do.
    fn for_rows(
        &self,
        num_rows: usize,
        row_len: usize,
        task: impl Fn(std::ops::Range<usize>) + Sync,
    ) {
        let min_rows = Self::MIN_ELEMENTS.div_ceil(row_len.max(1));
        self.pool.run_chunks(num_rows, min_rows, task);
    }
}

#[cfg(test)]
mod testing;
