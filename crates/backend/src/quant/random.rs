//! Normally distributed values that depend on nothing but a seed and their index.

use std::f32::consts::TAU;

/// Writes normally distributed values of mean 0 keyed by `(seed, first_index + i)`.
///
/// However a tensor is cut into rows or chunks, its values are the same.
///
/// # Source
/// Box and Muller, "A note on the generation of random normal deviates" (1958); the hash is the
/// finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
/// generators", 2014).
pub fn random_row(seed: u64, std: f32, first_index: usize, out: &mut [f32]) {
    // A pair of values comes from one draw; a chunk may begin or end in the middle of a pair.
    let (head, rest) = out.split_at_mut((first_index % 2).min(out.len()));
    if let [value] = head {
        *value = std * random_pair(seed, first_index / 2)[1];
    }
    let first_pair = first_index.div_ceil(2);
    for (i, pair) in rest.chunks_mut(2).enumerate() {
        let values = random_pair(seed, first_pair + i);
        for (value, normal) in pair.iter_mut().zip(values) {
            *value = std * normal;
        }
    }
}

/// Two independent standard normal values.
fn random_pair(seed: u64, index: usize) -> [f32; 2] {
    const SCALE: f32 = 1.0 / (1u64 << 32) as f32;
    let bits = mix(mix(seed).wrapping_add(index as u64));
    // The half keeps the logarithm's argument above zero.
    let radius = (-2.0 * (((bits >> 32) as f32 + 0.5) * SCALE).ln()).max(0.0).sqrt();
    let (sin, cos) = ((bits as u32) as f32 * SCALE * TAU).sin_cos();
    [radius * cos, radius * sin]
}

/// Spreads every bit of `value` over all 64.
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn chunking_does_not_matter(seed: u64, cuts in prop::collection::vec(0usize..40, 0..5)) {
            let mut whole = [0.0; 64];
            random_row(seed, 0.5, 0, &mut whole);
            let mut start = 0;
            for len in cuts {
                let end = (start + len).min(64);
                let mut part = vec![0.0; end - start];
                random_row(seed, 0.5, start, &mut part);
                prop_assert_eq!(&part[..], &whole[start..end]);
                start = end;
            }
        }
    }

    #[test]
    fn moments_are_those_of_a_normal_distribution() {
        let mut values = vec![0.0; 200_000];
        random_row(7, 0.02, 0, &mut values);
        let moment = |power: i32| {
            let sum: f64 = values.iter().map(|v| (f64::from(*v) / 0.02).powi(power)).sum();
            sum / values.len() as f64
        };
        // Five standard errors of each moment: sqrt(1, 2, 15 and 96 / n).
        assert!(moment(1).abs() < 0.012, "mean {}", moment(1));
        assert!((moment(2) - 1.0).abs() < 0.016, "variance {}", moment(2));
        assert!(moment(3).abs() < 0.044, "skewness {}", moment(3));
        assert!((moment(4) - 3.0).abs() < 0.11, "kurtosis {}", moment(4));
        assert!(values.iter().all(|v| v.is_finite()));
    }

    #[test]
    fn seeds_and_neighbours_are_unrelated() {
        let (mut a, mut b) = (vec![0.0; 100_000], vec![0.0; 100_000]);
        random_row(1, 1.0, 0, &mut a);
        random_row(2, 1.0, 0, &mut b);
        let correlation = |a: &[f32], b: &[f32]| {
            let sum: f64 = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            sum / a.len() as f64
        };
        assert!(correlation(&a, &b).abs() < 0.016);
        assert!(correlation(&a[1..], &a).abs() < 0.016);
    }
}
