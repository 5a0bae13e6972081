//! How long prompts and outputs are.

use inflight_backend::philox;

/// Mean of the outputs' exponential distribution, before the limit.
const MEAN_OUTPUT: f64 = 128.0;
/// Tokens of a prompt of the burst.
const BURST_PROMPT: usize = 512;
/// Tokens of a prompt under a request rate: from and to.
const RATE_PROMPT: (usize, usize) = (128, 384);

/// Draws lengths as Anyscale's experiment does, all of them divided by `scale`.
#[derive(Clone, Copy, Debug)]
pub struct Lengths {
    /// 1: as published. More: shorter, for slower devices; proportions stay.
    pub scale: usize,
    /// Keys the draws.
    pub seed: u64,
}

impl Lengths {
    /// Tokens of every prompt of the burst.
    #[must_use]
    pub fn burst_prompt(&self) -> usize {
        self.scaled(BURST_PROMPT)
    }

    /// Tokens of prompt `i` under a request rate, evenly from 128 to 384.
    #[must_use]
    pub fn rate_prompt(&self, i: usize) -> usize {
        let (from, to) = RATE_PROMPT;
        let drawn = philox::uniform(self.seed ^ 0x5a5a, i as u32) * (to - from + 1) as f64;
        self.scaled(from + drawn as usize)
    }

    /// Tokens of output `i`: exponential, drawn again until at most `limit`, at least 1.
    #[must_use]
    pub fn output(&self, i: usize, limit: usize) -> usize {
        let (mean, limit) = (MEAN_OUTPUT / self.scale as f64, self.scaled(limit));
        for attempt in 0.. {
            let uniform = philox::uniform(self.seed.wrapping_add(i as u64), attempt);
            let drawn = (-(1.0 - uniform).ln() * mean).round() as usize;
            if drawn <= limit {
                return drawn.max(1);
            }
        }
        unreachable!("some draw is below the limit")
    }

    /// A length of the publication in tokens of this run.
    #[must_use]
    pub fn scaled(&self, len: usize) -> usize {
        (len / self.scale).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::Lengths;

    /// Means of the truncated distribution: `128 - limit / (e^(limit / 128) - 1)`, near 15, 54, 118
    /// and 128, as the published limits have them.
    #[test]
    fn outputs_have_the_published_means() {
        let lengths = Lengths { scale: 1, seed: 0xCADE };
        for limit in [32, 128, 512, 1536] {
            let count = 20_000;
            let outputs: Vec<_> = (0..count).map(|i| lengths.output(i, limit)).collect();
            assert!(outputs.iter().all(|&len| (1..=limit).contains(&len)));
            let mean = outputs.iter().sum::<usize>() as f64 / count as f64;
            let ratio = limit as f64 / 128.0;
            let expected = 128.0 - limit as f64 / (ratio.exp() - 1.0);
            assert!((mean - expected).abs() < 0.03 * expected, "{limit}: {mean}, not {expected}");
        }
    }

    #[test]
    fn prompts_and_limits_are_scaled() {
        let lengths = Lengths { scale: 8, seed: 1 };
        assert_eq!(lengths.burst_prompt(), 64);
        let prompts: Vec<_> = (0..1000).map(|i| lengths.rate_prompt(i)).collect();
        assert_eq!((prompts.iter().min(), prompts.iter().max()), (Some(&16), Some(&48)));
        assert!((0..1000).all(|i| lengths.output(i, 32) <= 4));
    }
}
