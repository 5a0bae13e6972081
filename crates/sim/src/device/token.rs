//! What the simulated model draws: a function of everything that the engine has to get right.
//!
//! A token depends on the keys and values of all positions before it, as they lie in the blocks of
//! its row's table; on the tokens counted for it, if it has penalties; on its bias, its seed and
//! its position. A block that was reused too early, moved wrongly or found under a wrong prefix, a
//! token counted twice or not at all: each gives another token.

use inflight_backend::SamplingRow;

use crate::random::mix;

/// What is stored for a token at a position.
pub(crate) fn kv_value(token: u32, position: u32) -> u64 {
    mix(u64::from(token) | u64::from(position) << 32)
}

/// What becomes of a place whose key is turned by some positions.
pub(crate) fn turned(value: u64, by: u32) -> u64 {
    mix(value ^ u64::from(by) << 32)
}

/// What is seen in all layers, given the sum of what one more layer sees.
pub(crate) fn with_layer(before: u64, sum: u64) -> u64 {
    before.rotate_left(9).wrapping_add(sum)
}

/// Which of a prompt's places stay when it is cut, in order: the last ones, which decide, and of
/// the others those that hold the greatest numbers.
pub(crate) fn chosen(values: &[u64], num_kept: usize, num_observed: usize) -> Vec<usize> {
    let num_others = values.len() - num_observed;
    let mut others: Vec<usize> = (0..num_others).collect();
    others.sort_by_key(|&place| std::cmp::Reverse(values[place]));
    others.truncate(num_kept - num_observed);
    others.sort_unstable();
    others.extend(num_others..values.len());
    others
}

/// What counting a token adds to its sequence's state.
pub(crate) fn count_value(token: u32, is_prompt: bool) -> u64 {
    mix(u64::from(token) << 1 | u64::from(is_prompt) | 1 << 40)
}

/// What a row's draw depends on besides its rules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    /// Of [`kv_value`] over the positions that each layer sees: [`with_layer`] of their sums.
    pub(crate) context: u64,
    /// Sum of [`count_value`] over all tokens before, if they are counted.
    pub(crate) counts: u64,
}

/// Draws a token below `vocab_size`. `bias`: all that applies, negative infinity bans.
///
/// # Panics
/// If everything is banned.
pub(crate) fn draw(seen: Seen, row: &SamplingRow, bias: &[(u32, f32)], vocab_size: u32) -> u32 {
    let mut key = mix(seen.context ^ u64::from(row.position) << 40);
    if row.state_slot.is_some() {
        let penalties =
            [row.repetition_penalty, row.presence_penalty, row.frequency_penalty].map(f32::to_bits);
        let penalties = penalties.iter().fold(seen.counts, |sum, bits| mix(sum ^ u64::from(*bits)));
        key = mix(key ^ penalties);
    }
    if row.temperature > 0.0 {
        key = mix(key ^ mix(row.seed) ^ u64::from(row.temperature.to_bits()));
    }
    for (token, value) in bias.iter().filter(|(_, value)| value.is_finite()) {
        key = key.wrapping_add(mix(u64::from(*token) << 32 | u64::from(value.to_bits())));
    }
    let is_banned = |token| bias.iter().any(|&(id, value)| id == token && value < f32::MIN);
    for attempt in 0..64 * u64::from(vocab_size) {
        let token = (mix(key.wrapping_add(attempt)) % u64::from(vocab_size)) as u32;
        if !is_banned(token) {
            return token;
        }
    }
    panic!("every token is banned");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draw_depends_on_all_that_it_should() {
        let seen = Seen { context: 5, counts: 6 };
        let row = SamplingRow { position: 3, temperature: 1.0, ..SamplingRow::GREEDY };
        let vocab_size = 1 << 20;
        let token = draw(seen, &row, &[], vocab_size);
        assert_eq!(draw(seen, &row, &[], vocab_size), token);
        // Nobody counts for a row without penalties, and greedy rows have no seed.
        assert_eq!(draw(Seen { counts: 7, ..seen }, &row, &[], vocab_size), token);
        let greedy = |seed| SamplingRow { seed, temperature: 0.0, ..row };
        assert_eq!(
            draw(seen, &greedy(1), &[], vocab_size),
            draw(seen, &greedy(2), &[], vocab_size)
        );
        let others = [
            draw(Seen { context: 8, ..seen }, &row, &[], vocab_size),
            draw(seen, &SamplingRow { position: 4, ..row }, &[], vocab_size),
            draw(seen, &SamplingRow { seed: 9, ..row }, &[], vocab_size),
            draw(seen, &SamplingRow { state_slot: Some(0), ..row }, &[], vocab_size),
            draw(seen, &row, &[(1, 0.5)], vocab_size),
            draw(seen, &row, &[(token, f32::NEG_INFINITY)], vocab_size),
        ];
        assert!(others.iter().all(|&other| other != token), "{token}: {others:?}");
    }
}
