//! What every sequence must yield, whatever the schedule.

use inflight_scheduler::{FinishReason, SchedulerConfig, SequenceId, SequenceSpec};

/// Tokens are below this, so that stop tokens are hit often.
pub(crate) const VOCAB_SIZE: u64 = 16;

/// The token that the fake model puts at `position` of sequence `id`: a fixed pseudo-random one.
pub(crate) fn token_at(id: SequenceId, position: usize) -> u32 {
    let mut hash = id.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (position as u64);
    for _ in 0..3 {
        hash = (hash ^ (hash >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    }
    u32::try_from((hash >> 40) % VOCAB_SIZE).expect("tokens are small")
}

/// Lengths of one sequence; everything else follows from its id.
#[derive(Debug, Clone)]
pub(crate) struct Lengths {
    pub(crate) prompt_len: usize,
    pub(crate) max_tokens: usize,
    pub(crate) min_tokens: usize,
    pub(crate) num_stop_tokens: u32,
}

impl Lengths {
    pub(crate) fn of(prompt_len: usize, max_tokens: usize) -> Self {
        Self { prompt_len, max_tokens, min_tokens: 0, num_stop_tokens: 0 }
    }

    pub(crate) fn spec(&self, id: SequenceId) -> SequenceSpec {
        SequenceSpec {
            id,
            prompt: (0..self.prompt_len).map(|position| token_at(id, position)).collect(),
            max_tokens: self.max_tokens,
            min_tokens: self.min_tokens,
            stop_token_ids: (0..self.num_stop_tokens).collect(),
        }
    }

    /// Whether the sequence can run under `config`: there is a prompt and a token to generate, and
    /// all tokens but the last have a place.
    pub(crate) fn fits(&self, config: &SchedulerConfig) -> bool {
        let last_position = (self.prompt_len + self.max_tokens).min(config.max_model_len) - 1;
        self.prompt_len < config.max_model_len
            && last_position <= config.num_blocks * config.block_size
    }

    /// All tokens it must yield, in order, and why it ends.
    pub(crate) fn expected(
        &self,
        id: SequenceId,
        config: &SchedulerConfig,
    ) -> (Vec<u32>, FinishReason) {
        let mut generated = Vec::new();
        loop {
            let token = token_at(id, self.prompt_len + generated.len());
            let may_stop = generated.len() >= self.min_tokens;
            generated.push(token);
            if may_stop && token < self.num_stop_tokens {
                return (generated, FinishReason::Stop { token });
            }
            let len = self.prompt_len + generated.len();
            if generated.len() == self.max_tokens || len == config.max_model_len {
                return (generated, FinishReason::Length);
            }
        }
    }
}
