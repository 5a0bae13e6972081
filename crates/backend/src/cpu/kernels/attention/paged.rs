//! Keys or values of one head in the paged cache.

use std::ops::Range;

use crate::KvLayout;
use crate::cpu::kernels::{
    kv::{KvElement, places},
    lanes::{CACHE_LINE, Lanes, prefetch},
};

/// One sequence's keys or values of one head.
#[derive(Clone, Copy)]
pub(super) struct PagedHead<'a, K> {
    /// See [`KvLayout`].
    pub(super) cache: &'a [K],
    /// The sequence's block table.
    pub(super) blocks: &'a [u32],
    pub(super) layout: KvLayout,
    pub(super) kv_head: usize,
}

/// Neighbouring positions of one strip.
struct Run<'a, K> {
    strip: &'a [K],
    /// Of the first position, in the strip.
    offset: usize,
    len: usize,
}

impl<'a, K: KvElement> PagedHead<'a, K> {
    /// The first few of `positions`, as far as they lie in one block.
    ///
    /// # Panics
    /// If the block table is too short or names a block outside the cache.
    #[inline(always)]
    fn first_run(&self, positions: &Range<usize>) -> Run<'a, K> {
        let block_size = self.layout.block_size;
        let (entry, offset) = (positions.start / block_size, positions.start % block_size);
        let len = (block_size - offset).min(positions.len());
        let block = self.blocks[entry] as usize;
        let strip_len = self.layout.strip_bytes() / size_of::<K>();
        let start = (block * self.layout.num_kv_heads + self.kv_head) * strip_len;
        Run { strip: &self.cache[start..start + strip_len], offset, len }
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
        let head_dim = self.layout.head_dim;
        let has_scales = self.layout.scale_bytes() > 0;
        while !positions.is_empty() {
            let run = self.first_run(&positions);
            let (now, later) = to.split_at_mut(run.len * head_stride);
            ahead.fetch_some();
            if head_stride == head_dim && !has_scales {
                K::widen_head(l, run.heads(&self.layout), &[], now);
            } else {
                for (token, now) in (run.offset..).zip(now.chunks_exact_mut(head_stride)) {
                    let [codes, scales] = places::<K>(&self.layout, token);
                    let (codes, scales) = (&run.strip[codes], &run.strip[scales]);
                    K::widen_head(l, codes, scales, &mut now[..head_dim]);
                }
            }
            positions.start += run.len;
            to = later;
        }
    }
}

impl<'a, K: KvElement> Run<'a, K> {
    /// Without scales: they are few, and mostly in the cache line behind.
    #[inline(always)]
    fn heads(&self, layout: &KvLayout) -> &'a [K] {
        let head_len = layout.head_bytes() / size_of::<K>();
        &self.strip[self.offset * head_len..(self.offset + self.len) * head_len]
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
        let bytes = 2 * positions.len() * keys.layout.head_bytes();
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
        let run = head.first_run(positions);
        positions.start += run.len;
        let run = run.heads(&head.layout).as_ptr_range();
        self.run = run.start.cast()..run.end.cast();
        true
    }
}
