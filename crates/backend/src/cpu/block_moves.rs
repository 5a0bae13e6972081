//! Moving blocks of the KV cache: plain copies, part by part.

use super::{CpuBackend, CpuBuffer, backend::CpuHostBuffer};
use crate::{BlockPair, MoveBlocks, MoveWay};

/// [`MoveBlocks`] with handles instead of references.
pub(super) struct MoveOperands {
    parts: Vec<CpuBuffer>,
    part_bytes: usize,
    pairs: Vec<BlockPair>,
    host: Option<CpuBuffer>,
    from_host: bool,
}

impl MoveOperands {
    pub(super) fn new(args: &MoveBlocks<'_, CpuBackend>) -> Self {
        let (host, from_host) = match args.way {
            MoveWay::WithinDevice => (None, false),
            MoveWay::ToHost(CpuHostBuffer(host)) => (Some(host.clone()), false),
            MoveWay::FromHost(CpuHostBuffer(host)) => (Some(host.clone()), true),
        };
        let (parts, part_bytes) = (args.kv.parts().to_vec(), args.kv.part_bytes());
        Self { parts, part_bytes, pairs: args.pairs.to_vec(), host, from_host }
    }

    /// Each part's turn is over before the next one's begins, so that a step waits for one part at
    /// most. The host's memory comes last, so that nobody waits in a circle.
    pub(super) fn run(&self) {
        for (number, part) in self.parts.iter().enumerate() {
            let _turn = part.take_turns();
            match &self.host {
                None => self.copy_within(part),
                Some(host) => self.copy_over(number, part, host),
            }
        }
    }

    fn copy_within(&self, part: &CpuBuffer) {
        let mut bytes = part.write::<u8>();
        for &BlockPair { from, to } in &self.pairs {
            let from = from as usize * self.part_bytes;
            bytes.copy_within(from..from + self.part_bytes, to as usize * self.part_bytes);
        }
    }

    fn copy_over(&self, number: usize, part: &CpuBuffer, host: &CpuBuffer) {
        let len = self.part_bytes;
        let on_device = |block: u32| block as usize * len..(block as usize + 1) * len;
        let on_host = |block: u32| {
            let start = (block as usize * self.parts.len() + number) * len;
            start..start + len
        };
        let _turn = host.take_turns();
        if self.from_host {
            let (mut device, host) = (part.write::<u8>(), host.read::<u8>());
            for &BlockPair { from, to } in &self.pairs {
                device[on_device(to)].copy_from_slice(&host[on_host(from)]);
            }
        } else {
            let (device, mut host) = (part.read::<u8>(), host.write::<u8>());
            for &BlockPair { from, to } in &self.pairs {
                host[on_host(to)].copy_from_slice(&device[on_device(from)]);
            }
        }
    }
}
