//! The greatest logits of parts of rows: what [`super::sample`] looks for first.
//!
//! A block that draws for a row has to read the whole of it, 0.5 MB of 128k tokens, which takes it
//! 16 us on an H200. Where rows are fewer than multiprocessors, the others had better help.

use crate::{Budget, DevicePtr, Kernel, KernelSpec, Launch, Source};

/// `keys[row][part]`: the greatest logit of a part of a row with the token's id, the lowest on
/// ties, as `csrc/logits.cuh` orders them.
#[derive(Clone, Copy, Debug)]
pub struct GreatestLogits;

/// Arguments of [`GreatestLogits`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct GreatestLogitsParams {
    /// `[num_rows, vocab_size]`, f32.
    pub logits: DevicePtr,
    /// `[num_rows, num_parts]` of u64, written.
    pub keys: DevicePtr,
    pub num_rows: u32,
    /// Not 0, at most [`GreatestLogits::MAX_PARTS`].
    pub num_parts: u32,
    pub vocab_size: u32,
    /// Zero.
    pub reserved: u32,
}

impl GreatestLogits {
    /// Most parts of a row.
    pub const MAX_PARTS: u32 = 32;
    /// Logits of a part, at least: less is read in no time.
    const MIN_LEN: u32 = 2048;
    const THREADS: u32 = 256;

    /// In how many parts so many rows are best looked through; 0: better whole, by
    /// [`super::sample::Sample`] itself.
    pub const fn num_parts(num_sms: u32, num_rows: u32, vocab_size: u32) -> u32 {
        if num_rows == 0 {
            return 0;
        }
        // Two blocks on a multiprocessor.
        let fill = 2 * num_sms / num_rows;
        let most = vocab_size / Self::MIN_LEN;
        let parts = if fill < most { fill } else { most };
        match parts {
            0..=3 => 0,
            4..Self::MAX_PARTS => parts,
            _ => Self::MAX_PARTS,
        }
    }
}

impl Kernel for GreatestLogits {
    type Params = GreatestLogitsParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source {
                file: "greatest_logits.cu",
                text: include_str!("../../csrc/greatest_logits.cu"),
            },
            entry: "greatest_logits",
            defines: vec![("THREADS", Self::THREADS)],
            dynamic_smem: 0,
            params_bytes: size_of::<GreatestLogitsParams>(),
            budget: Budget { registers: 64, static_smem: 64 },
        }
    }

    fn launch(&self, params: &GreatestLogitsParams) -> Launch {
        let grid = [params.num_parts, params.num_rows, 1];
        Launch { grid, block: [Self::THREADS, 1, 1] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_fill_the_gpu_and_are_no_crumbs() {
        let parts = |num_rows, vocab| GreatestLogits::num_parts(132, num_rows, vocab);
        assert_eq!([1, 8, 32, 66].map(|rows| parts(rows, 128_256)), [32, 32, 8, 4]);
        assert_eq!([0, 67, 256].map(|rows| parts(rows, 128_256)), [0, 0, 0]);
        assert_eq!([100, 8191, 8192, 49_152].map(|vocab| parts(1, vocab)), [0, 0, 4, 24]);
    }
}
