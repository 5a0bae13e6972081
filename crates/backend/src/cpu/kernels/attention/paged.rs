//! Keys or values of one head in the paged cache.

use std::ops::Range;

use crate::cpu::kernels::{
    kv::{KvElement, widen_slice},
    lanes::{CACHE_LINE, Lanes, prefetch},
};

/// One sequence's keys or values of one head.
#[derive(Clone, Copy)]
pub(super) struct PagedHead<'a, K> {
    /// `[num_blocks, num_kv_heads, block_size, head_dim]`.
    pub(super) cache: &'a [K],
    /// The sequence's block table.
    pub(super) blocks: &'a [u32],
    pub(super) num_kv_heads: usize,
    pub(super) kv_head: usize,
    pub(super) block_size: usize,
    pub(super) head_dim: usize,
}

impl<'a, K: KvElement> PagedHead<'a, K> {
    /// The elements of the first few of `positions`, as far as they lie in one block.
    ///
    /// # Panics
    /// If the block table is too short or names a block outside the cache.
    #[inline(always)]
    fn first_run(&self, positions: &Range<usize>) -> (usize, &'a [K]) {
        let (entry, offset) =
            (positions.start / self.block_size, positions.start % self.block_size);
        let len = (self.block_size - offset).min(positions.len());
        let block = self.blocks[entry] as usize;
        let row = (block * self.num_kv_heads + self.kv_head) * self.block_size + offset;
        (len, &self.cache[row * self.head_dim..(row + len) * self.head_dim])
    }

    /// Writes `positions` as f32 to `to`, `[positions, head_stride]`, and meanwhile has `ahead`
    /// fetched.
    #[inline(always)]
    pub(super) fn load<L: Lanes>(
        &self,
        l: L,
        mut positions: Range<usize>,
        (mut to, head_stride): (&mut [f32], usize),
        ahead: &mut Ahead<'_, K>,
    ) {
        let head_dim = self.head_dim;
        while !positions.is_empty() {
            let (len, from) = self.first_run(&positions);
            let (now, later) = to.split_at_mut(len * head_stride);
            ahead.fetch_some();
            if head_stride == head_dim {
                widen_slice(l, from, now);
            } else {
                for (from, now) in
                    from.chunks_exact(head_dim).zip(now.chunks_exact_mut(head_stride))
                {
                    widen_slice(l, from, &mut now[..head_dim]);
                }
            }
            positions.start += len;
            to = later;
        }
    }
}

/// Keys and values that will be needed next. Asking for their memory little by little keeps as many
/// requests under way as the processor can have, while it computes.
pub(super) struct Ahead<'a, K> {
    /// What is to come of keys, then of values.
    heads: [(PagedHead<'a, K>, Range<usize>); 2],
    /// Addresses of the present run that are still to be asked for.
    run: Range<*const u8>,
    /// Cache lines to ask for at a time.
    portion: usize,
}

impl<'a, K: KvElement> Ahead<'a, K> {
    /// About how many times [`Ahead::fetch_some`] is called while one tile is computed.
    const PORTIONS: usize = 12;

    /// The keys and values at `positions`.
    #[inline(always)]
    pub(super) fn new(
        keys: PagedHead<'a, K>,
        values: PagedHead<'a, K>,
        positions: Range<usize>,
    ) -> Self {
        let bytes = 2 * positions.len() * keys.head_dim * size_of::<K>();
        let portion = bytes.div_ceil(CACHE_LINE * Self::PORTIONS);
        let none = std::ptr::null();
        Self { heads: [(keys, positions.clone()), (values, positions)], run: none..none, portion }
    }

    /// Asks for some more memory.
    #[inline(always)]
    pub(super) fn fetch_some(&mut self) {
        self.fetch(self.portion);
    }

    /// Asks for all that is left.
    #[inline(always)]
    pub(super) fn fetch_rest(&mut self) {
        self.fetch(usize::MAX);
    }

    #[inline(always)]
    fn fetch(&mut self, lines: usize) {
        for _ in 0..lines {
            if self.run.is_empty() && !self.next_run() {
                return;
            }
            prefetch(self.run.start);
            self.run.start = self.run.start.wrapping_add(CACHE_LINE);
        }
    }

    fn next_run(&mut self) -> bool {
        let Some((head, positions)) = self.heads.iter_mut().find(|(_, rest)| !rest.is_empty())
        else {
            return false;
        };
        let (len, run) = head.first_run(positions);
        positions.start += len;
        let run = run.as_ptr_range();
        self.run = run.start.cast()..run.end.cast();
        true
    }
}
