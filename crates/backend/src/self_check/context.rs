//! Operators that know where tokens are: rotation, KV cache, attention.

use half::bf16;

use super::{
    BF16_TOLERANCE, Pair,
    fp8::Twice,
    rig::{Rig, normal, tensor},
    steps::RandomStep,
};
use crate::{
    AttentionShape, Backend, BackendError, BlockTurn, KvDtype, TurnBlocks,
    ops::{Attention, Matmul, RopeAndCache},
};

/// One kind of attention layer.
#[derive(Clone, Copy, Debug)]
struct Heads {
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
    /// Standard deviation of the scores.
    spread: f32,
}

impl Heads {
    const fn new(num_heads: usize, num_kv_heads: usize, head_dim: usize) -> Self {
        Self { num_heads, num_kv_heads, head_dim, window: None, spread: 1.0 }
    }

    fn shape(self, block_size: usize) -> AttentionShape {
        let Self { num_heads, num_kv_heads, head_dim, .. } = self;
        AttentionShape { num_heads, num_kv_heads, head_dim, block_size }
    }

    fn name(self) -> String {
        let Self { num_heads, num_kv_heads, head_dim, window, spread } = self;
        let window = window.map_or(String::new(), |window| format!(", window {window}"));
        let spread = if spread > 1.0 { ", scores to 200 and -200" } else { "" };
        format!("{num_heads}/{num_kv_heads} heads of {head_dim}{window}{spread}")
    }
}

/// Groups of 4, 7, 4 and 1 heads.
const HEADS: [Heads; 4] = [
    Heads { spread: 50.0, ..Heads::new(8, 2, 128) },
    Heads::new(14, 2, 64),
    Heads { window: Some(50), ..Heads::new(8, 2, 64) },
    Heads::new(4, 4, 96),
];
const MORE_HEADS: [Heads; 5] = [
    Heads::new(32, 8, 128),
    Heads::new(9, 3, 64),
    Heads::new(16, 1, 128),
    Heads::new(2, 2, 128),
    Heads::new(4, 2, 256),
];

pub(super) fn check_rotation<B: Backend>(pair: &mut Pair<'_, B>) -> Result<(), BackendError> {
    let rope = |heads, rotary_dim, interleaved, qk_norm| Rope {
        heads,
        rotary_dim,
        interleaved,
        qk_norm,
        cols: None,
    };
    for case in [
        rope(Heads::new(8, 2, 64), 64, false, false),
        rope(Heads::new(9, 3, 64), 64, true, false),
        rope(Heads::new(8, 1, 128), 128, false, true),
        rope(Heads::new(4, 4, 96), 48, false, false),
        rope(Heads::new(2, 1, 256), 256, false, true),
    ] {
        case.check(pair, &RandomStep::mixed(16), BF16_TOLERANCE)?;
        let out = case.turn(&pair.device)?;
        let expected = case.turn(&pair.reference)?;
        pair.compare(case.name("turned keys"), &out.keys, &expected.keys, BF16_TOLERANCE);
        pair.compare(case.name("copied values"), &out.values, &expected.values, BF16_TOLERANCE);
        // Codes follow every bit of what was multiplied, coarse ones the more.
        let is_coarse = pair.reference.backend.kv_dtype() == KvDtype::Int4;
        let tolerance = if is_coarse { 6.0 } else { 3.0 } * BF16_TOLERANCE;
        let case = Rope { cols: Some(576), ..case };
        case.check(pair, &RandomStep::mixed(16), tolerance)?;
        case.check(pair, &RandomStep::decode(&[1, 17, 64], 16), tolerance)?;
    }
    Ok(())
}

pub(super) fn check_attention<B: Backend>(pair: &mut Pair<'_, B>) -> Result<(), BackendError> {
    check_attention_of(pair, &HEADS)
}

pub(super) fn check_more_attention<B: Backend>(pair: &mut Pair<'_, B>) -> Result<(), BackendError> {
    check_attention_of(pair, &MORE_HEADS)
}

fn check_attention_of<B: Backend>(
    pair: &mut Pair<'_, B>,
    heads: &[Heads],
) -> Result<(), BackendError> {
    let tile_edges = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500];
    for heads in heads.iter().copied() {
        check_sharing(pair, heads)?;
        for (kind, step) in [
            ("decode", RandomStep::decode(&tile_edges, 16)),
            ("decode one long", RandomStep::decode(&[3001], 16)),
            ("mixed", RandomStep::mixed(16)),
            ("mixed, blocks of 32", RandomStep::mixed(32)),
            ("mixed, blocks of 64", RandomStep::mixed(64)),
            ("prefill", RandomStep::prefill(16)),
        ] {
            let out = attention(&pair.device, heads, &step)?;
            let expected = attention(&pair.reference, heads, &step)?;
            let name = format!("attention {kind}, {}", heads.name());
            // Of great scores, weights follow every bit.
            let tolerance = if heads.spread > 1.0 { 3e-2 } else { BF16_TOLERANCE };
            pair.compare(name, &out, &expected, tolerance);
            if kind.starts_with("decode") {
                let twice = match product_of_attention(&pair.device, heads, &step) {
                    // Batch-invariant devices have no such products.
                    Err(BackendError::Unsupported(_)) => continue,
                    twice => twice?,
                };
                let Twice { at_once, later } = twice;
                let name = format!("product, weights in fp8: behind attention {kind} or later");
                pair.compare(format!("{name}, {}", heads.name()), &at_once, &later, 0.0);
            }
        }
    }
    Ok(())
}

/// Attention of rows that share prefixes, where the device would rather be told.
fn check_sharing<B: Backend>(pair: &mut Pair<'_, B>, heads: Heads) -> Result<(), BackendError> {
    for (kind, with_prefill, block_size) in
        [("decode", false, 16), ("decode, blocks of 64", false, 64), ("beside prefill", true, 32)]
    {
        if pair.device.backend.prefix_rule(heads.shape(block_size)).is_none() {
            continue;
        }
        let step = RandomStep::sharing(with_prefill, block_size);
        let out = attention(&pair.device, heads, &step)?;
        let expected = attention(&pair.reference, heads, &step)?;
        let name = format!("attention with shared prefixes, {kind}, {}", heads.name());
        let tolerance = if heads.spread > 1.0 { 3e-2 } else { BF16_TOLERANCE };
        pair.compare(name, &out, &expected, tolerance);
    }
    Ok(())
}

/// One kind of rotation to check.
#[derive(Clone, Copy, Debug)]
struct Rope {
    heads: Heads,
    rotary_dim: usize,
    interleaved: bool,
    qk_norm: bool,
    /// Columns of the matrix that makes queries, keys and values, if they are not there before.
    cols: Option<usize>,
}

/// What a rotation writes.
struct Rotated {
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Rope {
    fn name(&self, what: &str) -> String {
        let marks = [(self.interleaved, " interleaved"), (self.qk_norm, " with norm")];
        let marks: String = marks.iter().filter(|(set, _)| *set).map(|(_, mark)| *mark).collect();
        let name = if self.cols.is_some() { "matmul_and_rope" } else { "rope_and_cache" };
        format!("{name} {what}, {}{marks}", self.heads.name())
    }

    fn check<B: Backend>(
        &self,
        pair: &mut Pair<'_, B>,
        step: &RandomStep,
        tolerance: f64,
    ) -> Result<(), BackendError> {
        let out = self.run(&pair.device, step)?;
        let expected = self.run(&pair.reference, step)?;
        pair.compare(self.name("queries"), &out.queries, &expected.queries, tolerance);
        pair.compare(self.name("keys"), &out.keys, &expected.keys, tolerance);
        pair.compare(self.name("values"), &out.values, &expected.values, tolerance);
        Ok(())
    }

    fn run<B: Backend>(
        &self,
        rig: &Rig<'_, B>,
        step: &RandomStep,
    ) -> Result<Rotated, BackendError> {
        let attention = self.heads.shape(step.block_size);
        let (batch, shape) = step.unpack(rig)?;
        let head_dim = self.heads.head_dim;
        let cache_len =
            step.num_cache_blocks * self.heads.num_kv_heads * step.block_size * head_dim;
        let layout = rig.backend.kv_layout(attention);
        let kv = rig.kv(layout, &vec![0.5; cache_len], &vec![-0.5; cache_len])?;
        let (num_rows, len) = (shape.num_tokens, attention.qkv_len());
        let qkv = match self.cols {
            Some(_) => rig.poisoned(num_rows * len)?,
            None => rig.activations(&normal(50, num_rows * len))?,
        };
        let max_positions = 1024;
        let table = rig.vector(&angles(max_positions, self.rotary_dim))?;
        let norms = (rig.vector(&normal(51, head_dim))?, rig.vector(&normal(52, head_dim))?);
        let args = RopeAndCache {
            qkv: &qkv,
            rotary_table: &table,
            rotary_dim: self.rotary_dim,
            interleaved: self.interleaved,
            qk_norm: self.qk_norm.then_some((&norms.0, &norms.1)),
            eps: 1e-6,
            attention,
            kv: &kv,
            batch: &batch,
            step: shape,
        };
        match self.cols {
            Some(cols) => {
                let weight = tensor(&[len, cols], &normal(53, len * cols));
                let weight = &rig.backend.load_matrix(&[weight])?;
                let bias = Some(&rig.vector(&normal(54, len))?);
                let x = &rig.activations(&normal(55, num_rows * cols))?;
                let matmul = Matmul { x, weight, bias, out: &qkv, num_rows, accumulate: false };
                rig.backend.matmul_and_rope(matmul, args, &rig.stream)?;
            }
            None => rig.backend.rope_and_cache(args, &rig.stream)?,
        }
        let all = rig.read_activations(&qkv, shape.num_tokens * attention.qkv_len())?;
        let rows = all.chunks_exact(attention.qkv_len());
        let queries = rows.flat_map(|row| row[..attention.q_len()].to_vec()).collect();
        let read = |buffer| rig.read_kv(buffer, layout, step.num_cache_blocks);
        Ok(Rotated { queries, keys: read(&kv.keys)?, values: read(&kv.values)? })
    }
}

impl Rope {
    /// Blocks of two layers, turned: more turns than one launch takes.
    fn turn<B: Backend>(&self, rig: &Rig<'_, B>) -> Result<Rotated, BackendError> {
        let attention = self.heads.shape(16);
        let num_blocks: u32 = 150;
        let len = num_blocks as usize * self.heads.num_kv_heads * 16 * self.heads.head_dim;
        let layout = rig.backend.kv_layout(attention);
        let layer = |seed| rig.kv(layout, &normal(seed, len), &normal(seed + 1, len));
        let kv = [layer(60)?, layer(62)?];
        let table = rig.vector(&angles(1024, self.rotary_dim))?;
        let half = num_blocks / 2;
        let turn = |i| BlockTurn { from: i, to: num_blocks - 1 - i, by: 13 * i };
        let turns: Vec<BlockTurn> = (0..half).map(turn).collect();
        let args = TurnBlocks {
            kv: &kv,
            attention,
            rotary_table: &table,
            rotary_dim: self.rotary_dim,
            interleaved: self.interleaved,
            turns: &turns,
        };
        rig.backend.turn_blocks(args, &rig.stream)?;
        let mut rotated = Rotated { queries: Vec::new(), keys: Vec::new(), values: Vec::new() };
        for layer in &kv {
            rotated.keys.extend(rig.read_kv(&layer.keys, layout, num_blocks as usize)?);
            rotated.values.extend(rig.read_kv(&layer.values, layout, num_blocks as usize)?);
        }
        Ok(rotated)
    }
}

/// A rotary table: cosines and sines of each position.
fn angles(max_positions: usize, rotary_dim: usize) -> Vec<f32> {
    let pairs = rotary_dim / 2;
    let angle = |position: usize, pair: usize| {
        position as f64 * 10_000f64.powf(-(pair as f64) / pairs as f64)
    };
    let row = |position| {
        let cos = (0..pairs).map(move |pair| angle(position, pair).cos() as f32);
        cos.chain((0..pairs).map(move |pair| angle(position, pair).sin() as f32))
    };
    (0..max_positions).flat_map(row).collect()
}

fn attention<B: Backend>(
    rig: &Rig<'_, B>,
    heads: Heads,
    step: &RandomStep,
) -> Result<Vec<f32>, BackendError> {
    with_attention(rig, heads, step, |args| {
        let (out, len) = (args.out, args.step.num_tokens * args.attention.q_len());
        rig.backend.attention(args, &rig.stream)?;
        rig.read_activations(out, len)
    })
}

fn product_of_attention<B: Backend>(
    rig: &Rig<'_, B>,
    heads: Heads,
    step: &RandomStep,
) -> Result<Twice, BackendError> {
    with_attention(rig, heads, step, |args| {
        let sides = (args.step.num_tokens, args.attention.q_len());
        Twice::of(rig, args.out, sides, || rig.backend.attention(args, &rig.stream))
    })
}

fn with_attention<B: Backend, T>(
    rig: &Rig<'_, B>,
    heads: Heads,
    step: &RandomStep,
    then: impl FnOnce(Attention<'_, B>) -> Result<T, BackendError>,
) -> Result<T, BackendError> {
    let attention = heads.shape(step.block_size);
    let (batch, shape) = step.unpack(rig)?;
    let cache_len = step.num_cache_blocks * heads.num_kv_heads * step.block_size * heads.head_dim;
    let layout = rig.backend.kv_layout(attention);
    let seen = step.seen_slots(heads.window);
    let cache = |seed| {
        let mut numbers = normal(seed, cache_len);
        // What nobody sees may be left over from anything.
        for (i, number) in numbers.iter_mut().enumerate() {
            let (block, offset) = (
                i / (heads.num_kv_heads * step.block_size * heads.head_dim),
                i / heads.head_dim % step.block_size,
            );
            if !seen[block * step.block_size + offset] {
                *number = f32::NAN;
            }
        }
        numbers
    };
    let kv = rig.kv(layout, &cache(60), &cache(61))?;
    let mut queries = normal(62, shape.num_tokens * attention.qkv_len());
    queries.iter_mut().for_each(|x| *x = bf16::from_f32(*x * heads.spread).to_f32());
    let qkv = rig.activations(&queries)?;
    let out = rig.poisoned(shape.num_tokens * attention.q_len())?;
    let args = Attention {
        qkv: &qkv,
        kv: &kv,
        out: &out,
        attention,
        scale: 1.0 / (heads.head_dim as f32).sqrt(),
        window: heads.window,
        batch: &batch,
        step: shape,
    };
    then(args)
}
