//! `sample.cu`: greedy tokens, draws, penalties and logprobs, by their definitions in f64.

use inflight_kernels::{
    Arch,
    ops::{
        greatest_logits::{GreatestLogits, GreatestLogitsParams},
        sample::{Sample, SampleParams},
    },
};

use crate::{
    emulator::{Emulated, Order},
    memory::{Dice, Memory},
    truncated::check_draw,
};

const MAX_TOP: usize = 20;
pub(crate) const NONE: u32 = u32::MAX;

/// What a row asks for; neutral by default.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Row {
    pub(crate) temperature: f32,
    pub(crate) top_k: u32,
    /// 0: all.
    pub(crate) top_p: f32,
    pub(crate) min_p: f32,
    /// Repetition, presence, frequency.
    pub(crate) penalties: Option<[f32; 3]>,
    pub(crate) num_top: Option<u32>,
    pub(crate) seed: u64,
    pub(crate) position: u32,
    /// First entry, and how many there are.
    pub(crate) bias: [u32; 2],
    pub(crate) late_row: Option<u32>,
    /// 0: all.
    pub(crate) typical_p: f32,
    pub(crate) top_n_sigma: f32,
    /// Probability, threshold.
    pub(crate) xtc: [f32; 2],
}

impl Row {
    fn words(&self, state_slot: u32) -> [u32; 20] {
        let [repetition, presence, frequency] = self.penalties.unwrap_or([1.0, 0.0, 0.0]);
        let or_all = |p: f32| if p == 0.0 { 1.0 } else { p };
        let [xtc_probability, xtc_threshold] = self.xtc;
        let mut words = [0; 20];
        words[0] = if self.penalties.is_some() { state_slot } else { NONE };
        words[1] = self.temperature.to_bits();
        words[2] = self.top_k;
        words[3..8].copy_from_slice(
            &[or_all(self.top_p), self.min_p, repetition, presence, frequency].map(f32::to_bits),
        );
        words[8] = self.seed as u32;
        words[9] = (self.seed >> 32) as u32;
        words[10] = self.position;
        words[11] = self.num_top.unwrap_or(NONE);
        words[12..14].copy_from_slice(&self.bias);
        words[14] = self.late_row.unwrap_or(NONE);
        words[15..19].copy_from_slice(
            &[or_all(self.typical_p), self.top_n_sigma, xtc_probability, xtc_threshold]
                .map(f32::to_bits),
        );
        words
    }
}

/// What a launch reads.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    pub(crate) logits: &'a [Vec<f32>],
    /// Of tokens that were seen, the same ones for all rows.
    pub(crate) counts: &'a [u32],
    pub(crate) rows: &'a [Row],
    /// Token ids, and what is added to their logits.
    pub(crate) bias: &'a [(u32, f32)],
    pub(crate) late: &'a [u32],
    /// In how many parts rows are looked through first, by a kernel of its own; 0: in none.
    pub(crate) num_parts: u32,
}

/// What a row got.
pub(crate) struct Drawn {
    pub(crate) token: usize,
    pub(crate) logprob: f32,
    pub(crate) top: Vec<(u32, f32)>,
    /// Logits that the row's token was chosen by, where they were not the model's.
    pub(crate) adjusted: Vec<f32>,
}

/// Draws for rows of logits, with counts of tokens that were seen; the same whether or not rows
/// were looked through in parts before.
fn draw(logits: &[Vec<f32>], counts: &[u32], rows: &[Row]) -> Option<Vec<Drawn>> {
    let kernel = Emulated::new(Sample { unusual: false }, Arch::SM_80)?;
    let draw = |num_parts| {
        let inputs = Inputs { logits, counts, rows, bias: &[], late: &[], num_parts };
        draw_by(&kernel, inputs, Order::Shuffled(1))
    };
    let (drawn, by_parts) = (draw(0)?, draw(3)?);
    for (drawn, by_parts) in drawn.iter().zip(by_parts) {
        assert_eq!((drawn.token, drawn.logprob), (by_parts.token, by_parts.logprob));
        assert_eq!(drawn.top, by_parts.top);
    }
    Some(drawn)
}

/// Keys of the greatest logits of so many parts of every row; none of none.
fn greatest(logits: &mut Memory<f32>, num_rows: usize, num_parts: u32) -> Option<Memory<u64>> {
    let num_keys = num_rows * num_parts as usize;
    let mut keys = Memory::<u64>::unwritten(num_keys.max(1));
    let params = GreatestLogitsParams {
        logits: logits.address(),
        keys: keys.address(),
        num_rows: num_rows as u32,
        num_parts,
        vocab_size: (logits.as_slice().len() / num_rows) as u32,
        reserved: 0,
    };
    if num_parts > 0 {
        let kernel = Emulated::new(GreatestLogits, Arch::SM_80)?;
        // SAFETY: memory is of the sizes that parameters say.
        unsafe { kernel.launch(&params, Order::Shuffled(2)) };
    }
    Some(keys)
}

pub(crate) fn draw_by(
    kernel: &Emulated<Sample>,
    inputs: Inputs<'_>,
    order: Order,
) -> Option<Vec<Drawn>> {
    let Inputs { logits, counts, rows, bias, late, num_parts } = inputs;
    let (num_rows, vocab_size) = (rows.len(), logits[0].len());
    let mut all = Memory::new(&logits.concat());
    let mut greatest = greatest(&mut all, num_rows, num_parts)?;
    let mut adjusted = Memory::<f32>::unwritten(num_rows * vocab_size);
    let mut counts = Memory::new(&counts.repeat(num_rows));
    let words = rows.iter().enumerate().flat_map(|(i, row)| row.words(i as u32));
    let mut sampling = Memory::new(&words.collect::<Vec<_>>());
    let mut bias_ids = Memory::new(&bias.iter().map(|(id, _)| *id).collect::<Vec<_>>());
    let mut bias_values = Memory::new(&bias.iter().map(|(_, x)| *x).collect::<Vec<_>>());
    let mut late = Memory::new(late);
    let mut outputs = Memory::<u32>::unwritten(num_rows * (2 + 2 * MAX_TOP));
    let params = SampleParams {
        logits: all.address(),
        adjusted: adjusted.address(),
        token_counts: counts.address(),
        sampling: sampling.address(),
        bias_ids: bias_ids.address(),
        bias_values: bias_values.address(),
        late: late.address(),
        outputs: outputs.address(),
        greatest: greatest.address(),
        num_sampled: num_rows as u32,
        max_rows: num_rows as u32,
        vocab_size: vocab_size as u32,
        num_parts,
    };
    // SAFETY: memory is of the sizes that parameters and rows say.
    unsafe { kernel.launch(&params, order) };
    let (tokens, rest) = outputs.as_slice().split_at(num_rows);
    let (logprobs, rest) = rest.split_at(num_rows);
    let (ids, of_ids) = rest.split_at(num_rows * MAX_TOP);
    let drawn = |row: usize| {
        let range = row * MAX_TOP..(row + 1) * MAX_TOP;
        let top = ids[range.clone()].iter().zip(&of_ids[range]).filter(|(id, _)| **id != NONE);
        Drawn {
            token: tokens[row] as usize,
            logprob: f32::from_bits(logprobs[row]),
            top: top.map(|(id, logprob)| (*id, f32::from_bits(*logprob))).collect(),
            adjusted: adjusted.as_slice()[row * vocab_size..][..vocab_size].to_vec(),
        }
    };
    Some((0..num_rows).map(drawn).collect())
}

#[test]
fn greedy_rows_take_the_first_of_the_greatest() {
    let table: [(&[f32], usize); 6] = [
        (&[1.0, 3.0, 2.0, 3.0], 1),
        (&[f32::NAN, -5.0, f32::NEG_INFINITY, -5.0], 1),
        (&[-0.0, 0.0, -1.0, -2.0], 0),
        (&[f32::INFINITY, f32::NAN, f32::INFINITY, 0.0], 0),
        (&[f32::NAN, f32::NAN, f32::NAN, f32::NEG_INFINITY], 3),
        (&[f32::NAN; 4], 0),
    ];
    let logits: Vec<Vec<f32>> = table.iter().map(|(logits, _)| logits.to_vec()).collect();
    let Some(drawn) = draw(&logits, &[0; 4], &[Row::default(); 6]) else { return };
    for ((logits, expected), drawn) in table.iter().zip(drawn) {
        assert_eq!(drawn.token, *expected, "{logits:?}");
    }
    // Odd lengths, and more than a block reads at once; the greatest twice.
    for vocab_size in [1, 4097, 30_000] {
        let mut logits = Dice::new(8).f32s(vocab_size, 3.0);
        let expected = vocab_size * 2 / 3;
        logits[expected] = 4.0;
        logits[vocab_size - 1] = 4.0;
        let drawn = draw(&[logits], &vec![0; vocab_size], &[Row::default()]).unwrap();
        assert_eq!(drawn[0].token, expected);
    }
}

/// Log-softmax.
pub(crate) fn logprobs(logits: &[f32]) -> Vec<f64> {
    let logits: Vec<f64> = logits.iter().map(|x| f64::from(*x)).collect();
    let greatest = logits.iter().copied().fold(f64::MIN, f64::max);
    let sum: f64 = logits.iter().map(|x| (x - greatest).exp()).sum();
    logits.iter().map(|x| x - greatest - sum.ln()).collect()
}

#[test]
fn logprobs_are_the_models() {
    let logits = Dice::new(9).f32s(5000, 8.0);
    let row = Row { num_top: Some(7), ..Row::default() };
    let Some(drawn) = draw(std::slice::from_ref(&logits), &[0; 5000], &[row]) else { return };
    let expected = logprobs(&logits);
    let mut order: Vec<usize> = (0..5000).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    let [Drawn { token, logprob, top, .. }] = &drawn[..] else { panic!("one row") };
    assert_eq!(*token, order[0]);
    assert!((f64::from(*logprob) - expected[*token]).abs() < 1e-5);
    assert_eq!(top.len(), 7);
    for ((id, logprob), expected_id) in top.iter().zip(order) {
        assert_eq!(*id as usize, expected_id);
        assert!((f64::from(*logprob) - expected[expected_id]).abs() < 1e-5);
    }
}

/// Evenly from 0 to 1, a position's two numbers.
///
/// # Source
/// Salmon et al.: "Parallel random numbers: as easy as 1, 2, 3", 2011: Philox4x32-10.
pub(crate) fn uniform(seed: u64, position: u32) -> [f64; 2] {
    let mut counter = [position, 0, 0, 0];
    let mut key = [seed as u32, (seed >> 32) as u32];
    for _ in 0..10 {
        let products = [u64::from(counter[0]) * 0xd251_1f53, u64::from(counter[2]) * 0xcd9e_8d57];
        counter = [
            (products[1] >> 32) as u32 ^ counter[1] ^ key[0],
            products[1] as u32,
            (products[0] >> 32) as u32 ^ counter[3] ^ key[1],
            products[0] as u32,
        ];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    let [first, second] = [[counter[1], counter[0]], [counter[3], counter[2]]];
    [first, second].map(|[high, low]| {
        ((u64::from(high) << 32 | u64::from(low)) >> 11) as f64 / (1_u64 << 53) as f64
    })
}

#[test]
fn draws_invert_the_sum_of_what_is_kept() {
    let logits = Dice::new(10).f32s(3000, 6.0);
    let warm = Row { temperature: 1.5, ..Row::default() };
    let kinds = [
        warm,
        Row { top_k: 1, ..warm },
        Row { top_k: 40, temperature: 3.0, ..warm },
        Row { top_p: 0.8, ..warm },
        Row { min_p: 0.1, ..warm },
        Row { top_k: 500, top_p: 0.5, min_p: 0.02, ..warm },
    ];
    let rows: Vec<Row> = (0..48)
        .map(|i| Row {
            seed: 0x1234_5678_9abc_def0 + i as u64,
            position: 7 * i,
            ..kinds[i as usize % 6]
        })
        .collect();
    let Some(drawn) = draw(&vec![logits.clone(); rows.len()], &[0; 3000], &rows) else { return };
    for (row, drawn) in rows.iter().zip(&drawn) {
        check_draw(&logits, row, drawn.token);
    }
}

#[test]
fn tokens_that_were_seen_are_penalised() {
    let logits = vec![5.0, 4.8, 4.9, -1.0];
    // In the prompt alone; twice since; in both; never.
    let counts = [1 << 31, 2, 1 << 31 | 1, 0];
    // x / 1.25, or x times it if negative; less 0.5 once and 0.25 each time for those since.
    let row = |penalties| Row { penalties: Some(penalties), ..Row::default() };
    let table = [
        (row([1.25, 0.0, 0.0]), 0),   // 4, 3.84, 3.92
        (row([1.0, 0.5, 0.0]), 0),    // 5, 4.3, 4.4
        (row([1.25, 0.0, -0.25]), 1), // 4, 4.34, 4.17
        (row([1.25, -0.5, 0.0]), 2),  // 4, 4.34, 4.42
        (Row::default(), 0),
    ];
    let rows = table.map(|(row, _)| row);
    let Some(drawn) = draw(&vec![logits; table.len()], &counts, &rows) else { return };
    for (index, ((_, expected), drawn)) in table.iter().zip(drawn).enumerate() {
        assert_eq!(drawn.token, *expected, "row {index}");
    }
}
