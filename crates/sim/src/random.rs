//! Random numbers from a seed.

/// A generator that gives the same numbers for the same seed, everywhere.
///
/// # Source
/// Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014 (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Keyed by `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(mix(seed ^ 0x1234_5678_9abc_def0))
    }

    /// Any number.
    pub fn any(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number in `[0, 1)`.
    pub fn uniform(&mut self) -> f64 {
        (self.any() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// A number from `from` to `to`, both included.
    ///
    /// # Panics
    /// If there is none.
    pub fn range(&mut self, from: usize, to: usize) -> usize {
        assert!(from <= to, "no number from {from} to {to}");
        from + (self.any() % (to - from + 1) as u64) as usize
    }

    /// Whether something happens that does so in `percent` of a hundred cases.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.any() % 100 < percent
    }

    /// One of them.
    ///
    /// # Panics
    /// If there are none.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.range(0, from.len() - 1)]
    }

    /// Time until something happens that does so once in `mean_s` seconds, on average.
    pub fn exponential(&mut self, mean_s: f64) -> f64 {
        -(1.0 - self.uniform()).ln() * mean_s
    }
}

/// A number that looks random and depends on every bit of `value`.
pub(crate) fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The reference implementation's first numbers for the seed 1234567.
    #[test]
    fn numbers_are_those_of_splitmix64() {
        let mut random = Random(1_234_567);
        let expected = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
            16_408_922_859_458_223_821,
        ];
        assert_eq!(expected.map(|_| random.any()), expected);
    }

    #[test]
    fn exponential_times_have_their_mean() {
        let mut random = Random::new(3);
        let sum: f64 = (0..20_000).map(|_| random.exponential(0.5)).sum();
        assert!((sum / 20_000.0 - 0.5).abs() < 0.02, "{sum}");
    }
}
