//! Blocks of the KV cache on their way: copies on the device, and moves to the host and back.

use std::time::Duration;

use inflight_backend::{
    Backend, BackendError, BlockCheck, BlockPair, CheckBlocks, KvBlocks, MoveBlocks, MoveWay,
};
use inflight_kv_cache::{BlockId, HostBlockId};
use inflight_scheduler::{Batch, BlockMove, MoveCosts, MoveOwner, Moves};

use crate::block_checks::BlockChecks;
use crate::io_slot::{Interval, IoSlot};

/// The KV cache as blocks, and the host memory for those of sequences that gave way.
pub(crate) struct BlockMover<B: Backend> {
    kv: KvBlocks<B>,
    /// `[num_swap_blocks, block_bytes]`, pinned where the device knows of that.
    swap_space: Option<B::HostBuffer>,
    /// Reused from batch to batch.
    pairs: Vec<BlockPair>,
    /// Blocks moved to the host and from it.
    pub(crate) num_moved: [u64; 2],
    /// For debugging: looks at whether blocks hold what they should.
    pub(crate) checks: Option<BlockChecks>,
}

impl<B: Backend> BlockMover<B> {
    pub(crate) fn new(
        backend: &B,
        kv: KvBlocks<B>,
        num_swap_blocks: usize,
    ) -> Result<Self, BackendError> {
        let num_words = num_swap_blocks.saturating_mul(kv.block_bytes()).div_ceil(4);
        let swap_space = match num_swap_blocks {
            0 => None,
            _ => Some(backend.alloc_host("swap space", num_words)?),
        };
        Ok(Self { kv, swap_space, pairs: Vec::new(), num_moved: [0; 2], checks: None })
    }

    /// Bytes of a block in all layers.
    pub(crate) fn block_bytes(&self) -> usize {
        self.kv.block_bytes()
    }

    /// Words of a block of the host that no enqueued move writes.
    pub(crate) fn read_host_block(
        &self,
        backend: &B,
        block: HostBlockId,
    ) -> Result<Vec<u32>, BackendError> {
        let num_words = self.kv.block_bytes() / 4;
        let mut words = vec![0; num_words];
        let host = self.swap_space.as_ref().expect("there is a block of the host");
        backend.read_host_part(host, block.0 as usize * num_words, &mut words)?;
        Ok(words)
    }

    /// Fills a block of the host that no enqueued move uses.
    pub(crate) fn write_host_block(
        &self,
        backend: &B,
        block: HostBlockId,
        words: &[u32],
    ) -> Result<(), BackendError> {
        let host = self.swap_space.as_ref().expect("there is a block of the host");
        if let Some(checks) = &self.checks {
            checks.sums.forget_host(block.0);
        }
        backend.write_host_part(host, block.0 as usize * words.len(), words)
    }

    /// Enqueues the check, if blocks are checked, of those that the batch uses again.
    pub(crate) fn verify(&self, backend: &B, compute: &B::Stream) -> Result<(), BackendError> {
        let Some(checks) = &self.checks else { return Ok(()) };
        self.check(backend, checks, BlockCheck::Verify(&checks.used_again), compute)
    }

    /// Enqueues noting what the blocks hold that the batch writes, if blocks are checked.
    pub(crate) fn note(&self, backend: &B, compute: &B::Stream) -> Result<(), BackendError> {
        let Some(checks) = &self.checks else { return Ok(()) };
        let BlockChecks { full, partial, .. } = checks;
        self.check(backend, checks, BlockCheck::Note { full, partial }, compute)
    }

    fn check(
        &self,
        backend: &B,
        checks: &BlockChecks,
        check: BlockCheck<'_, B>,
        stream: &B::Stream,
    ) -> Result<(), BackendError> {
        backend.check_blocks(CheckBlocks { kv: &self.kv, sums: &checks.sums, check }, stream)
    }

    /// Enqueues what a batch copies on the device.
    pub(crate) fn copy(
        &mut self,
        backend: &B,
        moves: &Moves,
        compute: &B::Stream,
    ) -> Result<(), BackendError> {
        if moves.copies.is_empty() {
            return Ok(());
        }
        let pairs = moves.copies.iter().map(|copy| (copy.from.0, copy.to.0));
        self.enqueue(backend, pairs, Way::WithinDevice, compute)
    }

    /// Enqueues what a batch moves to the host, and how long it takes.
    pub(crate) fn swap_out(
        &mut self,
        backend: &B,
        moves: &Moves,
        interval: &Interval<B>,
        d2h: &B::Stream,
    ) -> Result<(), BackendError> {
        self.num_moved[0] += moves.swap_out.len() as u64;
        let pairs = moves.swap_out.iter().map(|block| (block.device.0, block.host.0));
        backend.record(&interval.started, d2h)?;
        self.enqueue(backend, pairs, Way::ToHost, d2h)?;
        backend.record(&interval.done, d2h)
    }

    /// Enqueues what a batch moves from the host, and how long it takes.
    pub(crate) fn swap_in(
        &mut self,
        backend: &B,
        moves: &Moves,
        interval: &Interval<B>,
        h2d: &B::Stream,
    ) -> Result<(), BackendError> {
        self.num_moved[1] += moves.swap_in.len() as u64;
        let pairs = moves.swap_in.iter().map(|block| (block.host.0, block.device.0));
        backend.record(&interval.started, h2d)?;
        self.enqueue(backend, pairs, Way::FromHost, h2d)?;
        backend.record(&interval.done, h2d)
    }

    /// Moves `num_blocks` blocks, whose content does not matter, to the host and back, and waits.
    pub(crate) fn try_moves(
        &mut self,
        backend: &B,
        num_blocks: usize,
        io: &IoSlot<B>,
        [h2d, d2h]: [&B::Stream; 2],
    ) -> Result<Moves, BackendError> {
        let ids = 0..u32::try_from(num_blocks).expect("blocks are numbered by 32 bits");
        let owner = MoveOwner::PrefixCache;
        let block = |id| BlockMove { owner, device: BlockId(id), host: HostBlockId(id) };
        let blocks: Vec<_> = ids.map(block).collect();
        let moves = Moves { copies: Vec::new(), swap_out: blocks.clone(), swap_in: blocks };
        // The second time counts: the first one may have to load a kernel.
        for _ in 0..if num_blocks > 0 { 2 } else { 0 } {
            self.swap_out(backend, &moves, &io.swap_out, d2h)?;
            backend.synchronize(&io.swap_out.done)?;
            self.swap_in(backend, &moves, &io.swap_in, h2d)?;
            backend.synchronize(&io.swap_in.done)?;
        }
        Ok(moves)
    }

    fn enqueue(
        &mut self,
        backend: &B,
        pairs: impl Iterator<Item = (u32, u32)>,
        way: Way,
        stream: &B::Stream,
    ) -> Result<(), BackendError> {
        self.pairs.clear();
        self.pairs.extend(pairs.map(|(from, to)| BlockPair { from, to }));
        let swap_space = self.swap_space.as_ref();
        let host = || swap_space.expect("only a scheduler with swap space moves to the host");
        if let (Way::FromHost, Some(checks)) = (way, &self.checks) {
            self.check(backend, checks, BlockCheck::Returns(host(), &self.pairs), stream)?;
        }
        let to = match way {
            Way::WithinDevice => MoveWay::WithinDevice,
            Way::ToHost => MoveWay::ToHost(host()),
            Way::FromHost => MoveWay::FromHost(host()),
        };
        backend.move_blocks(MoveBlocks { kv: &self.kv, pairs: &self.pairs, way: to }, stream)?;
        match (way, &self.checks) {
            (Way::ToHost, Some(checks)) => {
                self.check(backend, checks, BlockCheck::Left(host(), &self.pairs), stream)
            }
            _ => Ok(()),
        }
    }
}

#[derive(Clone, Copy)]
enum Way {
    WithinDevice,
    ToHost,
    FromHost,
}

/// What moves and prefills were seen to cost: recent ones count more.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CostMeter {
    token_ns: Option<f64>,
    swap_out_ns: Option<f64>,
    swap_in_ns: Option<f64>,
}

/// Tokens of a batch from which its time says what a prompt's token costs: in smaller ones most of
/// it goes to reading weights.
const MIN_METERED_TOKENS: usize = 32;

impl CostMeter {
    /// Notes what a collected batch took on the device.
    pub(crate) fn note<B: Backend>(
        &mut self,
        backend: &B,
        io: &IoSlot<B>,
        batch: &Batch,
    ) -> Result<(), BackendError> {
        let took = |interval: &Interval<B>| backend.elapsed(&interval.started, &interval.done);
        if batch.num_tokens >= MIN_METERED_TOKENS {
            average(&mut self.token_ns, batch.num_tokens, took(&io.compute)?);
        }
        let Moves { swap_out, swap_in, .. } = &batch.moves;
        if !swap_out.is_empty() {
            average(&mut self.swap_out_ns, swap_out.len(), took(&io.swap_out)?);
        }
        if !swap_in.is_empty() {
            average(&mut self.swap_in_ns, swap_in.len(), took(&io.swap_in)?);
        }
        Ok(())
    }

    /// The costs, once all were seen.
    pub(crate) fn costs(&self) -> Option<MoveCosts> {
        Some(MoveCosts {
            token_ns: self.token_ns? as u64,
            swap_out_ns: self.swap_out_ns? as u64,
            swap_in_ns: self.swap_in_ns? as u64,
        })
    }
}

/// Moves an average towards what each of `count` took.
fn average(average: &mut Option<f64>, count: usize, took: Duration) {
    /// Weight of the latest.
    const LATEST: f64 = 0.25;
    if count == 0 || took.is_zero() {
        return;
    }
    let each = took.as_nanos() as f64 / count as f64;
    *average = Some(average.map_or(each, |average| average + LATEST * (each - average)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_known_when_all_were_seen() {
        let mut meter = CostMeter::default();
        average(&mut meter.token_ns, 100, Duration::from_micros(300));
        assert_eq!(meter.costs(), None);
        average(&mut meter.swap_out_ns, 4, Duration::from_micros(80));
        average(&mut meter.swap_in_ns, 2, Duration::from_micros(60));
        let costs = MoveCosts { token_ns: 3_000, swap_out_ns: 20_000, swap_in_ns: 30_000 };
        assert_eq!(meter.costs(), Some(costs));
        average(&mut meter.token_ns, 100, Duration::from_micros(700));
        average(&mut meter.token_ns, 0, Duration::from_micros(700));
        average(&mut meter.token_ns, 7, Duration::ZERO);
        assert_eq!(meter.costs(), Some(MoveCosts { token_ns: 4_000, ..costs }));
    }
}
