//! Checksums of blocks of the KV cache, part by part.

use super::{CpuBackend, CpuBuffer, backend::CpuHostBuffer};
use crate::{BlockCheck, BlockPair, BlockSum, BlockSums, CheckBlocks, SumCheck};

/// [`CheckBlocks`] with handles instead of references.
pub(super) struct CheckOperands {
    parts: Vec<CpuBuffer>,
    part_bytes: usize,
    sums: BlockSums,
    check: Check,
}

enum Check {
    Note { full: Vec<u32>, partial: Vec<u32> },
    Verify(Vec<u32>),
    Left(CpuBuffer, Vec<BlockPair>),
    Returns(CpuBuffer, Vec<BlockPair>),
}

impl CheckOperands {
    pub(super) fn new(args: &CheckBlocks<'_, CpuBackend>) -> Self {
        let check = match args.check {
            BlockCheck::Note { full, partial } => {
                Check::Note { full: full.to_vec(), partial: partial.to_vec() }
            }
            BlockCheck::Verify(blocks) => Check::Verify(blocks.to_vec()),
            BlockCheck::Left(CpuHostBuffer(host), pairs) => {
                Check::Left(host.clone(), pairs.to_vec())
            }
            BlockCheck::Returns(CpuHostBuffer(host), pairs) => {
                Check::Returns(host.clone(), pairs.to_vec())
            }
        };
        let (parts, part_bytes) = (args.kv.parts().to_vec(), args.kv.part_bytes());
        Self { parts, part_bytes, sums: args.sums.clone(), check }
    }

    /// # Panics
    /// When a block holds something else than it should: the device cannot be trusted any more.
    pub(super) fn run(&self) {
        let checked = match &self.check {
            Check::Note { full, partial } => {
                let note = SumCheck::Note { full, partial };
                self.sums.check(note, |block| self.on_device(block))
            }
            Check::Verify(blocks) => {
                self.sums.check(SumCheck::Verify(blocks), |block| self.on_device(block))
            }
            Check::Left(host, pairs) => {
                self.sums.check(SumCheck::Left(pairs), |block| self.on_host(host, block))
            }
            Check::Returns(host, pairs) => {
                self.sums.check(SumCheck::Returns(pairs), |block| self.on_host(host, block))
            }
        };
        if let Err(changed) = checked {
            panic!("{changed}");
        }
    }

    fn on_device(&self, block: u32) -> u64 {
        let start = block as usize * self.part_bytes;
        let with = |sum: BlockSum, part: &CpuBuffer| {
            let _turn = part.take_turns();
            sum.with(&part.read::<u8>()[start..start + self.part_bytes])
        };
        self.parts.iter().fold(BlockSum::default(), with).get()
    }

    fn on_host(&self, host: &CpuBuffer, block: u32) -> u64 {
        let len = self.parts.len() * self.part_bytes;
        let start = block as usize * len;
        let _turn = host.take_turns();
        let bytes = host.read::<u8>();
        let with = |sum: BlockSum, part: &[u8]| sum.with(part);
        bytes[start..start + len].chunks(self.part_bytes).fold(BlockSum::default(), with).get()
    }
}
