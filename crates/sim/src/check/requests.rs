//! What is asked for in a run: everything that a request may vary, drawn from a seed.

use std::time::Duration;

use inflight_engine::{EngineConfig, KvKeep, RequestSpec, SamplingParams, Tenant};

use super::scenario::latest;
use crate::Random;

/// Tokens are below this: few, so that stop tokens are hit often.
pub(crate) const VOCAB_SIZE: u32 = 32;

/// A request and what becomes of it.
#[derive(Clone, Debug)]
pub struct Planned {
    /// When it comes.
    pub at: Duration,
    /// What it asks for.
    pub spec: RequestSpec,
    /// The request of which it is another output, by its place in the list.
    pub leader: Option<usize>,
    /// How it ends before its time, if it does.
    pub leaving: Option<Leaving>,
}

/// How a request ends before its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaving {
    /// Its caller aborts it so long after it came.
    AbortAfter(Duration),
    /// Its caller aborts it when so many tokens were received.
    AbortAtToken(usize),
    /// Nobody takes further tokens after so many.
    VanishAtToken(usize),
}

/// Draws all requests of a run.
pub(super) fn requests(
    random: &mut Random,
    engine: &EngineConfig,
    window: Option<usize>,
) -> Vec<Planned> {
    let pattern = Pattern::draw(random, engine, window);
    let mut all = Vec::new();
    let mut at = Duration::ZERO;
    for group in 0..random.range(1, 28) {
        if random.chance(pattern.pause_percent) {
            at += Duration::from_secs_f64(random.exponential(pattern.pause_s));
        }
        let n = if random.chance(20) { random.range(2, 4) } else { 1 };
        let leader = all.len();
        let spec = pattern.request(random, group);
        for output in 0..n {
            let mut spec = spec.clone();
            spec.sampling.seed = random.any();
            let leader = (output > 0).then_some(leader);
            all.push(Planned { at, spec, leader, leaving: leaving(random) });
        }
    }
    all
}

/// What the requests of one run have in common.
struct Pattern {
    /// Most tokens of a sequence.
    max_model_len: usize,
    /// Places of the KV cache.
    room: usize,
    /// What the model sees.
    window: Option<usize>,
    /// What the engine keeps of those that do not say.
    usual: KvKeep,
    /// Requests out of a hundred that say what is to be kept.
    keep_percent: u64,
    most_prompt: usize,
    most_output: usize,
    pause_percent: u64,
    pause_s: f64,
    /// Requests out of a hundred that begin as others do.
    family_percent: u64,
    family_len: usize,
    timeout_percent: u64,
}

impl Pattern {
    fn draw(random: &mut Random, engine: &EngineConfig, window: Option<usize>) -> Self {
        let room = engine.num_blocks * engine.block_size;
        let largest = engine.max_model_len.min(room);
        let most_prompt = random.range(1, (largest - 1).clamp(1, 80));
        Self {
            max_model_len: engine.max_model_len,
            room,
            window,
            usual: engine.kv_keep,
            keep_percent: random.pick(&[0, 40]),
            most_prompt,
            most_output: random.range(1, 100),
            pause_percent: random.pick(&[0, 30, 100]),
            pause_s: random.pick(&[20e-6, 200e-6, 2e-3]),
            family_percent: random.pick(&[0, 50, 90]),
            family_len: random.range(0, most_prompt),
            timeout_percent: random.pick(&[0, 0, 20]),
        }
    }

    fn request(&self, random: &mut Random, group: usize) -> RequestSpec {
        let prompt_len = random.range(1, self.most_prompt);
        let kv_keep = random.chance(self.keep_percent).then(|| self.keep(random));
        // Whoever keeps but the latest tokens may go on beyond the cache.
        let largest = match kv_keep.unwrap_or(self.usual) {
            KvKeep::Latest(_) => self.max_model_len,
            KvKeep::All | KvKeep::Attended(_) => self.max_model_len.min(self.room),
        };
        let room = largest - prompt_len;
        let max_tokens = random.range(1, self.most_output.min(room));
        let has_family = random.chance(self.family_percent);
        let family = random.range(0, 1) as u64;
        let token = |position: usize, of: u64| {
            (crate::random::mix(of << 32 | position as u64) % u64::from(VOCAB_SIZE)) as u32
        };
        let own = 100 + group as u64;
        let token = |position| {
            let is_shared = has_family && position < self.family_len;
            token(position, if is_shared { family } else { own })
        };
        let timeout = random.chance(self.timeout_percent);
        RequestSpec {
            prompt: (0..prompt_len).map(token).collect(),
            max_tokens: (room > self.most_output || random.chance(90)).then_some(max_tokens),
            min_tokens: if random.chance(30) { random.range(0, 6) } else { 0 },
            stop_token_ids: (0..random.pick(&[0, 1, 2])).map(|i| 7 * i + 3).collect(),
            sampling: sampling(random),
            cache_salt: random.chance(15).then(|| "salt".to_owned()),
            priority: random.range(0, 2) as i32,
            tenant: Tenant::named(random.pick(&["a", "b", "c"])),
            timeout: timeout.then(|| Duration::from_secs_f64(random.exponential(1e-3))),
            kv_keep,
            ..RequestSpec::default()
        }
    }
}

impl Pattern {
    fn keep(&self, random: &mut Random) -> KvKeep {
        match random.range(0, 3) {
            0 => KvKeep::All,
            1 => KvKeep::Attended(random.range(36, 48)),
            _ => latest(random, self.room, self.window),
        }
    }
}

fn sampling(random: &mut Random) -> SamplingParams {
    let mut sampling =
        SamplingParams { temperature: random.pick(&[0.0, 1.0]), ..SamplingParams::default() };
    if random.chance(30) {
        sampling.repetition_penalty = 1.5;
        sampling.frequency_penalty = 0.25;
    }
    if random.chance(20) {
        sampling.logit_bias = vec![(5, 1.5), (6, f32::NEG_INFINITY)];
    }
    if random.chance(15) {
        sampling.bad_words = vec![vec![9], vec![1, 2], vec![random.range(0, 31) as u32, 4]];
    }
    sampling
}

fn leaving(random: &mut Random) -> Option<Leaving> {
    if !random.chance(20) {
        return None;
    }
    let count = random.range(0, 8);
    Some(match random.range(0, 2) {
        0 => Leaving::AbortAfter(Duration::from_secs_f64(random.exponential(1e-3))),
        1 => Leaving::AbortAtToken(count),
        _ => Leaving::VanishAtToken(count),
    })
}
