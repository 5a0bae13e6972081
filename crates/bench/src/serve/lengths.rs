//! How long prompts and outputs are.

use std::str::FromStr;

use inflight_backend::philox;

/// Longest prompt or output: more is a slip.
const MOST: usize = 1 << 22;

/// Tokens, drawn for each request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LengthDistribution {
    /// Always the same.
    Fixed(usize),
    /// Evenly, both ends included.
    Uniform(usize, usize),
    /// The logarithm is normal.
    LogNormal {
        /// Half of all are below.
        median: f64,
        /// Standard deviation of the logarithm.
        sigma: f64,
        /// None is above; what would be is cut off.
        most: usize,
    },
}

impl LengthDistribution {
    /// Length `i` of those that `seed` gives; at least 1.
    #[must_use]
    pub fn draw(&self, seed: u64, i: u32) -> usize {
        let drawn = match *self {
            Self::Fixed(len) => len,
            Self::Uniform(low, high) => {
                low + (philox::uniform(seed, i) * (high - low + 1) as f64) as usize
            }
            Self::LogNormal { median, sigma, most } => {
                let len = (median.ln() + sigma * normal(seed, i)).exp().round();
                (len as usize).min(most)
            }
        };
        drawn.max(1)
    }
}

/// A standard normal number.
///
/// # Source
/// Box, Muller: "A note on the generation of random normal deviates", 1958.
fn normal(seed: u64, i: u32) -> f64 {
    let radius = (-2.0 * (1.0 - philox::uniform(seed, i)).ln()).sqrt();
    radius * (std::f64::consts::TAU * philox::second_uniform(seed, i)).cos()
}

impl FromStr for LengthDistribution {
    type Err = String;

    /// `N`, `LOW:HIGH` or `lognormal:MEDIAN:SIGMA[:MOST]`.
    fn from_str(text: &str) -> Result<Self, String> {
        let count = |text: &str| match text.parse::<usize>() {
            Ok(len @ 1..=MOST) => Ok(len),
            Ok(_) => Err(format!("{text} is not between 1 and {MOST}")),
            Err(_) => Err(format!("`{text}` is no number of tokens")),
        };
        let parts: Vec<&str> = text.split(':').collect();
        match parts[..] {
            ["lognormal", median, sigma, ref most @ ..] if most.len() < 2 => {
                let number = |text: &str| match text.parse::<f64>() {
                    Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
                    _ => Err(format!("`{text}` is no number over 0")),
                };
                let most = most.first().map(|most| count(most)).transpose()?.unwrap_or(MOST);
                Ok(Self::LogNormal { median: number(median)?, sigma: number(sigma)?, most })
            }
            [len] => Ok(Self::Fixed(count(len)?)),
            [low, high] => match (count(low)?, count(high)?) {
                (low, high) if low <= high => Ok(Self::Uniform(low, high)),
                _ => Err(format!("{low} is over {high}")),
            },
            _ => Err("write N, LOW:HIGH or lognormal:MEDIAN:SIGMA[:MOST]".to_owned()),
        }
    }
}

/// Tokens of prompts and outputs.
#[derive(Clone, Debug, PartialEq)]
pub enum LoadLengths {
    /// Prompts and outputs do not depend on each other.
    Drawn {
        /// Of prompts.
        input: LengthDistribution,
        /// Of outputs.
        output: LengthDistribution,
    },
    /// Prompt and output of each request, in this order, from the start again when all were used.
    Pairs(Vec<(usize, usize)>),
}

impl LoadLengths {
    /// Reads `[[input, output], ...]`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn from_json(text: &[u8]) -> Result<Self, String> {
        let pairs: Vec<(usize, usize)> = serde_json::from_slice(text)
            .map_err(|error| format!("not a list of [input, output] pairs: {error}"))?;
        if pairs.is_empty() {
            return Err("the list is empty".to_owned());
        }
        let is_length = |len: usize| (1..=MOST).contains(&len);
        match pairs.iter().find(|(input, output)| !is_length(*input) || !is_length(*output)) {
            Some(pair) => Err(format!("{pair:?} is not between 1 and {MOST}")),
            None => Ok(Self::Pairs(pairs)),
        }
    }

    /// Tokens of prompt and output of request `i`.
    #[must_use]
    pub fn draw(&self, seed: u64, i: usize) -> (usize, usize) {
        match self {
            // Two keys, so that long prompts do not go with long outputs.
            Self::Drawn { input, output } => {
                (input.draw(seed ^ 0x1a7e, i as u32), output.draw(seed ^ 0x0c7a, i as u32))
            }
            Self::Pairs(pairs) => pairs[i % pairs.len()],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distributions_are_read() {
        let check = |text: &str, expected| assert_eq!(text.parse(), Ok(expected), "{text}");
        check("128", LengthDistribution::Fixed(128));
        check("32:256", LengthDistribution::Uniform(32, 256));
        let log = |most| LengthDistribution::LogNormal { median: 100.0, sigma: 0.5, most };
        check("lognormal:100:0.5", log(MOST));
        check("lognormal:100:0.5:800", log(800));
        for wrong in ["", "0", "9:3", "x", "lognormal:5", "lognormal:0:1", "1:2:3", "99999999"] {
            assert!(wrong.parse::<LengthDistribution>().is_err(), "{wrong}");
        }
    }

    fn draws(distribution: LengthDistribution) -> Vec<usize> {
        let mut all: Vec<_> = (0..20_000).map(|i| distribution.draw(7, i)).collect();
        all.sort_unstable();
        all
    }

    /// Of a log-normal distribution, 84.13 % lie below `median * e^sigma`.
    #[test]
    fn draws_are_distributed_as_asked_for() {
        let even = draws(LengthDistribution::Uniform(10, 19));
        assert_eq!((even[0], even[19_999]), (10, 19));
        let mean = even.iter().sum::<usize>() as f64 / 20_000.0;
        assert!((mean - 14.5).abs() < 0.1, "{mean}");
        let log = draws(LengthDistribution::LogNormal { median: 200.0, sigma: 0.8, most: 2000 });
        assert!((log[10_000] as f64 / 200.0 - 1.0).abs() < 0.03, "{}", log[10_000]);
        let upper = log[16_826] as f64;
        assert!((upper / (200.0 * 0.8_f64.exp()) - 1.0).abs() < 0.03, "{upper}");
        assert_eq!(log[19_999], 2000, "cut off");
    }

    #[test]
    fn pairs_come_in_order_and_again() {
        let pairs = LoadLengths::from_json(b"[[1, 2], [30, 4]]").unwrap();
        let drawn: Vec<_> = (0..3).map(|i| pairs.draw(1, i)).collect();
        assert_eq!(drawn, [(1, 2), (30, 4), (1, 2)]);
        for wrong in ["[]", "[[1]]", "[[0, 1]]", "{}", "[[1, 2], [3, 99999999]]"] {
            assert!(LoadLengths::from_json(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }
}
