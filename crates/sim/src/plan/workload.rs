//! Who asks for what and when.

use crate::Random;

/// How long prompts and outputs are.
#[derive(Clone, Debug, PartialEq)]
pub enum Lengths {
    /// All alike.
    Fixed {
        /// Tokens of a prompt.
        input: usize,
        /// Tokens of an output.
        output: usize,
    },
    /// Each from 1 to twice the mean, all as likely.
    Uniform {
        /// Mean tokens of a prompt.
        input: usize,
        /// Mean tokens of an output.
        output: usize,
    },
    /// Most are short, some are long.
    Exponential {
        /// Mean tokens of a prompt.
        input: usize,
        /// Mean tokens of an output.
        output: usize,
    },
    /// Pairs of prompt and output, in turn.
    Pairs(Vec<(usize, usize)>),
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arrival {
    /// Seconds after the start.
    pub at_s: f64,
    /// Tokens of its prompt.
    pub prompt_len: usize,
    /// Tokens of its output.
    pub output_len: usize,
    /// Whose it is.
    pub tenant: usize,
}

/// A load.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// How long requests are.
    pub lengths: Lengths,
    /// How many there are.
    pub num_requests: usize,
    /// Requests a second, at random times; `None`: all at once.
    pub rate: Option<f64>,
    /// Keys lengths and times.
    pub seed: u64,
}

impl Workload {
    /// Its requests, each no longer than `max_len` tokens.
    #[must_use]
    pub fn arrivals(&self, max_len: usize) -> Vec<Arrival> {
        let mut random = Random::new(self.seed);
        let mut at_s = 0.0;
        let mut arrivals = Vec::with_capacity(self.num_requests);
        for i in 0..self.num_requests {
            let (input, output) = self.lengths.draw(i, &mut random);
            let prompt_len = input.clamp(1, max_len.saturating_sub(1).max(1));
            let output_len = output.clamp(1, (max_len - prompt_len).max(1));
            arrivals.push(Arrival { at_s, prompt_len, output_len, tenant: 0 });
            at_s += self.rate.map_or(0.0, |rate| random.exponential(1.0 / rate));
        }
        arrivals
    }
}

impl Lengths {
    /// The longest that a request is, or, where that has no limit, hardly ever exceeds.
    #[must_use]
    pub fn longest(&self) -> usize {
        match self {
            Self::Fixed { input, output } => input + output,
            Self::Uniform { input, output } => 2 * (input + output),
            Self::Exponential { input, output } => 8 * (input + output),
            Self::Pairs(pairs) => pairs.iter().map(|(a, b)| a + b).max().unwrap_or(2),
        }
    }

    fn draw(&self, i: usize, random: &mut Random) -> (usize, usize) {
        match self {
            Self::Fixed { input, output } => (*input, *output),
            Self::Uniform { input, output } => {
                (random.range(1, 2 * (*input).max(1)), random.range(1, 2 * (*output).max(1)))
            }
            Self::Exponential { input, output } => {
                let mut one = |mean: usize| random.exponential(mean as f64).round() as usize;
                (one(*input), one(*output))
            }
            Self::Pairs(pairs) => pairs.get(i % pairs.len().max(1)).copied().unwrap_or((1, 1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrivals_have_their_rate_and_lengths() {
        let lengths = Lengths::Exponential { input: 300, output: 100 };
        let workload = Workload { lengths, num_requests: 20_000, rate: Some(50.0), seed: 1 };
        let arrivals = workload.arrivals(1 << 20);
        let seconds = arrivals.last().unwrap().at_s;
        assert!((seconds / 400.0 - 1.0).abs() < 0.03, "{seconds}");
        let mean = |of: fn(&Arrival) -> usize| {
            arrivals.iter().map(of).sum::<usize>() as f64 / arrivals.len() as f64
        };
        assert!((mean(|a| a.prompt_len) / 300.0 - 1.0).abs() < 0.03);
        assert!((mean(|a| a.output_len) / 100.0 - 1.0).abs() < 0.03);
        let cut = workload.arrivals(64);
        assert!(cut.iter().all(|a| a.prompt_len + a.output_len <= 64 && a.output_len > 0));
        assert_eq!(workload.arrivals(64), cut);
    }

    #[test]
    fn pairs_come_in_turn_and_at_once() {
        let lengths = Lengths::Pairs(vec![(5, 6), (7, 8)]);
        let workload = Workload { lengths, num_requests: 3, rate: None, seed: 1 };
        let pairs =
            workload.arrivals(100).iter().map(|a| (a.at_s, a.prompt_len)).collect::<Vec<_>>();
        assert_eq!(pairs, [(0.0, 5), (0.0, 7), (0.0, 5)]);
    }
}
