//! What is looked up, gathered and counted by token: `embed.cu`, `gather_sampled.cu`,
//! `track_tokens.cu`.

use half::bf16;
use inflight_kernels::{
    Arch, Element,
    ops::{
        embed::{Embed, EmbedParams},
        gather_sampled::{GatherSampled, GatherSampledParams},
        track_tokens::{TrackTokens, TrackTokensParams},
    },
};

use crate::{
    emulator::{Emulated, ORDERS, Order},
    memory::{Dice, Memory, Plain},
};

/// Embeddings of some tokens; two are outside the table.
fn embed<T: Plain, U: Plain>(kernel: Embed, table: &[T], len: usize) -> Option<Vec<U>> {
    let kernel = Emulated::new(kernel, Arch::SM_80)?;
    let (mut table, mut out) = (Memory::new(table), Memory::unwritten(IDS.len() * len));
    let mut token_ids = Memory::new(&IDS);
    let params = EmbedParams {
        table: table.address(),
        token_ids: token_ids.address(),
        out: out.address(),
        num_tokens: IDS.len() as u32,
        num_embeddings: NUM_EMBEDDINGS as u32,
        len: len as u32,
        scale: SCALE,
    };
    // SAFETY: memory is of the sizes that parameters say.
    unsafe { kernel.launch(&params, Order::Shuffled(1)) };
    Some(out.as_slice().to_vec())
}

const IDS: [u32; 5] = [3, 0, 4, 4, u32::MAX];
const NUM_EMBEDDINGS: usize = 4;
const SCALE: f32 = 2.5;

/// Products with the scale, in f32.
fn embeddings(table: &[f32], len: usize) -> Vec<f32> {
    let row = |id: &u32| match table.chunks(len).nth(*id as usize) {
        Some(row) => row.iter().map(|x| x * SCALE).collect(),
        None => vec![0.0; len],
    };
    IDS.iter().flat_map(row).collect()
}

#[test]
fn embeddings_are_scaled_and_none_outside_the_table() {
    // Not of whole vectors, and of more than a block's threads take at once.
    for len in [12, 2056] {
        let short = Dice::new(21).bf16s(NUM_EMBEDDINGS * len, 3.0);
        let long: Vec<f32> = short.iter().map(|x| x.to_f32() * 1.001).collect();
        let kernel = Embed { table: Element::Bf16, out: Element::F32 };
        let Some(found) = embed::<_, f32>(kernel, &short, len) else { return };
        let table: Vec<f32> = short.iter().map(|x| x.to_f32()).collect();
        assert_eq!(found, embeddings(&table, len));
        let kernel = Embed { table: Element::F32, out: Element::Bf16 };
        let found = embed::<_, bf16>(kernel, &long, len).unwrap();
        let expected = embeddings(&long, len).into_iter().map(bf16::from_f32);
        assert_eq!(found, expected.collect::<Vec<_>>());
    }
}

fn check_gathered<T: Plain + PartialEq + std::fmt::Debug>(
    element: Element,
    x: &[T],
    len: usize,
) -> Option<()> {
    let kernel = Emulated::new(GatherSampled { element }, Arch::SM_80)?;
    let indices = [2_u32, 0, 2];
    let (mut from, mut sample_indices) = (Memory::new(x), Memory::new(&indices));
    let mut out = Memory::<T>::unwritten(indices.len() * len);
    let params = GatherSampledParams {
        x: from.address(),
        sample_indices: sample_indices.address(),
        out: out.address(),
        num_sampled: indices.len() as u32,
        len: len as u32,
    };
    // SAFETY: memory is of the sizes that parameters say.
    unsafe { kernel.launch(&params, Order::Shuffled(1)) };
    for (index, row) in indices.iter().zip(out.as_slice().chunks(len)) {
        assert_eq!(row, &x[*index as usize * len..][..len]);
    }
    Some(())
}

#[test]
fn sampled_rows_are_gathered() {
    // Of whole vectors, more than a block has threads, and not.
    for len in [6, 7, 2064] {
        let mut dice = Dice::new(22);
        let floats = dice.f32s(3 * len, 1.0);
        let Some(()) = check_gathered(Element::F32, &floats, len) else { return };
        check_gathered(Element::Bf16, &dice.bf16s(3 * len, 1.0), len);
    }
}

const IN_PROMPT: u32 = 1 << 31;

/// A row's state: its slot, its prompt's length, and whether the slot was another's.
const STATES: [[u32; 3]; 4] = [[0, 1200, 1], [u32::MAX, 4, 1], [2, 10, 0], [3, 0, 1]];

/// Tokens of the prompt are marked, those since counted; ids outside the vocabulary are not.
fn counted(before: &[u32], vocab_size: usize, tokens: &[Vec<(u32, u32)>]) -> Vec<u32> {
    let mut counts = before.to_vec();
    for ([slot, prompt_len, is_fresh], tokens) in STATES.iter().zip(tokens) {
        if *slot == u32::MAX {
            continue;
        }
        let counts = &mut counts[*slot as usize * vocab_size..][..vocab_size];
        if *is_fresh == 1 {
            counts.fill(0);
        }
        for (id, position) in tokens.iter().filter(|(id, _)| (*id as usize) < vocab_size) {
            match position < prompt_len {
                true => counts[*id as usize] |= IN_PROMPT,
                false => counts[*id as usize] += 1,
            }
        }
    }
    counts
}

#[test]
fn tokens_of_tracked_rows_are_counted() {
    let Some(kernel) = Emulated::new(TrackTokens, Arch::SM_80) else { return };
    // Fewer tokens than a block has threads, so that many are the same, and more.
    for vocab_size in [50, 1500] {
        let mut dice = Dice::new(23);
        let mut row = |first: u32, len: u32| -> Vec<(u32, u32)> {
            (0..len).map(|i| (dice.below(vocab_size as u32 + 3), first + i)).collect()
        };
        let tokens = [row(0, 2500), row(0, 9), row(8, 7), row(40, 1)];
        let before: Vec<u32> = (0..4 * vocab_size).map(|i| i as u32 % 5).collect();
        let starts = [0_u32, 2500, 2509, 2516, 2517];
        let all = tokens.concat();
        let [mut ids, mut positions] = [|(id, _): &(u32, u32)| *id, |(_, at): &(u32, u32)| *at]
            .map(|word| Memory::new(&all.iter().map(word).collect::<Vec<_>>()));
        let (mut row_starts, mut states) = (Memory::new(&starts), Memory::new(&STATES.concat()));
        for order in ORDERS {
            let mut counts = Memory::new(&before);
            let params = TrackTokensParams {
                token_ids: ids.address(),
                positions: positions.address(),
                row_starts: row_starts.address(),
                row_states: states.address(),
                token_counts: counts.address(),
                num_rows: STATES.len() as u32,
                vocab_size: vocab_size as u32,
            };
            // SAFETY: memory is of the sizes that parameters say.
            unsafe { kernel.launch(&params, order) };
            assert_eq!(counts.as_slice(), counted(&before, vocab_size, &tokens));
        }
    }
}
