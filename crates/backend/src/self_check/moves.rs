//! Blocks of the KV cache on their way, and tokens that no step computes.

use super::{Pair, rig::Rig};
use crate::{
    AttentionShape, Backend, BackendError, BlockPair, HistoryInputs, KvBlocks, KvLayer, MoveBlocks,
    MoveWay, RowState, ops::SamplingState,
};

/// A KV cache to move blocks of.
#[derive(Clone, Copy)]
struct Case {
    num_kv_heads: usize,
    head_dim: usize,
    num_layers: usize,
    /// Even.
    num_blocks: u32,
}

/// More layers and more blocks than one launch takes; blocks longer than a thread's share.
const CASES: [Case; 2] = [
    Case { num_kv_heads: 1, head_dim: 32, num_layers: 35, num_blocks: 300 },
    Case { num_kv_heads: 9, head_dim: 128, num_layers: 2, num_blocks: 8 },
];

pub(super) fn check<B: Backend>(pair: &mut Pair<'_, B>) -> Result<(), BackendError> {
    for case in CASES {
        let Moved { moved, expected } = case.move_there_and_back(&pair.device)?;
        let name = format!("move_blocks, {} of {} layers", case.num_blocks, case.num_layers);
        pair.same(name, &moved, &expected, 0.0);
    }
    let out = count(&pair.device)?;
    let expected = count(&pair.reference)?;
    pair.same("count_history", &out, &expected, 0.0);
    Ok(())
}

/// Words of a cache whose blocks were moved, and of one whose words the host put in place.
struct Moved {
    moved: Vec<u32>,
    expected: Vec<u32>,
}

impl Case {
    /// Copies within the device, then to the host, then back to other places.
    fn move_there_and_back<B: Backend>(self, rig: &Rig<'_, B>) -> Result<Moved, BackendError> {
        let Self { num_kv_heads, head_dim, num_layers, num_blocks } = self;
        let (num_heads, block_size) = (num_kv_heads, 16);
        let attention = AttentionShape { num_heads, num_kv_heads, head_dim, block_size };
        let layout = rig.backend.kv_layout(attention);
        let words_per_block = layout.block_bytes() / 4;
        let len = num_blocks as usize * words_per_block;
        let (mut layers, mut contents) = (Vec::new(), Vec::new());
        for number in 0..num_layers {
            let mut part = |salt: usize| {
                let word = |i: usize| (i * 31 + salt * 977) as u32 ^ 0x9e37_79b9;
                let words: Vec<u32> = (0..len).map(word).collect();
                let buffer = rig.backend.alloc_kv("check", len * 4)?;
                rig.write_words(&buffer, &words)?;
                contents.push(words);
                Ok::<_, BackendError>(buffer)
            };
            let keys = part(2 * number)?;
            layers.push(KvLayer { keys, values: part(2 * number + 1)? });
        }
        let kv = KvBlocks::new(&layers, layout);
        let half = num_blocks / 2;
        let host = rig.backend.alloc_host("check", (half + 3) as usize * kv.block_bytes() / 4)?;
        // Even blocks go there, in reverse; what was there comes back to odd ones.
        let last = num_blocks - 1;
        let copies = [BlockPair { from: 7, to: 0 }, BlockPair { from: 7, to: last }];
        let there: Vec<_> =
            (0..half).map(|i| BlockPair { from: 2 * i, to: half + 2 - i }).collect();
        let back: Vec<_> = (0..half).map(|i| BlockPair { from: 3 + i, to: 2 * i + 1 }).collect();
        let move_blocks = |pairs: &[BlockPair], way| {
            rig.backend.move_blocks(MoveBlocks { kv: &kv, pairs, way }, &rig.stream)
        };
        move_blocks(&copies, MoveWay::WithinDevice)?;
        move_blocks(&there, MoveWay::ToHost(&host))?;
        move_blocks(&back, MoveWay::FromHost(&host))?;
        let mut moved = Vec::new();
        for part in kv.parts() {
            moved.extend(rig.read_words(part, len)?);
        }
        for words in &mut contents {
            let start = |block: u32| block as usize * words_per_block;
            let mut copy = |from, to| words.copy_within(start(from)..start(from + 1), start(to));
            copies.iter().for_each(|pair| copy(pair.from, pair.to));
            // Block `from` of the host is where this even block went.
            back.iter().for_each(|pair| copy(2 * (half + 2 - pair.from), pair.to));
        }
        Ok(Moved { moved, expected: contents.concat() })
    }
}

/// Token counts of three sequences of which two begin with tokens that no step computed.
fn count<B: Backend>(rig: &Rig<'_, B>) -> Result<Vec<u32>, BackendError> {
    let vocab_size = 500;
    let token_counts = rig.words(&vec![9; 3 * vocab_size])?;
    let state = SamplingState { token_counts, vocab_size };
    let mut history = HistoryInputs::default();
    let tokens: Vec<u32> = (0..3000).map(|i: u32| i.wrapping_mul(2_654_435_761) % 600).collect();
    let row = |slot, prompt_len| RowState { state_slot: Some(slot), prompt_len, fresh: true };
    history.push(row(2, 1000), &tokens);
    history.push(row(0, 50), &tokens[..3]);
    let shape = history.shape();
    let mut words = vec![0; shape.num_words()];
    history.pack(&mut words);
    rig.backend.count_history(&rig.words(&words)?, shape, &state, &rig.stream)?;
    rig.read_words(&state.token_counts, 3 * vocab_size)
}
