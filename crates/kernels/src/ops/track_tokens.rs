//! Counting each sequence's tokens, for penalties.

use crate::{Budget, DevicePtr, Kernel, KernelSpec, Launch, Source};

/// Counts the step's input tokens for the rows that are tracked, clearing fresh ones first.
#[derive(Clone, Copy, Debug)]
pub struct TrackTokens;

/// Arguments of [`TrackTokens`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct TrackTokensParams {
    /// `[num_tokens]`.
    pub token_ids: DevicePtr,
    /// `[num_tokens]`.
    pub positions: DevicePtr,
    /// `[num_rows + 1]`.
    pub row_starts: DevicePtr,
    /// `[num_rows * 3]`.
    pub row_states: DevicePtr,
    /// `[max_rows, vocab_size]` words.
    pub token_counts: DevicePtr,
    pub num_rows: u32,
    pub vocab_size: u32,
}

impl TrackTokens {
    const THREADS: u32 = 1024;
}

impl Kernel for TrackTokens {
    type Params = TrackTokensParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source {
                file: "track_tokens.cu",
                text: include_str!("../../csrc/track_tokens.cu"),
            },
            entry: "track_tokens",
            defines: vec![("THREADS", Self::THREADS)],
            dynamic_smem: 0,
            params_bytes: size_of::<TrackTokensParams>(),
            budget: Budget { registers: 64, static_smem: 0 },
        }
    }

    fn launch(&self, params: &TrackTokensParams) -> Launch {
        Launch::linear(params.num_rows, Self::THREADS)
    }
}
