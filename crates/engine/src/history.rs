//! Rules that look at the tokens so far: DRY and bad words.
//!
//! They say how the logits of a few tokens change, which depends on the token just before: so they
//! come late, as grammars do.
//!
//! # Source
//! DRY ("don't repeat yourself"): its author's description in text-generation-webui's pull request
//! 5677, with sequence breakers as llama.cpp reads them (`llama-sampling.cpp`, `dry`).

use std::{collections::HashMap, sync::Arc};

/// Discourages tokens that would go on with a repetition, the more so the longer it is.
#[derive(Clone, Debug, PartialEq)]
pub struct DryParams {
    /// Penalty of the shortest repetition that counts; over 0.
    pub multiplier: f32,
    /// By how much the penalty grows with each further token; at least 1.
    pub base: f32,
    /// Repetitions of so many tokens count; at least 1.
    pub allowed_length: usize,
    /// Only so many of the last tokens are looked at; 0: all.
    pub last_n: usize,
    /// No repetition reaches over these.
    pub breakers: Arc<DryBreakers>,
}

/// Token sequences that end a repetition: by the first token, all ways to go on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DryBreakers(pub HashMap<u32, Vec<Vec<u32>>>);

/// Most tokens of a row that DRY discourages: the most discouraged ones.
pub(crate) const MAX_DRY_TOKENS: usize = 256;

impl DryParams {
    /// Adds to `bias` what discourages repetitions of `tokens`.
    pub(crate) fn penalise(&self, tokens: &[u32], bias: &mut Vec<(u32, f32)>) {
        let tokens = match self.last_n {
            0 => tokens,
            last_n => &tokens[tokens.len().saturating_sub(last_n)..],
        };
        let limit = self.breakers.longest_suffix(tokens);
        if limit < self.allowed_length {
            return;
        }
        let mut longest: HashMap<u32, usize> = HashMap::new();
        for (len, next) in repetitions(tokens) {
            let len = len.min(limit);
            if len >= self.allowed_length {
                let known = longest.entry(next).or_default();
                *known = len.max(*known);
            }
        }
        let mut found: Vec<(u32, usize)> = longest.into_iter().collect();
        found.sort_unstable_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
        found.truncate(MAX_DRY_TOKENS);
        bias.extend(found.into_iter().map(|(token, len)| (token, -self.penalty(len))));
    }

    fn penalty(&self, len: usize) -> f32 {
        let exponent = (len - self.allowed_length) as f64;
        let penalty = f64::from(self.multiplier) * f64::from(self.base).powf(exponent);
        // A finite penalty only makes a token unlikely.
        penalty.min(f64::from(f32::MAX) / 4.0) as f32
    }
}

impl DryBreakers {
    /// Length of the longest end of `tokens` that holds no whole breaker.
    fn longest_suffix(&self, tokens: &[u32]) -> usize {
        for (start, token) in tokens.iter().enumerate().rev() {
            let tails = self.0.get(token).into_iter().flatten();
            let matching = tails.filter(|tail| tokens[start + 1..].starts_with(tail));
            if let Some(len) = matching.map(Vec::len).max() {
                return tokens.len() - 1 - start - len;
            }
        }
        tokens.len()
    }
}

/// For every token but the first: how long a stretch before it equals the end of `tokens`.
///
/// By the Z-algorithm on the reversed tokens, so that the whole takes time linear in their number.
fn repetitions(tokens: &[u32]) -> impl Iterator<Item = (usize, u32)> + '_ {
    let len = tokens.len();
    let reversed = move |i: usize| tokens[len - 1 - i];
    let mut equal = vec![0; len];
    // The stretch found that reaches furthest.
    let (mut left, mut right) = (0, 0);
    for i in 1..len {
        let mut z = if i < right { equal[i - left].min(right - i) } else { 0 };
        while i + z < len && reversed(z) == reversed(i + z) {
            z += 1;
        }
        if i + z > right {
            (left, right) = (i, i + z);
        }
        equal[i] = z;
    }
    (1..len).map(move |i| (equal[i], reversed(i - 1)))
}

/// Bans the last token of every word whose other tokens have just come.
pub(crate) fn ban_words(words: &[Vec<u32>], tokens: &[u32], bias: &mut Vec<(u32, f32)>) {
    for word in words {
        if let Some((last, others)) = word.split_last()
            && tokens.ends_with(others)
        {
            bias.push((*last, f32::NEG_INFINITY));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dry(tokens: &[u32], breakers: &[(u32, &[u32])], last_n: usize) -> Vec<(u32, f32)> {
        let mut map: HashMap<u32, Vec<Vec<u32>>> = HashMap::new();
        for (head, tail) in breakers {
            map.entry(*head).or_default().push(tail.to_vec());
        }
        let breakers = Arc::new(DryBreakers(map));
        let params = DryParams { multiplier: 0.5, base: 2.0, allowed_length: 2, last_n, breakers };
        let mut bias = Vec::new();
        params.penalise(tokens, &mut bias);
        bias.sort_by_key(|(token, _)| *token);
        bias
    }

    /// By the description: penalty = multiplier * base ^ (repetition - allowed length).
    #[test]
    fn tokens_that_would_repeat_are_discouraged_by_the_length_of_the_repetition() {
        assert_eq!(dry(&[1, 2, 3, 9, 1, 2], &[], 0), [(3, -0.5)]);
        assert_eq!(dry(&[7, 1, 2, 3, 9, 7, 1, 2], &[], 0), [(3, -1.0)]);
        assert_eq!(dry(&[1, 2, 3, 8, 1, 2, 4, 7, 1, 2], &[], 0), [(3, -0.5), (4, -0.5)]);
        // The longest of several counts.
        assert_eq!(dry(&[1, 2, 3, 5, 1, 2, 3, 5, 1, 2], &[], 0), [(3, -8.0)]);
        assert_eq!(dry(&[1, 2, 3, 4], &[], 0), []);
        assert_eq!(dry(&[1, 1, 1, 1], &[], 0), [(1, -1.0)]);
        assert_eq!(dry(&[], &[], 0), []);
    }

    #[test]
    fn only_the_last_tokens_count() {
        assert_eq!(dry(&[1, 2, 3, 9, 1, 2], &[], 5), []);
        assert_eq!(dry(&[1, 2, 3, 9, 1, 2], &[], 6), [(3, -0.5)]);
    }

    #[test]
    fn no_repetition_reaches_over_a_breaker() {
        let tokens = [7, 1, 2, 3, 9, 7, 1, 2];
        assert_eq!(dry(&tokens, &[(7, &[])], 0), [(3, -0.5)]);
        assert_eq!(dry(&tokens, &[(1, &[])], 0), []);
        assert_eq!(dry(&tokens, &[(2, &[])], 0), []);
        assert_eq!(dry(&tokens, &[(9, &[7])], 0), [(3, -0.5)]);
        assert_eq!(dry(&tokens, &[(9, &[8])], 0), [(3, -1.0)]);
    }

    #[test]
    fn words_are_banned_when_all_but_their_last_token_has_come() {
        let words = vec![vec![5], vec![1, 2], vec![2, 1, 3], vec![2, 2]];
        let mut bias = Vec::new();
        ban_words(&words, &[9, 2, 1], &mut bias);
        assert_eq!(bias, [(5, f32::NEG_INFINITY), (2, f32::NEG_INFINITY), (3, f32::NEG_INFINITY)]);
    }

    /// By the description's own words and by transformers; see `tests/make_history_fixtures.py`.
    #[test]
    fn histories_weigh_what_others_have_them_weigh() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/history.json");
        let cases: Vec<serde_json::Value> =
            serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let ids = |value: &serde_json::Value| -> Vec<u32> {
            serde_json::from_value(value.clone()).unwrap()
        };
        let mut num_penalties = 0;
        for case in &cases {
            let (tokens, rule) = (ids(&case["tokens"]), &case["rule"]);
            let breakers = ids(&case["breakers"]).into_iter().map(|id| (id, vec![vec![]]));
            let params = DryParams {
                multiplier: rule["multiplier"].as_f64().unwrap() as f32,
                base: rule["base"].as_f64().unwrap() as f32,
                allowed_length: rule["allowed_length"].as_u64().unwrap() as usize,
                last_n: rule["last_n"].as_u64().unwrap() as usize,
                breakers: Arc::new(DryBreakers(breakers.collect())),
            };
            let mut bias = Vec::new();
            params.penalise(&tokens, &mut bias);
            bias.sort_by_key(|(token, _)| *token);
            let expected: Vec<(u32, f32)> =
                serde_json::from_value(case["penalties"].clone()).unwrap();
            assert_eq!(bias.len(), expected.len(), "{case}: {bias:?}");
            for ((token, change), (expected, penalty)) in bias.iter().zip(expected) {
                assert_eq!(*token, expected, "{case}");
                assert!((change + penalty).abs() <= 1e-5 * penalty, "{case}: {change}");
                num_penalties += 1;
            }

            let words: Vec<Vec<u32>> = serde_json::from_value(case["words"].clone()).unwrap();
            let mut bias = Vec::new();
            ban_words(&words, &tokens, &mut bias);
            let mut banned: Vec<u32> = bias.iter().map(|(token, _)| *token).collect();
            banned.sort_unstable();
            banned.dedup();
            assert_eq!(banned, ids(&case["banned"]), "{case}");
        }
        assert!(num_penalties > 100, "{num_penalties}");
    }
}
