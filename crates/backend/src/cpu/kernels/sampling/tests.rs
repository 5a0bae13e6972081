//! Sampling as a whole: distributions, supports, ties, determinism.

use super::*;
use crate::{
    cpu::kernels::{
        testing::{at_every_level, normal},
        tracking::IN_PROMPT,
    },
    late::{LateWriter, late_words},
    step::MAX_TOP_LOGPROBS,
};

mod reference;

const ALL: SamplingRow = SamplingRow { temperature: 1.0, ..SamplingRow::GREEDY };

/// A batch of sampled rows.
#[derive(Default)]
struct Batch {
    logits: Vec<f32>,
    vocab_size: usize,
    token_counts: Vec<u32>,
    rows: Vec<SamplingRow>,
    bias: Vec<(u32, f32)>,
    late: Vec<u32>,
}

impl Batch {
    /// The same logits for each of `rows`.
    fn new(logits: &[f32], rows: Vec<SamplingRow>) -> Self {
        let (vocab_size, logits) = (logits.len(), logits.repeat(rows.len()));
        Self { logits, vocab_size, rows, ..Self::default() }
    }

    /// The output words, in a layout with room for two rows more.
    fn run(&self, cores: Cores<'_>) -> (OutputLayout, Vec<u32>) {
        let layout = OutputLayout { max_rows: self.rows.len() + 2 };
        let sampling: Vec<u32> = self.rows.iter().flat_map(|row| row.to_words()).collect();
        let (bias_ids, bias_values): (Vec<u32>, Vec<u32>) =
            self.bias.iter().map(|(id, value)| (*id, value.to_bits())).unzip();
        let mut outputs = vec![0xdead_beef; layout.num_words()];
        sample(
            cores,
            Sample {
                logits: &self.logits,
                token_counts: &self.token_counts,
                sampling: &sampling,
                bias_ids: &bias_ids,
                bias_values: &bias_values,
                late: &self.late,
                outputs: &mut outputs,
                layout,
                num_sampled: self.rows.len(),
                vocab_size: self.vocab_size,
            },
        );
        (layout, outputs)
    }

    fn tokens(&self, cores: Cores<'_>) -> Vec<u32> {
        self.run(cores).1[..self.rows.len()].to_vec()
    }
}

/// One row alone.
fn token(cores: Cores<'_>, logits: &[f32], options: SamplingRow) -> u32 {
    Batch::new(logits, vec![options]).tokens(cores)[0]
}

/// Draws at `num` positions with the same logits.
fn draws(cores: Cores<'_>, logits: &[f32], options: SamplingRow, num: u32) -> Vec<u32> {
    let rows = (0..num).map(|position| SamplingRow { position, ..options }).collect();
    Batch::new(logits, rows).tokens(cores)
}

/// Fails unless `draws` look like `probabilities`: Pearson's chi-square, five standard deviations
/// above its mean at most. Draws are seeded, so this passes always or never.
fn assert_distributed(draws: &[u32], probabilities: &[f64]) {
    let num = draws.len() as f64;
    let mut counts = vec![0.0; probabilities.len()];
    for token in draws {
        counts[*token as usize] += 1.0;
    }
    let (mut statistic, mut freedom) = (0.0_f64, -1.0_f64);
    for (count, probability) in counts.iter().zip(probabilities) {
        if *probability == 0.0 {
            assert_eq!(*count, 0.0, "an impossible token was drawn");
            continue;
        }
        statistic += (count - num * probability).powi(2) / (num * probability);
        freedom += 1.0;
    }
    let limit = freedom + 5.0 * (2.0 * freedom).sqrt();
    assert!(statistic < limit, "chi-square {statistic} with {freedom} degrees of freedom");
}

const PROBABILITIES: [f64; 6] = [0.05, 0.3, 0.1, 0.25, 0.1, 0.2];

fn six() -> Vec<f32> {
    PROBABILITIES.iter().map(|p| p.ln() as f32 + 3.0).collect()
}

#[test]
fn draws_follow_the_softmax_at_any_temperature() {
    at_every_level(|cores| {
        for temperature in [0.5_f32, 1.0, 2.0] {
            let power: Vec<f64> =
                PROBABILITIES.iter().map(|p| p.powf(1.0 / f64::from(temperature))).collect();
            let total: f64 = power.iter().sum();
            let expected: Vec<f64> = power.iter().map(|p| p / total).collect();
            let options = SamplingRow { temperature, seed: 42, ..ALL };
            assert_distributed(&draws(cores, &six(), options, 20_000), &expected);
        }
    });
}

#[test]
fn filters_renormalise_what_they_keep() {
    let kept = |ids: &[usize]| {
        let total: f64 = ids.iter().map(|id| PROBABILITIES[*id]).sum();
        let share = |id| if ids.contains(&id) { PROBABILITIES[id] / total } else { 0.0 };
        (0..6).map(share).collect::<Vec<f64>>()
    };
    at_every_level(|cores| {
        let check = |options, ids: &[usize]| {
            let options = SamplingRow { seed: 7, ..options };
            assert_distributed(&draws(cores, &six(), options, 20_000), &kept(ids));
        };
        check(SamplingRow { top_k: 3, ..ALL }, &[1, 3, 5]);
        check(SamplingRow { top_k: 4, ..ALL }, &[1, 2, 3, 5]); // 2 and 4 tie.
        check(SamplingRow { top_k: 100, ..ALL }, &[0, 1, 2, 3, 4, 5]);
        check(SamplingRow { top_p: 0.54, ..ALL }, &[1, 3]);
        check(SamplingRow { top_p: 0.8, ..ALL }, &[1, 2, 3, 5]);
        check(SamplingRow { min_p: 0.6, ..ALL }, &[1, 3, 5]);
        check(SamplingRow { top_k: 3, top_p: 0.7, min_p: 0.1, ..ALL }, &[1, 3]);
    });
}

#[test]
fn large_vocabularies_are_drawn_from_evenly() {
    // Four likely tokens far apart, one of them last, among many impossible ones.
    let mut logits = vec![-200.0; 50_000];
    let likely = [0, 255, 256, 49_999];
    likely.iter().for_each(|id| logits[*id] = 5.0);
    at_every_level(|cores| {
        for options in [ALL, SamplingRow { top_p: 0.999_9, ..ALL }, SamplingRow { top_k: 4, ..ALL }]
        {
            let options = SamplingRow { seed: 3, ..options };
            let places: Vec<u32> = draws(cores, &logits, options, 800)
                .iter()
                .map(|token| likely.iter().position(|id| *id as u32 == *token).unwrap() as u32)
                .collect();
            assert_distributed(&places, &[0.25; 4]);
        }
    });
}

#[test]
fn greedy_takes_the_lowest_of_the_greatest() {
    at_every_level(|cores| {
        let check = |logits: &[f32], expected| {
            assert_eq!(token(cores, logits, SamplingRow::GREEDY), expected);
            assert_eq!(token(cores, logits, SamplingRow { temperature: -1.0, ..ALL }), expected);
            assert_eq!(
                token(cores, logits, SamplingRow { temperature: f32::NAN, ..ALL }),
                expected
            );
            assert_eq!(token(cores, logits, SamplingRow { temperature: 1e-39, ..ALL }), expected);
        };
        check(&[1.0, 3.0, 3.0, 2.0], 1);
        check(&[-0.0, 0.0, -1.0], 0);
        check(&[f32::NAN, 1.0, f32::NAN, 1.0], 1);
        check(&[f32::NEG_INFINITY, f32::NAN], 0);
        check(&[f32::NAN; 3], 0);
        check(&[f32::NEG_INFINITY; 3], 0);
        check(&[1.0, f32::INFINITY, f32::INFINITY], 1);
        check(&[f32::MIN, f32::MIN], 0);
        let mut long = normal(1, 100_000);
        (long[70_001], long[99_999]) = (50.0, 50.0);
        check(&long, 70_001);
    });
}

#[test]
fn broken_rows_draw_something_without_a_panic() {
    at_every_level(|cores| {
        for options in [ALL, SamplingRow { top_p: 0.5, ..ALL }, SamplingRow { top_k: 2, ..ALL }] {
            assert_eq!(token(cores, &[f32::NAN; 4], options), 0);
            assert_eq!(token(cores, &[f32::NEG_INFINITY; 4], options), 0);
            assert_eq!(token(cores, &[1.0, f32::INFINITY, 2.0, f32::NAN], options), 1);
            assert_eq!(token(cores, &[f32::NAN, f32::NEG_INFINITY, 2.0, f32::NAN], options), 2);
        }
    });
}

#[test]
fn extreme_options_keep_their_meaning() {
    at_every_level(|cores| {
        for temperature in [1e6, f32::MAX, f32::INFINITY] {
            let options = SamplingRow { temperature, seed: 9, ..ALL };
            assert_distributed(&draws(cores, &six(), options, 6000), &[1.0 / 6.0; 6]);
        }
        let likeliest = [
            SamplingRow { top_p: 1e-30, ..ALL },
            SamplingRow { top_p: 0.0, ..ALL },
            SamplingRow { top_k: 1, ..ALL },
            SamplingRow { min_p: 1.0, ..ALL },
            SamplingRow { temperature: 1e-6, ..ALL },
        ];
        for options in likeliest {
            assert_eq!(draws(cores, &six(), options, 50), [1; 50]);
        }
    });
}

#[test]
fn bans_and_bias_hold() {
    at_every_level(|cores| {
        let mut batch = Batch::new(&six(), vec![]);
        batch.bias = vec![(0, 100.0), (1, f32::NEG_INFINITY), (3, f32::NEG_INFINITY)];
        batch.rows = (0..500)
            .map(|position| SamplingRow { position, bias_start: 1, bias_len: 2, ..ALL })
            .collect();
        batch.rows.push(SamplingRow { bias_start: 0, bias_len: 1, ..SamplingRow::GREEDY });
        batch.rows.push(SamplingRow { bias_start: 3, bias_len: 0, ..SamplingRow::GREEDY });
        batch.logits = six().repeat(batch.rows.len());
        let tokens = batch.tokens(cores);
        assert!(tokens[..500].iter().all(|token| ![1, 3].contains(token)));
        assert_eq!(tokens[500..], [0, 1]);
    });
}

#[test]
fn late_rows_draw_what_their_masks_allow() {
    at_every_level(|cores| {
        let rows = (0..500).map(|position| SamplingRow { position, late_row: Some(1), ..ALL });
        let mut batch = Batch::new(&six(), rows.collect());
        let late = |row| SamplingRow { late_row: Some(row), ..SamplingRow::GREEDY };
        batch.rows.extend([late(0), late(2), SamplingRow::GREEDY]);
        batch.logits = six().repeat(batch.rows.len());
        batch.late = vec![0; late_words(3, 6)];
        let mut writer = LateWriter::new(&mut batch.late, 3);
        writer.mask(1, &[0b10_0101]);
        writer.mask(0, &[0b1_0101]);
        writer.bias(0, &[(4, 0.1)]);
        let tokens = batch.tokens(cores);
        let expected = [0.05 / 0.35, 0.0, 0.1 / 0.35, 0.0, 0.0, 0.2 / 0.35];
        assert_distributed(&tokens[..500], &expected);
        assert_eq!(tokens[500..], [4, 1, 1], "a late row without a mask may draw anything");
    });
}

#[test]
fn penalties_use_the_rows_own_counts() {
    at_every_level(|cores| {
        let options = |state_slot| SamplingRow {
            state_slot,
            repetition_penalty: 2.0,
            frequency_penalty: 0.5,
            ..SamplingRow::GREEDY
        };
        let logits = [1.0, 1.5, 1.2];
        let mut batch =
            Batch::new(&logits, vec![options(Some(1)), options(Some(0)), options(None)]);
        // Slot 0: token 1 in the prompt; slot 1: tokens 1 and 2 in the output.
        batch.token_counts = vec![0, IN_PROMPT, 0, 0, 3, 1];
        assert_eq!(batch.tokens(cores), [0, 2, 1]);
    });
}

#[test]
fn logprobs_are_of_the_model_and_everything_is_laid_out() {
    at_every_level(|cores| {
        let mut batch = Batch::new(
            &six(),
            vec![
                SamplingRow { top_logprobs: Some(2), bias_len: 1, ..SamplingRow::GREEDY },
                SamplingRow::GREEDY,
                SamplingRow { top_logprobs: Some(0), temperature: 5.0, top_k: 1, ..ALL },
                SamplingRow { top_logprobs: Some(u32::MAX - 1), ..SamplingRow::GREEDY },
            ],
        );
        batch.bias = vec![(0, 50.0)];
        let (layout, words) = batch.run(cores);
        assert_eq!(words[..4], [0, 1, 1, 1]);
        assert_eq!(words[4..6], [0xdead_beef; 2], "rows that were not sampled stay as they were");
        let check = |word: u32, probability: f64| {
            let logprob = f64::from(f32::from_bits(word));
            assert!((logprob - probability.ln()).abs() < 1e-6, "{logprob} {probability}");
        };
        check(words[layout.logprob(0)], 0.05);
        check(words[layout.logprob(2)], 0.3);
        check(words[layout.logprob(3)], 0.3);
        assert_eq!(words[layout.logprob(1)], 0);
        let top = |row| (&words[layout.top_ids(row)], &words[layout.top_logprobs(row)]);
        let (ids, logprobs) = top(0);
        assert_eq!(ids[..3], [1, 3, u32::MAX]);
        check(logprobs[0], 0.3);
        check(logprobs[1], 0.25);
        assert_eq!(logprobs[2], 0);
        for row in [1, 2] {
            assert_eq!(top(row), (&[u32::MAX; MAX_TOP_LOGPROBS][..], &[0; MAX_TOP_LOGPROBS][..]));
        }
        assert_eq!(top(3).0[..7], [1, 3, 5, 2, 4, 0, u32::MAX]);
    });
}

#[test]
fn a_draw_depends_on_seed_and_position_and_not_on_other_rows() {
    let vocab_size = 5000;
    at_every_level(|cores| {
        let mut batch =
            Batch { vocab_size, logits: normal(30, 12 * vocab_size), ..Batch::default() };
        for i in 0..12 {
            batch.rows.push(SamplingRow {
                seed: u64::from(i % 3),
                position: 100 + i,
                top_k: [0, 40, 0, 700][i as usize % 4],
                top_p: [1.0, 0.9, 0.8, 1.0][i as usize % 4],
                top_logprobs: (i % 2 == 0).then_some(3),
                ..ALL
            });
        }
        let tokens = batch.tokens(cores);
        assert_eq!(batch.tokens(cores), tokens);
        for (i, options) in batch.rows.iter().enumerate() {
            let logits = &batch.logits[i * vocab_size..][..vocab_size];
            assert_eq!(token(cores, logits, *options), tokens[i]);
        }
        let logits = &batch.logits[..vocab_size];
        let base = draws(cores, logits, ALL, 50);
        assert_ne!(draws(cores, logits, SamplingRow { seed: 1, ..ALL }, 50), base);
        assert_ne!(draws(cores, logits, SamplingRow { seed: 1 << 32, ..ALL }, 50), base);
        assert!(base.windows(2).any(|pair| pair[0] != pair[1]));
    });
}

#[test]
fn no_rows_and_one_token_work() {
    at_every_level(|cores| {
        assert!(Batch::new(&six(), vec![]).tokens(cores).is_empty());
        for options in [ALL, SamplingRow { top_p: 0.1, ..ALL }, SamplingRow { top_k: 1, ..ALL }] {
            assert_eq!(token(cores, &[-3.0], options), 0);
        }
    });
}
