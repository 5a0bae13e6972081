//! `sample.cu`: which tokens the rules leave, by their definitions in f64, and what comes late.

use inflight_kernels::{Arch, ops::sample::Sample};

use crate::{
    emulator::{Emulated, ORDERS, Order},
    memory::Dice,
    sample::{Drawn, Inputs, NONE, Row, draw_by, logprobs, uniform},
};

/// A token that may be drawn.
#[derive(Clone, Copy)]
struct Token {
    id: usize,
    logit: f64,
    /// Its probability, but for a factor that all have.
    weight: f64,
}

/// Tokens that a row may draw, in order of ids. The likeliest come first in between, of equals the
/// lower id.
fn kept(logits: &[f32], row: &Row) -> Vec<Token> {
    let mut kept: Vec<Token> = logits
        .iter()
        .enumerate()
        .filter(|(_, logit)| logit.is_finite())
        .map(|(id, logit)| Token { id, logit: f64::from(*logit), weight: 0.0 })
        .collect();
    kept.sort_by(|a, b| b.logit.total_cmp(&a.logit));
    let greatest = kept[0].logit;
    for token in &mut kept {
        token.weight = ((token.logit - greatest) / f64::from(row.temperature)).exp();
    }
    if row.top_n_sigma > 0.0 {
        keep_sigmas(&mut kept, row.top_n_sigma.into());
    }
    if row.top_k > 0 {
        kept.truncate(row.top_k as usize);
    }
    if row.typical_p > 0.0 {
        keep_typical(&mut kept, row.typical_p.into());
    }
    let likeliest = kept[0].weight;
    kept.retain(|token| token.weight >= f64::from(row.min_p) * likeliest);
    if row.top_p > 0.0 {
        let num = num_reaching(&kept, row.top_p.into());
        kept.truncate(num);
    }
    let [probability, threshold] = row.xtc.map(f64::from);
    if uniform(row.seed, row.position)[1] < probability {
        let least = threshold * sum(&kept);
        let num_likely = kept.iter().filter(|token| token.weight >= least).count();
        // All of them but the last.
        kept.drain(..num_likely.saturating_sub(1));
    }
    kept.sort_by_key(|token| token.id);
    kept
}

fn sum(tokens: &[Token]) -> f64 {
    tokens.iter().map(|token| token.weight).sum()
}

/// Of tokens in their order, so many that their weights reach this share.
fn num_reaching(tokens: &[Token], share: f64) -> usize {
    let (mut before, all) = (0.0, sum(tokens));
    let is_wanted = |token: &&Token| {
        let is_wanted = before < share * all;
        before += token.weight;
        is_wanted
    };
    tokens.iter().take_while(is_wanted).count()
}

/// Those that are at most so many standard deviations below the greatest.
///
/// # Source
/// Tang et al.: "Top-n-sigma: not all logits are you need", 2024, section 3.
fn keep_sigmas(kept: &mut Vec<Token>, num: f64) {
    let mean_of =
        |value: &dyn Fn(&Token) -> f64| kept.iter().map(value).sum::<f64>() / kept.len() as f64;
    let mean = mean_of(&|token| token.logit);
    let variance = mean_of(&|token| (token.logit - mean).powi(2));
    let least = kept[0].logit - num * variance.sqrt();
    kept.retain(|token| token.logit >= least);
}

/// Those whose surprise is nearest to the expected one, as many as reach a share; equally near ones
/// go together.
///
/// # Source
/// Meister et al.: "Locally typical sampling", 2022, section 4.
fn keep_typical(kept: &mut Vec<Token>, share: f64) {
    let all = sum(kept);
    let surprise = |token: &Token| -(token.weight / all).ln();
    let entropy: f64 = kept.iter().map(|token| token.weight / all * surprise(token)).sum();
    let distance = |token: &Token| (surprise(token) - entropy).abs();
    let mut nearest = kept.clone();
    nearest.sort_by(|a, b| distance(a).total_cmp(&distance(b)));
    let radius = distance(&nearest[num_reaching(&nearest, share) - 1]);
    kept.retain(|token| distance(token) <= radius);
}

/// The token is where the sum of what is kept, in order of ids, reaches the row's random number.
pub(crate) fn check_draw(logits: &[f32], row: &Row, token: usize) {
    let kept = kept(logits, row);
    let target = uniform(row.seed, row.position)[0] * sum(&kept);
    let num_before = kept.iter().filter(|other| other.id < token).count();
    let own = kept.get(num_before).filter(|own| own.id == token);
    let own = own.unwrap_or_else(|| panic!("{token} is left out: {row:?}")).weight;
    let before = sum(&kept[..num_before]);
    // Weights there are f32.
    let rounding = 1e-6 * sum(&kept);
    let is_there = before - rounding <= target && target <= before + own + rounding;
    assert!(is_there, "{token}: {target} of {}, not {before} and {own}: {row:?}", sum(&kept));
}

fn kernel(is_unusual: bool) -> Option<Emulated<Sample>> {
    Emulated::new(Sample { unusual: is_unusual }, Arch::SM_80)
}

/// How often each kind of row is drawn for, and in which orders.
#[derive(Clone, Copy)]
struct Times<'a>(usize, &'a [Order]);

/// Draws for each kind of row from the same logits.
fn check(is_unusual: bool, logits: &[f32], kinds: &[Row], times: Times<'_>) -> Option<()> {
    let kernel = kernel(is_unusual)?;
    let row = |i: usize| Row {
        seed: 0x0123_4567_89ab_cdef * (i as u64 + 1),
        position: 3 * i as u32,
        ..kinds[i % kinds.len()]
    };
    let rows: Vec<Row> = (0..times.0 * kinds.len()).map(row).collect();
    let all = vec![logits.to_vec(); rows.len()];
    let inputs =
        Inputs { logits: &all, counts: &[0], rows: &rows, bias: &[], late: &[], num_parts: 0 };
    let numbers = logits.iter().map(|x| if x.is_nan() { f32::NEG_INFINITY } else { *x });
    let expected = logprobs(&numbers.collect::<Vec<_>>());
    for order in times.1 {
        for (row, drawn) in rows.iter().zip(draw_by(&kernel, inputs, *order)?) {
            check_draw(logits, row, drawn.token);
            // Of the model itself, whatever the rules left.
            let right = if row.num_top.is_some() { expected[drawn.token] } else { 0.0 };
            assert!((f64::from(drawn.logprob) - right).abs() < 1e-5, "{row:?}");
            assert_eq!(drawn.top.len(), row.num_top.unwrap_or(0) as usize);
        }
    }
    Some(())
}

/// Every rule alone and several together; thresholds are of the likeliest token.
fn rules(temperature: f32, likely: f32) -> [Row; 10] {
    let warm = Row { temperature, ..Row::default() };
    [
        warm,
        Row { typical_p: 0.5, num_top: Some(3), ..warm },
        Row { typical_p: 0.9, top_k: 20, ..warm },
        // Relative to the likeliest of those that are left.
        Row { typical_p: 0.3, min_p: 0.8, ..warm },
        // So warm that all that are left are nearly as likely.
        Row { top_n_sigma: 1.7, temperature: 20.0, ..warm },
        Row { top_n_sigma: 1.0, top_p: 0.7, num_top: Some(20), ..warm },
        Row { xtc: [1.0, likely / 2.0], ..warm },
        // More than any token has, and one of two times.
        Row { xtc: [1.0, 0.99], top_p: 0.9, ..warm },
        Row { xtc: [0.5, likely / 3.0], min_p: 0.1, top_k: 25, ..warm },
        Row {
            typical_p: 0.8,
            top_n_sigma: 2.0,
            xtc: [0.7, likely / 2.0],
            top_k: 30,
            top_p: 0.95,
            min_p: 0.05,
            ..warm
        },
    ]
}

#[test]
fn rules_that_look_at_the_whole_distribution() {
    for (vocab_size, temperature, times) in
        [(37, 1.5, Times(5, &ORDERS)), (3001, 0.3, Times(3, &ORDERS[1..2]))]
    {
        let mut logits = Dice::new(81).f32s(vocab_size, 6.0);
        // No numbers, nothing, and some that are equal.
        (logits[3], logits[4]) = (f32::NAN, f32::NEG_INFINITY);
        logits[5] = logits[30];
        let greatest = kept(&logits, &Row { top_k: 1, temperature, ..Row::default() });
        let warm = Row { temperature, ..Row::default() };
        let likely = greatest[0].weight / sum(&kept(&logits, &warm));
        let rules = rules(temperature, likely as f32);
        let is_left_out = |row: &Row| kept(&logits, row).len() < vocab_size - 2;
        assert!(rules[1..7].iter().all(is_left_out), "all rules do something");
        let Some(()) = check(true, &logits, &rules, times) else { return };
    }
}

#[test]
fn of_equal_tokens_the_first_are_kept() {
    let warm = Row { temperature: 0.7, ..Row::default() };
    // More than are sorted at once; the likely ones few, or many.
    for likely in [100, 2200] {
        let mut logits = vec![-1.0; 2500];
        logits[2500 - likely..].fill(1.0);
        let kinds = [
            Row { top_k: 1500, num_top: Some(20), ..warm },
            Row { top_p: 0.3, ..warm },
            Row { top_p: 0.99, min_p: 0.01, ..warm },
        ];
        let once = Times(1, &ORDERS[1..2]);
        for is_unusual in [false, true] {
            let Some(()) = check(is_unusual, &logits, &kinds, once) else { return };
        }
        let kinds = [
            Row { typical_p: 0.6, top_k: 1500, ..warm },
            Row { xtc: [1.0, 1e-5], top_k: 2300, ..warm },
        ];
        check(true, &logits, &kinds, once);
    }
}

/// So large that groups of tokens are of several steps.
#[test]
fn draws_from_large_vocabularies() {
    let logits = Dice::new(83).f32s(140_001, 6.0);
    let warm = Row { temperature: 0.5, ..Row::default() };
    let kinds = [warm, Row { top_p: 0.5, ..warm }, Row { top_n_sigma: 1.0, ..warm }];
    check(true, &logits, &kinds, Times(2, &ORDERS[1..2]));
}

const VOCAB_SIZE: usize = 71;

/// Late words of three rows: a mask and a bias, a mask alone, a bias alone.
fn late_words(masks: [[u32; 3]; 2], bias: &[(u32, f32)]) -> Vec<u32> {
    let (len, num) = (bias.len() as u32, 3 * 4);
    let headers = [[num, num + 6, len, 0], [num + 3, 0, 0, 0], [NONE, num + 6, len, 0]];
    let ids = bias.iter().map(|(id, _)| *id);
    let words = headers.concat().into_iter().chain(masks.concat()).chain(ids);
    words.chain(bias.iter().map(|(_, x)| x.to_bits())).collect()
}

/// Staged and late bias are added where ids are tokens, then what the mask lacks is impossible.
fn adjusted(logits: &[f32], bias: [&[(u32, f32)]; 2], mask: Option<&[u32; 3]>) -> Vec<f32> {
    let mut logits = logits.to_vec();
    for (id, x) in bias.concat() {
        if let Some(logit) = logits.get_mut(id as usize) {
            *logit += x;
        }
    }
    for (id, logit) in logits.iter_mut().enumerate() {
        if mask.is_some_and(|mask| mask[id / 32] >> (id % 32) & 1 == 0) {
            *logit = f32::NEG_INFINITY;
        }
    }
    logits
}

#[test]
fn late_masks_and_biases() {
    let Some(kernel) = kernel(true) else { return };
    let logits = Dice::new(82).f32s(VOCAB_SIZE, 3.0);
    let masks = [[0x0ff0_00ff, 0, 0x41], [0, 1, 0]];
    // Twice for one token, and beyond the vocabulary.
    let late_bias = [(4, 9.0), (70, 2.0), (4, -1.5), (71, 5.0), (40, 90.0)];
    let late = late_words(masks, &late_bias);
    let staged = [(8, 50.0), (5, 1.25), (u32::MAX, 3.0), (5, 0.5), (70, -0.25)];
    let warm = Row { temperature: 2.0, ..Row::default() };
    let plain = |late_row, bias| Row { late_row: Some(late_row), bias, ..warm };
    let typical = |late_row| Row { typical_p: 0.7, ..plain(late_row, [0; 2]) };
    let rows = [
        plain(0, [1, 4]),
        plain(1, [0; 2]),
        plain(2, [1, 4]),
        Row { temperature: 0.0, ..plain(0, [0; 2]) },
        Row { bias: [0, 2], ..warm },
        typical(0),
        typical(1),
        Row { xtc: [1.0, 0.01], ..plain(2, [0; 2]) },
    ];
    let all = vec![logits.clone(); rows.len()];
    let (bias, late) = (&staged[..], &late[..]);
    let inputs = Inputs { logits: &all, counts: &[0], rows: &rows, bias, late, num_parts: 2 };
    for order in ORDERS {
        let Some(all_drawn) = draw_by(&kernel, inputs, order) else { return };
        for (row, drawn) in rows.iter().zip(all_drawn) {
            let [start, len] = row.bias.map(|x| x as usize);
            let mask = row.late_row.and_then(|late_row| masks.get(late_row as usize));
            let late_bias = if matches!(row.late_row, Some(0 | 2)) { &late_bias[..] } else { &[] };
            check_adjusted(
                row,
                &drawn,
                &adjusted(&logits, [&staged[start..start + len], late_bias], mask),
            );
        }
    }
}

fn check_adjusted(row: &Row, drawn: &Drawn, expected: &[f32]) {
    if row.temperature > 0.0 {
        check_draw(expected, row, drawn.token);
    } else {
        let greatest = expected.iter().copied().fold(f32::MIN, f32::max);
        assert_eq!(Some(drawn.token), expected.iter().position(|x| *x == greatest));
    }
    // Rules leave tokens out of the row itself.
    if row.typical_p == 0.0 && row.xtc[0] == 0.0 {
        assert_eq!(drawn.adjusted, expected, "{row:?}");
    }
}
