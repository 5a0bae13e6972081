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

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::{
        AttentionShape, Backend, BackendError, CpuConfig, KvBlocks, KvLayer, KvLayout, MoveBlocks,
        MoveWay,
    };

    /// Block 1 goes to the host and comes back as block 3; then somebody writes to it.
    #[test]
    fn a_block_that_was_written_to_is_a_fault() {
        let config = CpuConfig { num_threads: 1, ..CpuConfig::detect() };
        let backend = CpuBackend::new(config).unwrap();
        let attention =
            AttentionShape { num_heads: 1, num_kv_heads: 1, head_dim: 8, block_size: 4 };
        let layout = KvLayout::new(backend.kv_dtype(), attention);
        let alloc = || backend.alloc_kv("kv", 4 * layout.block_bytes()).unwrap();
        let layer = KvLayer { keys: alloc(), values: alloc() };
        let kv = KvBlocks::new(std::slice::from_ref(&layer), layout);
        let host = backend.alloc_host("host", 2 * kv.block_bytes() / 4).unwrap();
        let stream = backend.create_stream("compute").unwrap();
        let sums = BlockSums::new(4, 2);
        let check = |check| {
            let args = CheckBlocks { kv: &kv, sums: &sums, check };
            backend.check_blocks(args, &stream).unwrap();
        };
        let move_blocks = |pairs: &[BlockPair], way| {
            backend.move_blocks(MoveBlocks { kv: &kv, pairs, way }, &stream).unwrap();
        };
        let wait = || {
            let event = backend.create_event().unwrap();
            backend.record(&event, &stream).unwrap();
            backend.synchronize(&event)
        };
        layer.values.write::<u8>()[layout.block_bytes() + 2] = 7;
        check(BlockCheck::Note { full: &[0, 1], partial: &[] });
        let (out, back) = ([BlockPair { from: 1, to: 1 }], [BlockPair { from: 1, to: 3 }]);
        move_blocks(&out, MoveWay::ToHost(&host));
        check(BlockCheck::Left(&host, &out));
        check(BlockCheck::Returns(&host, &back));
        move_blocks(&back, MoveWay::FromHost(&host));
        check(BlockCheck::Verify(&[0, 1, 3]));
        wait().expect("nothing has changed");
        layer.values.write::<u8>()[3 * layout.block_bytes() + 2] = 6;
        check(BlockCheck::Verify(&[0, 1, 3]));
        match wait() {
            Err(BackendError::DeviceLost(reason)) => assert!(reason.contains("block 3 of the KV")),
            other => panic!("{other:?}"),
        }
    }
}
