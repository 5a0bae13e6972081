//! A step's attention: its inputs by chance, its plan by the kernel that makes it, and what the
//! definition of attention gives, in f64.

use half::bf16;
use inflight_kernels::{
    Arch, DevicePtr, KvShape,
    ops::plan_attention::{PlanAttention, PlanAttentionParams, PlanLayout, head_groups},
};

use crate::{
    emulator::{Emulated, Order},
    kv::{Cache, Place},
    memory::{Dice, Memory},
};

/// A row: tokens known, and how many of them are new.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Row {
    pub(crate) context: u32,
    pub(crate) queries: u32,
}

/// What a layer is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layer {
    pub(crate) cache: KvShape,
    pub(crate) num_heads: u32,
    pub(crate) num_kv_heads: u32,
    /// Tokens a token sees, itself included.
    pub(crate) window: u32,
}

impl Layer {
    pub(crate) const fn group(&self) -> u32 {
        self.num_heads / self.num_kv_heads
    }

    pub(crate) const fn head_groups(&self) -> u32 {
        head_groups(self.num_heads, self.num_kv_heads)
    }

    pub(crate) fn scale(&self) -> f32 {
        1.0 / (self.cache.head_dim as f32).sqrt()
    }
}

/// All that attention reads, and what it writes.
pub(crate) struct Step {
    pub(crate) layer: Layer,
    pub(crate) rows: Vec<Row>,
    pub(crate) qkv: Memory<bf16>,
    pub(crate) keys: Cache,
    pub(crate) values: Cache,
    pub(crate) out: Memory<bf16>,
    pub(crate) blocks: Memory<u32>,
    pub(crate) block_starts: Memory<u32>,
    pub(crate) row_starts: Memory<u32>,
    pub(crate) context_lens: Memory<u32>,
}

/// A head's attention.
pub(crate) struct Expected {
    pub(crate) out: Vec<f64>,
    /// The same of the values' magnitudes: errors of weights count for so much.
    pub(crate) magnitude: Vec<f64>,
    /// Of the sum of `exp(score)`, as a power of 2.
    pub(crate) log2_denominator: f64,
}

impl Step {
    /// Blocks lie in any order. What no query of a row sees is no number, in blocks that are shared
    /// by all that is not seen.
    pub(crate) fn new(layer: Layer, rows: &[Row], seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let Layer { cache, num_heads, num_kv_heads, window } = layer;
        let num_blocks = |row: &Row| row.context.div_ceil(cache.block_size);
        let all: u32 = rows.iter().map(num_blocks).sum();
        let mut ids: Vec<u32> = (1..=all).collect();
        for i in (1..ids.len()).rev() {
            ids.swap(i, dice.below(i as u32 + 1) as usize);
        }
        let block_starts = starts(rows, num_blocks);
        let row_starts = starts(rows, |row| row.queries);
        let mut keys = Cache::new(cache, num_kv_heads, all + 1);
        let mut values = Cache::new(cache, num_kv_heads, all + 1);
        for (row, start) in rows.iter().zip(&block_starts) {
            let first = (row.context - row.queries.min(row.context) + 1).saturating_sub(window);
            ids[*start as usize..][..(first / cache.block_size) as usize].fill(0);
            for position in first..row.context {
                let block = ids[(start + position / cache.block_size) as usize];
                for kv_head in 0..num_kv_heads {
                    let place = Place { block, kv_head, offset: position % cache.block_size };
                    keys.write_any(place, &mut dice);
                    values.write_any(place, &mut dice);
                }
            }
        }
        let num_tokens = *row_starts.last().expect("an end") as usize;
        let heads = (num_heads + 2 * num_kv_heads) as usize;
        Self {
            layer,
            rows: rows.to_vec(),
            qkv: Memory::new(&dice.bf16s(num_tokens * heads * cache.head_dim as usize, 4.0)),
            keys,
            values,
            out: Memory::unwritten(num_tokens * (num_heads * cache.head_dim) as usize),
            blocks: Memory::new(&ids),
            block_starts: Memory::new(&block_starts),
            row_starts: Memory::new(&row_starts),
            context_lens: Memory::new(&rows.iter().map(|row| row.context).collect::<Vec<_>>()),
        }
    }

    pub(crate) fn num_tokens(&self) -> u32 {
        self.rows.iter().map(|row| row.queries).sum()
    }

    pub(crate) fn query(&self, token: u32, head: u32) -> &[bf16] {
        let Layer { cache, num_heads, num_kv_heads, .. } = self.layer;
        let heads = token * (num_heads + 2 * num_kv_heads) + head;
        &self.qkv.as_slice()[(heads * cache.head_dim) as usize..][..cache.head_dim as usize]
    }

    /// Makes the scores of a row's tokens larger.
    pub(crate) fn amplify(&mut self, row: usize, factor: f32) {
        let Layer { cache, num_heads, num_kv_heads, .. } = self.layer;
        let len = ((num_heads + 2 * num_kv_heads) * cache.head_dim) as usize;
        let starts = self.row_starts.as_slice();
        let tokens = starts[row] as usize * len..starts[row + 1] as usize * len;
        for x in &mut self.qkv.as_mut_slice()[tokens] {
            *x = bf16::from_f32(x.to_f32() * factor);
        }
    }

    /// Attention of a row's new token `query`.
    pub(crate) fn expected(&self, row: usize, query: u32, head: u32) -> Expected {
        let Row { context, queries } = self.rows[row];
        let last = context - queries + query;
        let first = (last + 1).saturating_sub(self.layer.window);
        let token = self.row_starts.as_slice()[row] + query;
        let q: Vec<f64> = self.query(token, head).iter().map(|x| f64::from(*x)).collect();
        let head_of = |cache: &Cache, position: u32| {
            let block_size = cache.shape.block_size;
            let index = self.block_starts.as_slice()[row] + position / block_size;
            cache.read(Place {
                block: self.blocks.as_slice()[index as usize],
                kv_head: head / self.layer.group(),
                offset: position % block_size,
            })
        };
        let score = |position| {
            let products = q.iter().zip(head_of(&self.keys, position)).map(|(q, k)| q * k);
            products.sum::<f64>() * f64::from(self.layer.scale())
        };
        let scores: Vec<f64> = (first..=last).map(score).collect();
        let greatest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - greatest).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let mut out = vec![0.0; q.len()];
        let mut magnitude = vec![0.0; q.len()];
        for (position, weight) in (first..=last).zip(weights) {
            for (dim, value) in head_of(&self.values, position).into_iter().enumerate() {
                out[dim] += weight / sum * value;
                magnitude[dim] += weight / sum * value.abs();
            }
        }
        let log2_denominator = sum.log2() + greatest * std::f64::consts::LOG2_E;
        Expected { out, magnitude, log2_denominator }
    }

    /// Compares the output of rows, whose weights or values are off by `tolerance` times
    /// themselves.
    pub(crate) fn check(&self, is_of: impl Fn(&Row) -> bool, tolerance: f64) {
        let Layer { cache, num_heads, .. } = self.layer;
        for (index, row) in self.rows.iter().enumerate().filter(|(_, row)| is_of(row)) {
            for query in 0..row.queries {
                let token = self.row_starts.as_slice()[index] + query;
                for head in 0..num_heads {
                    let at = ((token * num_heads + head) * cache.head_dim) as usize;
                    let found = &self.out.as_slice()[at..][..cache.head_dim as usize];
                    if row.context == 0 {
                        assert!(found.iter().all(|x| x.to_bits() == 0), "row {index} is empty");
                        continue;
                    }
                    let expected = self.expected(index, query, head);
                    for (dim, found) in found.iter().enumerate() {
                        let (right, found) = (expected.out[dim], f64::from(*found));
                        let allowed = tolerance * expected.magnitude[dim];
                        assert!(
                            (found - right).abs() <= allowed,
                            "row {index} ({row:?}), token {query}, head {head}, dim {dim}: \
                             {found}, not {right} within {allowed}; {:?}",
                            self.layer
                        );
                    }
                }
            }
        }
    }
}

/// A plan's layout and how rows are cut.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Division {
    pub(crate) layout: PlanLayout,
    pub(crate) prefill_tile: u32,
    /// Rows of one new token are cut into tiles of query rows as well.
    pub(crate) one_kernel: bool,
}

impl Division {
    /// With room for just the step.
    pub(crate) fn of(step: &Step, num_ctas: u32, prefill_tile: u32) -> Self {
        let num_rows = step.rows.len() as u32;
        let group = step.layer.group();
        let max_prefill_tiles =
            PlanLayout::prefill_tiles(step.num_tokens(), num_rows, group, prefill_tile);
        let layout =
            PlanLayout { max_rows: num_rows, num_ctas, max_prefill_tiles, max_prefixes: 0 };
        Self { layout, prefill_tile, one_kernel: false }
    }
}

/// The step's plan as the kernel makes it; `None` where there is no C++ compiler.
pub(crate) fn plan(step: &Step, division: Division, order: Order) -> Option<Memory<u32>> {
    let Layer { window, .. } = step.layer;
    let heads =
        PlannedHeads { head_groups: step.layer.head_groups(), group: step.layer.group(), window };
    plan_rows(&step.rows, heads, division, order)
}

/// What a plan needs to know of a layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlannedHeads {
    pub(crate) head_groups: u32,
    pub(crate) group: u32,
    pub(crate) window: u32,
}

/// As [`plan`], of rows alone.
pub(crate) fn plan_rows(
    rows: &[Row],
    heads: PlannedHeads,
    division: Division,
    order: Order,
) -> Option<Memory<u32>> {
    let kernel = Emulated::new(PlanAttention, Arch::SM_80)?;
    let mut context_lens = Memory::new(&rows.iter().map(|row| row.context).collect::<Vec<_>>());
    let mut row_starts = Memory::new(&starts(rows, |row| row.queries));
    let mut plan = Memory::unwritten(division.layout.num_words());
    let params = PlanAttentionParams {
        context_lens: context_lens.address(),
        row_starts: row_starts.address(),
        plan: plan.address(),
        num_rows: rows.len() as u32,
        max_rows: division.layout.max_rows,
        num_ctas: division.layout.num_ctas,
        max_prefill_tiles: division.layout.max_prefill_tiles,
        head_groups: heads.head_groups,
        group: heads.group,
        prefill_tile: division.prefill_tile,
        window: heads.window,
        one_kernel: u32::from(division.one_kernel),
        ..PlanAttentionParams::default()
    };
    // SAFETY: all memory is as large as its doc says, and ours alone.
    unsafe { kernel.launch(&params, order) };
    Some(plan)
}

/// Where each row's part of something begins, and the last one's end.
fn starts(rows: &[Row], count: impl Fn(&Row) -> u32) -> Vec<u32> {
    let ends = rows.iter().scan(0, |end, row| {
        *end += count(row);
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

/// Nothing, where a kernel takes an optional address.
pub(crate) const NULL: DevicePtr = 0;
