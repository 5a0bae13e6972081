//! Random numbers keyed by what they are for, so that a draw never depends on draws before it.
//!
//! # Source
//! Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
/// The golden ratio and the square root of three, less one: what the key grows by each round.
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: usize = 10;

/// Philox4x32-10: four random words for every counter and key.
pub fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let first = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
        let second = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
        counter = [
            (second >> 32) as u32 ^ counter[1] ^ key[0],
            second as u32,
            (first >> 32) as u32 ^ counter[3] ^ key[1],
            first as u32,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

/// The uniform number in `[0, 1)`, a multiple of 2^-53, that draws the token at `position`.
pub fn uniform(seed: u64, position: u32) -> f64 {
    let words = philox4x32([position, 0, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = (u64::from(words[1]) << 32 | u64::from(words[0])) >> 11;
    bits as f64 / (1_u64 << 53) as f64
}

/// Another uniform number for the same position, independent of [`uniform`]'s.
pub fn second_uniform(seed: u64, position: u32) -> f64 {
    let words = philox4x32([position, 0, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = (u64::from(words[3]) << 32 | u64::from(words[2])) >> 11;
    bits as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the Random123 library, `tests/kat_vectors`, `philox4x32 10`.
    #[test]
    fn philox_gives_the_known_answers() {
        let check = |counter, key, expected| assert_eq!(philox4x32(counter, key), expected);
        check([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        check([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        check(
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        );
    }

    #[test]
    fn uniform_numbers_are_in_range_with_the_right_mean_and_spread() {
        let n = 20_000;
        let draws: Vec<f64> = (0..n).map(|position| uniform(1 << 40 | 7, position)).collect();
        assert!(draws.iter().all(|u| (0.0..1.0).contains(u)));
        let mean = draws.iter().sum::<f64>() / f64::from(n);
        let variance = draws.iter().map(|u| (u - mean).powi(2)).sum::<f64>() / f64::from(n);
        // Five standard errors of the mean and of the variance of a uniform distribution.
        assert!((mean - 0.5).abs() < 5.0 * (1.0 / 12.0 / f64::from(n)).sqrt());
        assert!((variance - 1.0 / 12.0).abs() < 5.0 * (1.0 / 180.0 / f64::from(n)).sqrt());
        assert_ne!(uniform(7, 0).to_bits(), uniform(1 << 40 | 7, 0).to_bits());
    }
}
