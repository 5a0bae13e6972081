//! `unpack.cu`: a step's packed words, and what fills up to the padded shape.

use inflight_kernels::{
    Arch,
    ops::unpack::{MAX_MORE_GROUPS, Unpack, UnpackGroup, UnpackParams},
};

use crate::{
    emulator::{Emulated, Order},
    memory::{Dice, Memory},
};

const NONE: u32 = u32::MAX;
const ONE: u32 = 0x3f80_0000;
/// A row that draws greedily, penalises nothing and reports nothing.
const GREEDY: [u32; 20] =
    [NONE, 0, 0, ONE, 0, ONE, 0, 0, 0, 0, 0, NONE, 0, 0, NONE, ONE, 0, 0, 0, 0];

/// A section's real words, and all that it must become.
struct Section {
    packed: Vec<u32>,
    padded: Vec<u32>,
}

impl Section {
    fn new(packed: &[u32], padding: impl IntoIterator<Item = u32>) -> Self {
        let padded = packed.iter().copied().chain(padding).collect();
        Self { packed: packed.to_vec(), padded }
    }
}

/// Real and padded counts.
#[derive(Clone, Copy)]
struct Counts {
    tokens: [usize; 2],
    rows: [usize; 2],
    sampled: [usize; 2],
    blocks: usize,
    bias: usize,
    /// And the rows that share them.
    prefixes: [usize; 2],
}

/// Sections in their order, the carry-over left out, and those of a second group.
fn sections(counts: Counts, dice: &mut Dice) -> Vec<Section> {
    let mut words = |n: usize| (0..n).map(|_| dice.next() as u32 >> 1).collect::<Vec<_>>();
    let fill = |[real, padded]: [usize; 2], words: &[u32]| words.repeat(padded - real);
    let Counts { tokens, rows, sampled, blocks, bias, prefixes } = counts;
    let more_tokens = (1..=rows[1] - rows[0]).map(|i| (tokens[0] + i).min(tokens[1]) as u32);
    let mut of_group = || {
        let lens = Section::new(&words(rows[0]), fill(rows, &[0]));
        [lens, Section::new(&words(rows[0] + 1), fill(rows, &[blocks as u32]))]
    };
    let ([lens, starts], [more_lens, more_starts]) = (of_group(), of_group());
    let of_prefixes = words(3 * prefixes[0]);
    // Their counts come first.
    let padded = prefixes.map(|n| n as u32).into_iter().chain(of_prefixes.iter().copied());
    vec![
        Section::new(&words(tokens[0]), fill(tokens, &[0])),
        Section::new(&words(tokens[0]), fill(tokens, &[0])),
        Section::new(&words(tokens[0]), fill(tokens, &[NONE])),
        Section::new(&words(rows[0] + 1), more_tokens),
        lens,
        starts,
        Section::new(&words(3 * rows[0]), fill(rows, &[NONE, 0, 0])),
        Section::new(&words(blocks), []),
        Section::new(&words(sampled[0]), fill(sampled, &[0])),
        Section::new(&words(20 * sampled[0]), fill(sampled, &GREEDY)),
        Section::new(&words(bias), []),
        Section::new(&words(bias), []),
        Section::new(&words(tokens[0]), fill(tokens, &[NONE])),
        more_lens,
        more_starts,
        Section { padded: padded.collect(), packed: of_prefixes },
        Section::new(&words(2 * prefixes[1]), []),
    ]
}

fn check(counts: Counts) {
    let Some(kernel) = Emulated::new(Unpack, Arch::SM_80) else { return };
    let mut sections = sections(counts, &mut Dice::new(6));
    let Counts { tokens, rows, sampled, blocks, bias, prefixes } = counts;
    // Every third token is of the step before.
    let mut previous = Memory::new(&[100_u32, 101, 102]);
    let carry_over: Vec<u32> =
        (0..tokens[0] as u32).map(|i| if i % 3 == 0 { i / 3 % 3 } else { NONE }).collect();
    let [num_prefixes, num_prefix_rows] = prefixes;
    let header = [tokens[0], rows[0], blocks, sampled[0], bias, 0, num_prefixes, num_prefix_rows];
    let mut packed = header.map(|n| n as u32).to_vec();
    packed.extend(&sections[0].packed);
    packed.extend(&carry_over);
    sections[1..].iter().for_each(|section| packed.extend(&section.packed));
    for (token, row) in sections[0].padded.iter_mut().zip(&carry_over) {
        if *row != NONE {
            *token = 100 + row;
        }
    }
    let mut packed = Memory::new(&packed);
    let mut found: Vec<Memory<u32>> =
        sections.iter().map(|section| Memory::unwritten(section.padded.len())).collect();
    let at: Vec<u64> = found.iter_mut().map(Memory::address).collect();
    let mut more_groups = [UnpackGroup::default(); MAX_MORE_GROUPS];
    more_groups[0] =
        UnpackGroup { slot_mapping: at[12], context_lens: at[13], block_starts: at[14] };
    let params = UnpackParams {
        packed: packed.address(),
        previous: previous.address(),
        token_ids: at[0],
        positions: at[1],
        slot_mapping: at[2],
        row_starts: at[3],
        context_lens: at[4],
        block_starts: at[5],
        row_states: at[6],
        blocks: at[7],
        sample_indices: at[8],
        sampling: at[9],
        bias_ids: at[10],
        bias_values: at[11],
        more_groups,
        prefixes: at[15],
        prefix_rows: at[16],
        num_tokens: tokens[1] as u32,
        num_rows: rows[1] as u32,
        num_sampled: sampled[1] as u32,
        num_more_groups: 1,
    };
    // SAFETY: memory is of the sizes that parameters say.
    unsafe { kernel.launch(&params, Order::Shuffled(1)) };
    for (index, (section, found)) in sections.iter().zip(&found).enumerate() {
        assert_eq!(found.as_slice(), section.padded, "section {index}");
    }
}

#[test]
fn sections_are_spread_and_filled_up() {
    let counts = Counts {
        tokens: [7, 16],
        rows: [3, 8],
        sampled: [2, 4],
        blocks: 11,
        bias: 5,
        prefixes: [2, 3],
    };
    check(counts);
    // More padding rows than tokens to give them, and nothing to fill up.
    check(Counts { tokens: [7, 8], ..counts });
    check(Counts { tokens: [7, 7], rows: [3, 3], sampled: [3, 3], bias: 0, ..counts });
    // More words than threads.
    check(Counts { blocks: 40_000, ..counts });
}
