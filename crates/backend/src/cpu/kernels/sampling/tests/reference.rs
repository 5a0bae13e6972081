//! Every option against other people's arithmetic; see `make_sampling_fixtures.py`.
//!
//! A draw is an exact function of the distribution and a uniform number: the first token at which
//! the sum of probabilities is greater. So a few thousand draws tell which tokens are left and how
//! likely each is, with nothing left to chance.

use serde_json::Value;

use super::*;

const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/sampling.json");
const NUM_DRAWS: u32 = 3000;
/// Sums are in f32, in an order of their own.
const TOLERANCE: f64 = 2e-6;

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

/// Pairs of a token and a number.
fn pairs(value: &Value) -> Vec<(u32, f64)> {
    let pair = |pair: &Value| (pair[0].as_u64().unwrap() as u32, pair[1].as_f64().unwrap());
    value.as_array().unwrap().iter().map(pair).collect()
}

/// The options of a case. None that the fixture names is left out.
fn options(case: &Value) -> SamplingRow {
    let mut row = SamplingRow { seed: 99, ..ALL };
    for (name, value) in case["options"].as_object().unwrap() {
        let number = value.as_f64().unwrap() as f32;
        match name.as_str() {
            "temperature" => row.temperature = number,
            "top_k" => row.top_k = number as u32,
            "top_p" => row.top_p = number,
            "min_p" => row.min_p = number,
            "typical_p" => row.typical_p = number,
            "top_n_sigma" => row.top_n_sigma = number,
            "xtc_probability" => row.xtc_probability = number,
            "xtc_threshold" => row.xtc_threshold = number,
            "repetition_penalty" => row.repetition_penalty = number,
            "presence_penalty" => row.presence_penalty = number,
            "frequency_penalty" => row.frequency_penalty = number,
            other => panic!("{other} is new here"),
        }
    }
    row
}

/// A batch that draws a case again and again.
fn batch(case: &Value, logits: &[f32]) -> Batch {
    let bias: Vec<(u32, f32)> =
        pairs(&case["bias"]).iter().map(|(id, value)| (*id, *value as f32)).collect();
    let mut token_counts = vec![0; logits.len()];
    for (token, count) in pairs(&case["counts"]) {
        token_counts[token as usize] = if count < 0.0 { IN_PROMPT } else { count as u32 };
    }
    let options = options(case);
    let row = |position| SamplingRow {
        position,
        state_slot: Some(0),
        bias_len: bias.len() as u32,
        ..options
    };
    let rows = (0..NUM_DRAWS).map(row).collect();
    Batch { bias, token_counts, ..Batch::new(logits, rows) }
}

/// The token that a uniform number stands for; `None` so near to two that rounding may decide.
fn expected(probabilities: &[f64], uniform: f64) -> Option<u32> {
    let mut sum = 0.0;
    for (token, probability) in probabilities.iter().enumerate() {
        sum += probability;
        if (uniform - sum).abs() < TOLERANCE {
            return None;
        }
        if uniform < sum {
            return Some(token as u32);
        }
    }
    None
}

#[test]
fn every_option_leaves_what_others_leave() {
    let fixture: Value = serde_json::from_slice(&std::fs::read(FIXTURE).unwrap()).unwrap();
    let cases = fixture["cases"].as_array().unwrap();
    at_every_level(|cores| {
        let (mut num_unsure, mut num_struck) = (0, 0);
        for case in cases {
            let row = case["row"].as_u64().unwrap() as usize;
            let logits: Vec<f32> =
                numbers(&fixture["logits"][row]).iter().map(|x| *x as f32).collect();
            let left = numbers(&case["probabilities"]);
            let batch = batch(case, &logits);
            let drawn = batch.tokens(cores);
            for (options, token) in batch.rows.iter().zip(drawn) {
                let (seed, position) = (options.seed, options.position);
                let chance = philox::second_uniform(seed, position);
                let is_struck = chance < f64::from(options.xtc_probability);
                let struck = is_struck.then(|| numbers(&case["excluded"]));
                let probabilities = struck.as_ref().unwrap_or(&left);
                num_struck += usize::from(is_struck);
                match expected(probabilities, philox::uniform(seed, position)) {
                    Some(expected) => assert_eq!(token, expected, "{}", case["options"]),
                    None => num_unsure += 1,
                }
            }
        }
        let num_draws = cases.len() * NUM_DRAWS as usize;
        assert!(num_draws > 100_000 && num_struck > 10_000, "{num_draws} {num_struck}");
        assert!(num_unsure < num_draws / 1000, "{num_unsure} of {num_draws}");
    });
}
