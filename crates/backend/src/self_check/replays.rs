//! A captured graph gives the same bits every time, whatever ran before.

use super::{
    Pair,
    rig::{Rig, normal, tensor},
    steps::{RandomRow, RandomStep},
};
use crate::{
    AttentionShape, Backend, BackendError,
    ops::{Attention, Matmul},
};

const NUM_REPLAYS: usize = 1000;
const SHAPE: AttentionShape =
    AttentionShape { num_heads: 32, num_kv_heads: 8, head_dim: 128, block_size: 16 };

/// Rows that decode, short and long, and with them rows that prefill.
const ROWS: [(usize, usize); 6] = [(1, 1), (17, 1), (900, 1), (2500, 1), (300, 40), (64, 64)];

/// Replays attention and a product; devices without graphs have nothing to check.
pub(super) fn check<B: Backend>(pair: &mut Pair<'_, B>) -> Result<(), BackendError> {
    let row = |(context_len, num_new)| RandomRow { context_len, num_new };
    let mixed: Vec<RandomRow> = ROWS.map(row).into();
    let mut steps = vec![
        ("decode rows", RandomStep::new(&mixed[..4], 16)),
        ("mixed rows", RandomStep::new(&mixed, 16)),
    ];
    if pair.device.backend.prefix_rule(SHAPE).is_some() {
        steps.push(("rows that share prefixes", RandomStep::sharing(false, 16)));
    }
    for (name, step) in steps {
        match num_different(&pair.device, &step) {
            Err(BackendError::Unsupported(_)) => return Ok(()),
            Err(error) => return Err(error),
            Ok(different) => {
                let flags: Vec<u32> = (0..NUM_REPLAYS).map(|i| u32::from(i < different)).collect();
                let name = format!("{NUM_REPLAYS} replays of attention and a product, {name}");
                pair.same(name, &flags, &[0; NUM_REPLAYS], 0.0);
            }
        }
    }
    Ok(())
}

/// How many replays give other bits than the first.
fn num_different<B: Backend>(rig: &Rig<'_, B>, step: &RandomStep) -> Result<usize, BackendError> {
    let backend = rig.backend;
    let (batch, shape) = step.unpack(rig)?;
    let cache_len = step.num_cache_blocks * SHAPE.num_kv_heads * SHAPE.block_size * SHAPE.head_dim;
    let kv = rig.kv(backend.kv_layout(SHAPE), &normal(80, cache_len), &normal(81, cache_len))?;
    let qkv = rig.activations(&normal(82, shape.num_tokens * SHAPE.qkv_len()))?;
    let attended = rig.poisoned(shape.num_tokens * SHAPE.q_len())?;
    let out_len = 512;
    let weight = normal(83, out_len * SHAPE.q_len());
    let weight = backend.load_matrix(&[tensor(&[out_len, SHAPE.q_len()], &weight)])?;
    let out = rig.state(&vec![f32::NAN; shape.num_tokens * out_len])?;
    let (packed, previous) = (step.pack(rig)?, rig.words(&step.previous)?);
    let enqueue = || {
        backend.unpack(&packed, &previous, shape, &batch, &rig.stream)?;
        let (attention, window) = (SHAPE, None);
        let args = Attention {
            qkv: &qkv,
            kv: &kv,
            out: &attended,
            attention,
            scale: 0.09,
            window,
            batch: &batch,
            step: shape,
        };
        backend.attention(args, &rig.stream)?;
        let args = Matmul {
            x: &attended,
            weight: &weight,
            bias: None,
            out: &out,
            num_rows: shape.num_tokens,
            accumulate: false,
        };
        backend.matmul(args, &rig.stream)
    };
    let graph = backend.capture(&rig.stream, &enqueue)?;
    let num_words = shape.num_tokens * out_len;
    // One for all: pinning memory takes longer than a replay.
    let host = backend.alloc_host("check", num_words)?;
    let mut first: Option<Vec<u32>> = None;
    let mut different = 0;
    for _ in 0..NUM_REPLAYS {
        backend.replay(&graph, &rig.stream)?;
        backend.copy_to_host(&out, &host, num_words, &rig.stream)?;
        rig.finish()?;
        different += backend.read_host(&host, |words| {
            let words = &words[..num_words];
            usize::from(first.get_or_insert_with(|| words.to_vec()) != words)
        });
    }
    Ok(different)
}
