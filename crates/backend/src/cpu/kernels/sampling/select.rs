//! Finding the greatest logits of a row without sorting it.

/// Logits looked at together: only a group whose greatest counts is looked at one by one.
const GROUP: usize = 64;

/// A logit and its token in one number: greater for greater logits, and for lower ids among equal
/// ones. Zeros are equal whatever their sign.
pub(super) fn key(logit: f32, id: usize) -> u64 {
    let bits = (logit + 0.0).to_bits();
    // Negative numbers' bits grow the wrong way.
    let ordered = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    u64::from(ordered) << 32 | u64::from(!(id as u32))
}

/// The token of a [`key`].
pub(super) fn key_id(key: u64) -> u32 {
    !(key as u32)
}

/// The logit of a [`key`].
pub(super) fn key_logit(key: u64) -> f32 {
    let ordered = (key >> 32) as u32;
    f32::from_bits(if ordered >> 31 == 1 { ordered & !(1 << 31) } else { !ordered })
}

/// The greatest logit, NaN left out; -infinity if there is none.
pub(super) fn max_logit(logits: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut max = [f32::NEG_INFINITY; LANES];
    let mut chunks = logits.chunks_exact(LANES);
    for chunk in chunks.by_ref() {
        for (max, logit) in max.iter_mut().zip(chunk) {
            *max = if *logit > *max { *logit } else { *max };
        }
    }
    max.iter().chain(chunks.remainder()).copied().fold(f32::NEG_INFINITY, f32::max)
}

/// The lowest token with this logit; 0 if there is none.
pub(super) fn first_equal(logits: &[f32], logit: f32) -> u32 {
    logits.iter().position(|x| *x == logit).unwrap_or(0) as u32
}

/// Writes the keys of the `k` greatest logits to `keys`, greatest first; fewer if fewer are above
/// -infinity.
///
/// One pass keeps a pool of keys above the `k`-th greatest so far, and halves it when it is full.
pub(super) fn top_k(logits: &[f32], k: usize, keys: &mut Vec<u64>) {
    keys.clear();
    if k == 0 {
        return;
    }
    let most = 2 * k + 2 * GROUP;
    let mut floor = f32::NEG_INFINITY;
    for (group, start) in logits.chunks(GROUP).zip((0..).step_by(GROUP)) {
        // An equal logit further on has a higher id, so it never replaces the k-th.
        if max_logit(group) <= floor {
            continue;
        }
        for (i, logit) in group.iter().enumerate() {
            if *logit > floor {
                keys.push(key(*logit, start + i));
            }
        }
        if keys.len() >= most {
            keep_greatest(keys, k);
            floor = key_logit(keys[k - 1]);
        }
    }
    keep_greatest(keys, k);
    keys.sort_unstable_by(|a, b| b.cmp(a));
}

/// Leaves the `k` greatest keys, the least of them last.
fn keep_greatest(keys: &mut Vec<u64>, k: usize) {
    if keys.len() > k {
        keys.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
        keys.truncate(k);
    }
}

/// Calls `found` with every token whose logit's key is at least `least`, in order of ids.
pub(super) fn for_each_at_least(logits: &[f32], least: u64, mut found: impl FnMut(u32, f32)) {
    let floor = key_logit(least);
    for (group, start) in logits.chunks(GROUP).zip((0..).step_by(GROUP)) {
        if max_logit(group) < floor {
            continue;
        }
        for (i, logit) in group.iter().enumerate() {
            if *logit >= floor && key(*logit, start + i) >= least {
                found((start + i) as u32, *logit);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn keys_order_logits_then_ids() {
        let numbers = [f32::NEG_INFINITY, -2.0, -1e-40, 0.0, 1e-40, 2.0, f32::INFINITY];
        for pair in numbers.windows(2) {
            assert!(key(pair[0], 0) < key(pair[1], 9));
            assert!(key(pair[0], 3) > key(pair[0], 4));
        }
        assert_eq!(key(0.0, 7), key(-0.0, 7));
        for logit in numbers {
            assert_eq!((key_logit(key(logit, 5)), key_id(key(logit, 5))), (logit, 5));
        }
    }

    #[test]
    fn the_greatest_logit_is_found_among_anything() {
        assert_eq!(max_logit(&[]), f32::NEG_INFINITY);
        assert_eq!(max_logit(&[f32::NAN; 40]), f32::NEG_INFINITY);
        let mut logits = vec![f32::NAN; 100];
        for at in [0, 15, 16, 95, 99] {
            logits[at] = at as f32 - 200.0;
            assert_eq!(max_logit(&logits), at as f32 - 200.0);
        }
        assert_eq!(first_equal(&[f32::NAN, -0.0, 0.0], 0.0), 1);
        assert_eq!(first_equal(&[f32::NAN], f32::NEG_INFINITY), 0);
    }

    fn logits() -> impl Strategy<Value = Vec<f32>> {
        let logit = prop_oneof![
            4 => -3.0_f32..3.0,
            4 => (-3_i32..3).prop_map(|x| x as f32),
            1 => Just(f32::NEG_INFINITY),
            1 => Just(f32::NAN),
        ];
        prop::collection::vec(logit, 1..700)
    }

    proptest! {
        #[test]
        fn top_k_agrees_with_sorting(logits in logits(), k in 0_usize..300) {
            let numbered = logits.iter().copied().enumerate();
            let mut expected: Vec<(usize, f32)> =
                numbered.filter(|(_, x)| *x > f32::NEG_INFINITY).collect();
            // A stable sort: lower ids stay first among equals.
            expected.sort_by(|a, b| b.1.total_cmp(&a.1));
            expected.truncate(k);
            let mut keys = Vec::new();
            top_k(&logits, k, &mut keys);
            let got: Vec<(usize, f32)> =
                keys.iter().map(|key| (key_id(*key) as usize, key_logit(*key))).collect();
            prop_assert_eq!(&got, &expected);

            if let Some(least) = keys.last() {
                let mut found = Vec::new();
                for_each_at_least(&logits, *least, |id, logit| found.push((id as usize, logit)));
                expected.sort_by_key(|(id, _)| *id);
                prop_assert_eq!(found, expected);
            }
        }
    }

    #[test]
    fn top_k_keeps_up_with_ever_greater_logits() {
        let logits: Vec<f32> = (0..10_000).map(|i| i as f32).collect();
        let mut keys = Vec::new();
        top_k(&logits, 50, &mut keys);
        let ids: Vec<u32> = keys.iter().map(|key| key_id(*key)).collect();
        assert!(ids.into_iter().eq((9950..10_000).rev()));
    }
}
