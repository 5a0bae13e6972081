//! A prompt cut to what its end attends to: `vote_prompt.cu`, `choose_kept.cu` and `copy_kept.cu`,
//! one after the other, against votes in f64.

use inflight_kernels::{
    Arch, KvNumbers, KvShape,
    ops::cut_prompt::{
        ChooseKept, ChooseKeptParams, CopyKept, CopyKeptParams, VotePrompt, VotePromptParams,
    },
};

use crate::{
    attention::{Layer, Row, Step},
    decode::NO_WINDOW,
    emulator::{Emulated, ORDERS, Order},
    kv::{Cache, Place},
    memory::Memory,
};

/// Which of a step's rows is cut; the next one's blocks are what it is copied to.
const ROW: usize = 1;
const REACH: usize = 2;

/// A prompt to cut.
struct Cut {
    step: Step,
    num_observed: usize,
    num_kept: usize,
}

impl Cut {
    fn new(layer: Layer, prompt: Row, num_observed: usize, num_kept: usize) -> Self {
        let others = [10, num_kept as u32].map(|context| Row { context, queries: 1 });
        let step = Step::new(layer, &[others[0], prompt, others[1]], u64::from(prompt.context));
        Self { step, num_observed, num_kept }
    }

    fn context(&self) -> usize {
        self.step.rows[ROW].context as usize
    }

    /// A position's head, in the blocks of a row.
    fn place(&self, row: usize, position: usize, kv_head: u32) -> Place {
        let block_size = self.step.layer.cache.block_size;
        let (block, offset) = (position as u32 / block_size, position as u32 % block_size);
        let at = self.step.block_starts.as_slice()[row] + block;
        Place { block: self.step.blocks.as_slice()[at as usize], kv_head, offset }
    }

    /// How much of all observed queries' attention goes to each position before them.
    ///
    /// # Source
    /// Li et al.: "SnapKV: LLM Knows What You are Looking for Before Generation", 2024, section 4.
    fn votes(&self, kv_head: u32) -> Vec<f64> {
        let (layer, context) = (self.step.layer, self.context());
        let num_voted = context - self.num_observed;
        let keys: Vec<Vec<f64>> = (0..context)
            .map(|position| self.step.keys.read(self.place(ROW, position, kv_head)))
            .collect();
        let mut votes = vec![0.0; num_voted];
        let first_token = self.step.row_starts.as_slice()[ROW + 1] as usize - self.num_observed;
        for observed in 0..self.num_observed {
            for head in kv_head * layer.group()..(kv_head + 1) * layer.group() {
                let query = self.step.query((first_token + observed) as u32, head);
                let query: Vec<f64> = query.iter().map(|x| f64::from(*x)).collect();
                let score = |key: &Vec<f64>| {
                    let products = query.iter().zip(key).map(|(q, k)| q * k);
                    products.sum::<f64>() * f64::from(layer.scale())
                };
                let weights: Vec<f64> =
                    keys[..=num_voted + observed].iter().map(|key| score(key).exp()).collect();
                let sum: f64 = weights.iter().sum();
                votes.iter_mut().zip(&weights).for_each(|(vote, weight)| *vote += weight / sum);
            }
        }
        votes
    }

    /// The votes that the kernel counts.
    fn vote(&mut self, order: Order) -> Option<Memory<f32>> {
        let Layer { cache, num_heads, num_kv_heads, .. } = self.step.layer;
        let part_floats = VotePrompt::part_floats(num_heads as usize, self.num_observed);
        let mut parts = Memory::<f32>::unwritten(part_floats);
        let mut votes = Memory::<f32>::unwritten(num_kv_heads as usize * self.context());
        for is_second in [false, true] {
            let kernel = VotePrompt::new(cache, is_second).unwrap();
            let kernel = Emulated::new(kernel, Arch::SM_80)?;
            let params = VotePromptParams {
                qkv: self.step.qkv.address(),
                keys: self.step.keys.bytes.address(),
                blocks: self.step.blocks.address(),
                block_starts: self.step.block_starts.address(),
                row_starts: self.step.row_starts.address(),
                parts: parts.address(),
                votes: votes.address(),
                row: ROW as u32,
                context_len: self.context() as u32,
                num_observed: self.num_observed as u32,
                num_heads,
                num_kv_heads,
                scale: self.step.layer.scale(),
            };
            // SAFETY: all memory is as large as its doc says, and the step is ours alone.
            unsafe { kernel.launch(&params, order) };
        }
        parts.as_slice();
        Some(votes)
    }

    /// The positions that stay, of each head.
    fn choose(&self, votes: &mut Memory<f32>, order: Order) -> Option<Memory<u32>> {
        let kernel = Emulated::new(ChooseKept, Arch::SM_80)?;
        let num_kv_heads = self.step.layer.num_kv_heads;
        let mut bits = Memory::<u32>::unwritten(votes.as_slice().len());
        let mut kept = Memory::<u32>::unwritten(num_kv_heads as usize * self.num_kept);
        let params = ChooseKeptParams {
            votes: votes.address(),
            bits: bits.address(),
            kept: kept.address(),
            context_len: self.context() as u32,
            num_observed: self.num_observed as u32,
            num_kept: self.num_kept as u32,
            num_kv_heads,
        };
        // SAFETY: memory is of the sizes that parameters say.
        unsafe { kernel.launch(&params, order) };
        bits.as_slice();
        Some(kept)
    }

    /// In two launches, the first of one block.
    fn copy(&mut self, kept: &mut Memory<u32>, order: Order) -> Option<()> {
        let Layer { cache, num_kv_heads, .. } = self.step.layer;
        let kernel = Emulated::new(CopyKept { cache }, Arch::SM_80)?;
        let starts = self.step.block_starts.as_slice();
        let blocks = starts[ROW + 1] as usize..starts[ROW + 2] as usize;
        let blocks = self.step.blocks.as_slice()[blocks].to_vec();
        for (first, blocks) in [(0, &blocks[..1]), (1, &blocks[1..])] {
            let mut to = [u32::MAX; CopyKept::MAX_BLOCKS];
            to[..blocks.len()].copy_from_slice(blocks);
            let params = CopyKeptParams {
                keys: self.step.keys.bytes.address(),
                values: self.step.values.bytes.address(),
                blocks: self.step.blocks.address(),
                block_starts: self.step.block_starts.address(),
                kept: kept.address(),
                row: ROW as u32,
                num_kept: self.num_kept as u32,
                num_kv_heads,
                first,
                num_blocks: blocks.len() as u32,
                reserved: 0,
                to,
            };
            // SAFETY: all memory is as large as its doc says, and the step is ours alone.
            unsafe { kernel.launch(&params, order) };
        }
        Some(())
    }

    /// What stays has the most votes, summed over neighbours, and lies in order; so does the end.
    fn check_choice(&self, votes: &[f64], kept: &[u32]) {
        let num_voted = votes.len();
        let (chosen, last) = kept.split_at(self.num_kept - self.num_observed);
        assert!(chosen.is_sorted_by(|a, b| a < b) && chosen.iter().all(|i| *i < num_voted as u32));
        assert!(last.iter().copied().eq(num_voted as u32..self.context() as u32));
        let sum = |i: usize| -> f64 {
            votes[i.saturating_sub(REACH)..(i + REACH + 1).min(num_voted)].iter().sum()
        };
        let is_chosen = |i: &usize| chosen.binary_search(&(*i as u32)).is_ok();
        let least = (0..num_voted).filter(is_chosen).map(sum).fold(f64::MAX, f64::min);
        let most = (0..num_voted).filter(|i| !is_chosen(i)).map(sum).fold(0.0, f64::max);
        // Those that are equal but for rounding may change places.
        assert!(least >= most * (1.0 - 1e-5), "{least} stays, {most} does not");
    }

    /// What was copied is what it was, and nothing else has changed.
    fn check_copy(&self, before: [&Cache; 2], kept: &[u32]) {
        let Layer { cache, num_kv_heads, .. } = self.step.layer;
        for (before, after) in before.into_iter().zip([&self.step.keys, &self.step.values]) {
            for (kv_head, kept) in (0..num_kv_heads).zip(kept.chunks(self.num_kept)) {
                for (at, position) in kept.iter().enumerate() {
                    let from = self.place(ROW, *position as usize, kv_head);
                    let to = self.place(ROW + 1, at, kv_head);
                    assert_eq!(after.codes(to), before.codes(from), "{position} at {at}");
                    assert_eq!(after.read(to), before.read(from), "{position} at {at}");
                }
            }
            let starts = self.step.block_starts.as_slice();
            let others = &self.step.blocks.as_slice()[..starts[ROW + 1] as usize];
            let len = before.bytes.as_slice().len() / (1 + starts[ROW + 2] as usize);
            assert!(self.num_kept.is_multiple_of(cache.block_size as usize));
            for block in others.iter().map(|block| *block as usize) {
                let bytes = |cache: &Cache| cache.bytes.as_slice()[block * len..][..len].to_vec();
                assert_eq!(bytes(after), bytes(before), "block {block} is read alone");
            }
        }
    }

    fn check(mut self, order: Order) -> Option<()> {
        let (context, num_kv_heads) = (self.context(), self.step.layer.num_kv_heads);
        let num_voted = context - self.num_observed;
        let mut votes = self.vote(order)?;
        let mut kept = self.choose(&mut votes, order)?;
        for kv_head in 0..num_kv_heads {
            let expected = self.votes(kv_head);
            let found = &votes.as_slice()[kv_head as usize * context..][..context];
            for (position, right) in expected.iter().enumerate() {
                let off = (f64::from(found[position]) - right).abs();
                assert!(off <= 1e-5 * right, "{position}: {}, not {right}", found[position]);
            }
            assert!(found[num_voted..].iter().all(|vote| vote.is_nan()), "nobody asked");
            let kept = &kept.as_slice()[kv_head as usize * self.num_kept..][..self.num_kept];
            self.check_choice(&expected, kept);
        }
        let before = [&self.step.keys, &self.step.values].map(Cache::clone);
        self.copy(&mut kept, order)?;
        self.check_copy([&before[0], &before[1]], kept.as_slice());
        Some(())
    }
}

#[test]
fn prompts_are_cut_to_what_their_ends_attend_to() {
    // More queries of a head than a tile has, and new tokens that do not decide.
    let cache = KvShape { numbers: KvNumbers::Bf16, head_dim: 80, block_size: 16 };
    let layer = Layer { cache, num_heads: 6, num_kv_heads: 2, window: NO_WINDOW };
    for order in ORDERS {
        let prompt = Row { context: 170, queries: 29 };
        let Some(()) = Cut::new(layer, prompt, 24, 48).check(order) else { return };
    }
    // Positions of more tiles than blocks that share them.
    let cache = KvShape { numbers: KvNumbers::Int4, head_dim: 32, block_size: 16 };
    let layer = Layer { cache, num_heads: 2, num_kv_heads: 1, window: NO_WINDOW };
    let prompt = Row { context: 4200, queries: 8 };
    Cut::new(layer, prompt, 8, 80).check(Order::Shuffled(1));
}
