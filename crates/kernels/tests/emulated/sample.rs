//! `sample.cu`: greedy tokens, draws, penalties and logprobs, by their definitions in f64.

use inflight_kernels::{
    Arch,
    ops::sample::{Sample, SampleParams},
};

use crate::{
    attention::NULL,
    emulator::{Emulated, Order},
    memory::{Dice, Memory},
};

const MAX_TOP: usize = 20;
const NONE: u32 = u32::MAX;

/// What a row asks for; neutral by default.
#[derive(Clone, Copy, Default)]
struct Row {
    temperature: f32,
    top_k: u32,
    /// 0: all.
    top_p: f32,
    min_p: f32,
    /// Repetition, presence, frequency.
    penalties: Option<[f32; 3]>,
    num_top: Option<u32>,
    seed: u64,
    position: u32,
}

impl Row {
    fn words(&self, state_slot: u32) -> [u32; 20] {
        let [repetition, presence, frequency] = self.penalties.unwrap_or([1.0, 0.0, 0.0]);
        let top_p = if self.top_p == 0.0 { 1.0 } else { self.top_p };
        let mut words = [0; 20];
        words[0] = if self.penalties.is_some() { state_slot } else { NONE };
        words[1] = self.temperature.to_bits();
        words[2] = self.top_k;
        words[3..8].copy_from_slice(
            &[top_p, self.min_p, repetition, presence, frequency].map(f32::to_bits),
        );
        words[8] = self.seed as u32;
        words[9] = (self.seed >> 32) as u32;
        words[10] = self.position;
        words[11] = self.num_top.unwrap_or(NONE);
        words[14] = NONE;
        words[15] = 1_f32.to_bits();
        words
    }
}

/// What a row got.
struct Drawn {
    token: usize,
    logprob: f32,
    top: Vec<(u32, f32)>,
}

/// Draws for rows of logits, with counts of tokens that were seen.
fn draw(logits: &[Vec<f32>], counts: &[u32], rows: &[Row]) -> Option<Vec<Drawn>> {
    let kernel = Emulated::new(Sample { unusual: false }, Arch::SM_80)?;
    let (num_rows, vocab_size) = (rows.len(), logits[0].len());
    let mut all = Memory::new(&logits.concat());
    let mut adjusted = Memory::<f32>::unwritten(num_rows * vocab_size);
    let mut counts = Memory::new(&counts.repeat(num_rows));
    let words = rows.iter().enumerate().flat_map(|(i, row)| row.words(i as u32));
    let mut sampling = Memory::new(&words.collect::<Vec<_>>());
    let mut outputs = Memory::<u32>::unwritten(num_rows * (2 + 2 * MAX_TOP));
    let params = SampleParams {
        logits: all.address(),
        adjusted: adjusted.address(),
        token_counts: counts.address(),
        sampling: sampling.address(),
        bias_ids: NULL,
        bias_values: NULL,
        late: NULL,
        outputs: outputs.address(),
        num_sampled: num_rows as u32,
        max_rows: num_rows as u32,
        vocab_size: vocab_size as u32,
        reserved: 0,
    };
    // SAFETY: memory is of the sizes that parameters say; no row has a bias or late words.
    unsafe { kernel.launch(&params, Order::Shuffled(1)) };
    adjusted.as_slice();
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
fn logprobs(logits: &[f32]) -> Vec<f64> {
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
    let [Drawn { token, logprob, top }] = &drawn[..] else { panic!("one row") };
    assert_eq!(*token, order[0]);
    assert!((f64::from(*logprob) - expected[*token]).abs() < 1e-5);
    assert_eq!(top.len(), 7);
    for ((id, logprob), expected_id) in top.iter().zip(order) {
        assert_eq!(*id as usize, expected_id);
        assert!((f64::from(*logprob) - expected[expected_id]).abs() < 1e-5);
    }
}

/// Evenly from 0 to 1, the first of a position's two numbers.
///
/// # Source
/// Salmon et al.: "Parallel random numbers: as easy as 1, 2, 3", 2011: Philox4x32-10.
fn uniform(seed: u64, position: u32) -> f64 {
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
    ((u64::from(counter[1]) << 32 | u64::from(counter[0])) >> 11) as f64 / (1_u64 << 53) as f64
}

/// Tokens that a row may draw, in order of ids, with their weights.
fn kept(logits: &[f32], row: &Row) -> Vec<(usize, f64)> {
    let greatest = logits.iter().copied().fold(f32::MIN, f32::max);
    let weight = |x: f32| (f64::from(x - greatest) / f64::from(row.temperature)).exp();
    let mut kept: Vec<(usize, f64)> =
        logits.iter().enumerate().map(|(id, x)| (id, weight(*x))).collect();
    kept.sort_by(|a, b| b.1.total_cmp(&a.1));
    if row.top_k > 0 {
        kept.truncate(row.top_k as usize);
    }
    kept.retain(|(_, weight)| *weight >= f64::from(row.min_p));
    if row.top_p > 0.0 {
        let all: f64 = kept.iter().map(|(_, weight)| weight).sum();
        let mut sum = 0.0;
        let enough = kept.iter().take_while(|(_, weight)| {
            let is_wanted = sum < f64::from(row.top_p) * all;
            sum += weight;
            is_wanted
        });
        kept.truncate(enough.count());
    }
    kept.sort_by_key(|(id, _)| *id);
    kept
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
    for (row, drawn) in rows.iter().zip(drawn) {
        let kept = kept(&logits, row);
        let all: f64 = kept.iter().map(|(_, weight)| weight).sum();
        let target = uniform(row.seed, row.position) * all;
        let before: f64 =
            kept.iter().filter(|(id, _)| *id < drawn.token).map(|(_, weight)| weight).sum();
        let own = kept.iter().find(|(id, _)| *id == drawn.token).expect("a token that is kept").1;
        // Weights there are f32.
        let rounding = 1e-6 * all;
        assert!(before - rounding <= target && target <= before + own + rounding);
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
