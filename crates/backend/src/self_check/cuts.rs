//! Prompts that are cut to what their ends attend to.

use std::collections::HashMap;

use super::{
    Pair,
    rig::{Rig, normal},
    steps::{RandomRow, RandomStep},
};
use crate::{AttentionShape, Backend, BackendError, CutPrompts, PromptCut};

/// A prompt to cut, beside others.
#[derive(Clone, Copy)]
struct Case {
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    block_size: usize,
    context_len: usize,
    /// Blocks that stay.
    num_blocks: usize,
}

impl Case {
    const fn new(heads: [usize; 3], block_size: usize, prompt: [usize; 2]) -> Self {
        let [num_heads, num_kv_heads, head_dim] = heads;
        let [context_len, num_blocks] = prompt;
        Self { num_heads, num_kv_heads, head_dim, block_size, context_len, num_blocks }
    }
}

/// Tokens that decide.
const NUM_OBSERVED: usize = 32;
/// Of all that stay. Where votes are equal but for the order of sums, either may.
const TOLERANCE: f64 = 0.01;

/// Groups of 4, 3, 8 and 1 heads; more blocks than one launch copies; all but one block.
const CASES: [Case; 4] = [
    Case::new([8, 2, 128], 16, [700, 8]),
    Case::new([9, 3, 64], 4, [3000, 520]),
    Case::new([16, 2, 64], 32, [1000, 3]),
    Case::new([2, 2, 256], 16, [113, 7]),
];

pub(super) fn check<B: Backend>(pair: &mut Pair<'_, B>) -> Result<(), BackendError> {
    if !pair.device.backend.cuts_prompts() {
        return Ok(());
    }
    for case in CASES {
        let Case { num_heads, num_kv_heads, head_dim, context_len, num_blocks, .. } = case;
        let num_kept = num_blocks * case.block_size;
        let name = format!(
            "cut_prompts, {num_kept} of {context_len}, {num_heads}/{num_kv_heads} heads of \
             {head_dim}"
        );
        let kept = case.kept(&pair.device)?;
        let expected = case.kept(&pair.reference)?;
        pair.same(name, &kept, &expected, TOLERANCE);
    }
    Ok(())
}

impl Case {
    /// Which position's keys and which one's values each place has, by a cache in which a token's
    /// numbers tell.
    fn kept<B: Backend>(self, rig: &Rig<'_, B>) -> Result<Vec<u32>, BackendError> {
        let Self { num_heads, num_kv_heads, head_dim, block_size, .. } = self;
        let attention = AttentionShape { num_heads, num_kv_heads, head_dim, block_size };
        // The prompt's last row is the second of three.
        let rows = [(20, 1), (self.context_len, NUM_OBSERVED + 5), (40, 40)];
        let rows = rows.map(|(context_len, num_new)| RandomRow { context_len, num_new });
        let mut step = RandomStep::new(&rows, block_size);
        let first = u32::try_from(step.num_cache_blocks).expect("checks are small");
        let to: Vec<u32> = (first..).step_by(2).take(self.num_blocks).collect();
        step.num_cache_blocks += 2 * self.num_blocks;
        let (batch, shape) = step.unpack(rig)?;

        let layout = rig.backend.kv_layout(attention);
        let len = step.num_cache_blocks * num_kv_heads * block_size * head_dim;
        let (keys, values) = (normal(70, len), normal(71, len));
        let kv = rig.kv(layout, &keys, &values)?;
        let before =
            [&kv.keys, &kv.values].map(|buffer| rig.read_kv(buffer, layout, step.num_cache_blocks));
        let qkv = rig.activations(&normal(72, shape.num_tokens * attention.qkv_len()))?;
        let (row, context_len) = (1, self.context_len);
        let cut = PromptCut { row, context_len, num_observed: NUM_OBSERVED, blocks: to.clone() };
        let args = CutPrompts {
            qkv: &qkv,
            kv: &kv,
            attention,
            scale: 1.0 / (head_dim as f32).sqrt(),
            batch: &batch,
            step: shape,
            cuts: &[cut],
        };
        rig.backend.cut_prompts(args, &rig.stream)?;
        let mut kept = Vec::new();
        for (before, buffer) in before.into_iter().zip([&kv.keys, &kv.values]) {
            let (before, after) = (before?, rig.read_kv(buffer, layout, step.num_cache_blocks)?);
            let cache = Cache { numbers: &before, attention };
            let places = Cache { numbers: &after, attention };
            let blocks = &step.inputs.blocks[step.inputs.block_starts[row] as usize..];
            for kv_head in 0..num_kv_heads {
                let known: HashMap<Vec<u32>, usize> =
                    (0..context_len).map(|i| (cache.head(blocks, kv_head, i), i)).collect();
                let position = |i: usize| {
                    let found = known.get(&places.head(&to, kv_head, i));
                    found.map_or(u32::MAX, |position| *position as u32)
                };
                kept.extend((0..self.num_blocks * block_size).map(position));
            }
        }
        Ok(kept)
    }
}

/// Keys or values, `[num_blocks, num_kv_heads, block_size, head_dim]`.
struct Cache<'a> {
    numbers: &'a [f32],
    attention: AttentionShape,
}

impl Cache<'_> {
    /// The bits of a token's head.
    fn head(&self, blocks: &[u32], kv_head: usize, position: usize) -> Vec<u32> {
        let AttentionShape { num_kv_heads, head_dim, block_size, .. } = self.attention;
        let block = blocks[position / block_size] as usize;
        let strip = block * num_kv_heads + kv_head;
        let at = (strip * block_size + position % block_size) * head_dim;
        self.numbers[at..at + head_dim].iter().map(|number| number.to_bits()).collect()
    }
}
