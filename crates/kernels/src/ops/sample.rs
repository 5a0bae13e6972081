//! Drawing one token for every sampled row, entirely on the device.
//!
//! One block takes one row and goes over its logits a few times: the greatest; a histogram; the
//! tokens of the one bin that matters, sorted; the draw. Nothing is sorted as a whole.

use crate::{Budget, DevicePtr, Kernel, KernelSpec, Launch, Source};

/// Draws the tokens and writes them, and what else the rows asked for, to the output words.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Whether rows may have rules that look at the whole distribution (typical, top-n-sigma, XTC).
    /// Without, they are ignored; with, fewer threads take a row.
    pub unusual: bool,
}

/// Arguments of [`Sample`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct SampleParams {
    /// `[num_sampled, vocab_size]`, f32. Only read.
    pub logits: DevicePtr,
    /// `[max_rows, vocab_size]`, f32: room for logits with penalties, bias and mask.
    pub adjusted: DevicePtr,
    /// `[max_rows, vocab_size]` words.
    pub token_counts: DevicePtr,
    /// `[num_sampled * 20]` words.
    pub sampling: DevicePtr,
    pub bias_ids: DevicePtr,
    pub bias_values: DevicePtr,
    /// Laid out as the backend's `late` says.
    pub late: DevicePtr,
    /// Laid out as the backend's `OutputLayout`.
    pub outputs: DevicePtr,
    /// What [`GreatestLogits`](super::greatest_logits::GreatestLogits) left; null without.
    pub greatest: DevicePtr,
    pub num_sampled: u32,
    pub max_rows: u32,
    /// At most [`Sample::MAX_VOCAB`].
    pub vocab_size: u32,
    /// Of `greatest`; 0: each row is looked through here.
    pub num_parts: u32,
}

impl Sample {
    /// Most tokens of a vocabulary.
    pub const MAX_VOCAB: u32 = 1 << 20;

    const fn threads(self) -> u32 {
        if self.unusual { 512 } else { 1024 }
    }
}

impl Kernel for Sample {
    type Params = SampleParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source { file: "sample.cu", text: include_str!("../../csrc/sample.cu") },
            entry: "sample",
            defines: vec![("THREADS", self.threads()), ("UNUSUAL", u32::from(self.unusual))],
            dynamic_smem: 0,
            params_bytes: size_of::<SampleParams>(),
            budget: Budget { registers: 64 * 1024 / self.threads(), static_smem: 48 * 1024 },
        }
    }

    fn launch(&self, params: &SampleParams) -> Launch {
        Launch::linear(params.num_sampled, self.threads())
    }
}
