//! What every sequence must yield, whatever the schedule.

use std::time::Duration;

use inflight_kv_cache::{PrefixKey, Retention};
use inflight_scheduler::{
    FinishReason, SchedulerConfig, SequenceId, SequenceSpec, Service, Tenant,
};

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
    /// Number of outputs with the same prompt.
    pub(crate) n: usize,
    /// Sequences of a family begin with the same tokens, as many as this says.
    pub(crate) family: (u64, usize),
    /// Keeps sequences apart that begin with the same tokens.
    pub(crate) salt: u32,
    pub(crate) counts_tokens: bool,
    pub(crate) probes_prompt: bool,
    pub(crate) standing: Standing,
    pub(crate) retention: Retention,
}

/// How the sequence stands among others.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Standing {
    pub(crate) priority: i32,
    pub(crate) tenant: u8,
    /// Turns after its arrival, one a millisecond, until its deadline.
    pub(crate) patience: Option<u64>,
}

/// A sequence as the tests know it: one output of a request.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    pub(crate) id: SequenceId,
    /// The request's first output.
    pub(crate) first: SequenceId,
    pub(crate) lengths: Lengths,
}

impl Identity {
    /// The token at any position: of the family, of the request, or drawn for this output.
    pub(crate) fn token(&self, position: usize) -> u32 {
        let Lengths { family, prompt_len, .. } = self.lengths;
        if position >= prompt_len {
            token_at(self.id, position)
        } else if position < family.1 {
            token_at(SequenceId(1 << 40 | family.0), position)
        } else {
            token_at(SequenceId(1 << 41 | self.first.0), position)
        }
    }

    pub(crate) fn spec(&self, now: Duration) -> SequenceSpec {
        let Lengths { prompt_len, max_tokens, min_tokens, num_stop_tokens, .. } = self.lengths;
        let salt = self.lengths.salt;
        SequenceSpec {
            id: self.id,
            prompt: (0..prompt_len).map(|position| self.token(position)).collect(),
            max_tokens,
            min_tokens,
            stop_token_ids: (0..num_stop_tokens).collect(),
            prefix_key: PrefixKey {
                salt: (salt > 0).then(|| salt.to_string().into()),
                ..PrefixKey::default()
            },
            shares_prompt_of: (self.id != self.first).then_some(self.first),
            counts_tokens: self.lengths.counts_tokens,
            probes_prompt: self.lengths.probes_prompt,
            service: Service {
                priority: self.lengths.standing.priority,
                tenant: Tenant::named(&format!("tenant {}", self.lengths.standing.tenant)),
                deadline: self.lengths.deadline(now),
            },
            retention: self.lengths.retention,
        }
    }

    /// All tokens it must yield, in order, and why it ends.
    pub(crate) fn expected(&self, config: &SchedulerConfig) -> (Vec<u32>, FinishReason) {
        let Lengths { prompt_len, max_tokens, min_tokens, num_stop_tokens, .. } = self.lengths;
        let mut generated = Vec::new();
        loop {
            let token = self.token(prompt_len + generated.len());
            let may_stop = generated.len() >= min_tokens;
            generated.push(token);
            if may_stop && token < num_stop_tokens {
                return (generated, FinishReason::Stop { token });
            }
            let len = prompt_len + generated.len();
            if generated.len() == max_tokens || len == config.max_model_len {
                return (generated, FinishReason::Length);
            }
        }
    }
}

impl Lengths {
    pub(crate) fn of(prompt_len: usize, max_tokens: usize) -> Self {
        Self {
            prompt_len,
            max_tokens,
            min_tokens: 0,
            num_stop_tokens: 0,
            n: 1,
            family: (0, 0),
            salt: 0,
            counts_tokens: true,
            probes_prompt: false,
            standing: Standing::default(),
            retention: Retention::All,
        }
    }

    pub(crate) fn deadline(&self, now: Duration) -> Option<Duration> {
        self.standing.patience.map(|turns| now + Duration::from_millis(turns))
    }

    /// Whether the sequence can run under `config`: there is a prompt and a token to generate, and
    /// all tokens but the last have a place.
    pub(crate) fn fits(&self, config: &SchedulerConfig) -> bool {
        self.prompt_len < config.max_model_len && self.most_blocks(config) <= config.num_blocks
    }

    /// Most blocks that the sequence holds at once.
    fn most_blocks(&self, config: &SchedulerConfig) -> usize {
        let last_position = (self.prompt_len + self.max_tokens).min(config.max_model_len) - 1;
        let SchedulerConfig { max_num_batched_tokens, block_size, .. } = *config;
        let windows = config.other_windows.iter();
        let others = windows.map(|window| self.retention.of_group(*window));
        let most = |retention: Retention| {
            retention.most_blocks(last_position, max_num_batched_tokens, block_size)
        };
        most(self.retention) + others.map(most).sum::<usize>()
    }

    /// Most places that the sequence takes at once. What is kept is kept in whole blocks.
    pub(crate) fn most_places(&self, config: &SchedulerConfig) -> usize {
        let last_position = (self.prompt_len + self.max_tokens).min(config.max_model_len) - 1;
        last_position.min(self.most_blocks(config) * config.block_size)
    }
}
