//! What comes into the engine: requests that are known to be servable.

use std::time::Duration;

use inflight_backend::step::MAX_TOP_LOGPROBS;
use inflight_kv_cache::Retention;
use inflight_scheduler::Tenant;

use crate::{DryParams, KvKeep, KvTerms, SharedGrammar};

/// Identifies a request, and the one sequence it has in the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// How a request's tokens are drawn. The default is greedy.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0: greedy.
    pub temperature: f32,
    /// Keep the k likeliest tokens; 0: all.
    pub top_k: u32,
    /// Keep the likeliest tokens whose probabilities reach this sum; 1: all.
    pub top_p: f32,
    /// Keep tokens at least this fraction as likely as the likeliest; 0: all.
    pub min_p: f32,
    /// Over 1 discourages tokens seen in prompt or output; 1: none.
    pub repetition_penalty: f32,
    /// Over 0 discourages tokens seen in the output.
    pub presence_penalty: f32,
    /// Over 0 discourages tokens by how often they were seen in the output.
    pub frequency_penalty: f32,
    /// Keep tokens as surprising as tokens are on average, until their probabilities reach this
    /// sum; 1: all.
    pub typical_p: f32,
    /// Keep tokens whose logits are at most so many standard deviations below the greatest; 0: all.
    pub top_n_sigma: f32,
    /// How often the likeliest tokens are left out; 0: never.
    pub xtc_probability: f32,
    /// Those that are left out are this likely or more; the least likely of them stays.
    pub xtc_threshold: f32,
    /// What discourages repetitions; `None`: nothing does.
    pub dry: Option<DryParams>,
    /// Token sequences that must not come, in prompt and output together; at most
    /// [`RequestLimits::MAX_BAD_WORDS`].
    pub bad_words: Vec<Vec<u32>>,
    /// Added to the logits of these tokens; at most [`RequestLimits::MAX_LOGIT_BIAS`] of them.
    pub logit_bias: Vec<(u32, f32)>,
    /// Keys the draws: the same seed gives the same tokens.
    pub seed: u64,
    /// How many of the likeliest tokens to report with each; `None`: no logprobs at all.
    pub top_logprobs: Option<u32>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            typical_p: 1.0,
            top_n_sigma: 0.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            dry: None,
            bad_words: Vec::new(),
            logit_bias: Vec::new(),
            seed: 0,
            top_logprobs: None,
        }
    }
}

impl SamplingParams {
    /// Whether a draw depends on the tokens just before it.
    pub(crate) fn looks_back(&self) -> bool {
        self.dry.is_some() || !self.bad_words.is_empty()
    }

    /// Whether the device must count this sequence's tokens.
    pub(crate) fn needs_token_counts(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }
}

/// A request as a caller writes it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestSpec {
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
    /// Most tokens to generate; `None`: as many as the context has room for.
    pub max_tokens: Option<usize>,
    /// Tokens in `stop_token_ids` are banned until this many were generated.
    pub min_tokens: usize,
    /// Tokens that end the output, the model's end-of-sequence tokens among them if wanted.
    pub stop_token_ids: Vec<u32>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Prefixes are shared only among requests of the same salt.
    pub cache_salt: Option<String>,
    /// An earlier request with the same prompt and salt, of which this is another output: the
    /// prompt is computed once. Ignored where that request has ended or has another prompt.
    pub shares_prompt_of: Option<RequestId>,
    /// What the output must be; `None`: anything.
    pub grammar: Option<SharedGrammar>,
    /// The state of the prompt that is wanted, and nothing generated:
    /// [`TokenSink::send_state`](crate::TokenSink::send_state) gets it. `max_tokens` is 1 then.
    pub pooling: Option<Pooling>,
    /// How many of the likeliest tokens to report at every place of the prompt, with how likely its
    /// own token was; `None`: nothing of that. The whole prompt is computed then.
    pub prompt_logprobs: Option<u32>,
    /// Lower goes first, where the scheduler's order is by priority.
    pub priority: i32,
    /// On whose behalf it comes, where tenants are served fairly.
    pub tenant: Tenant,
    /// Time from its arrival after which its result is of no use: it then ends as
    /// [`FinishReason::Lapsed`](crate::FinishReason::Lapsed).
    pub timeout: Option<Duration>,
    /// What stays in the KV cache; `None`: what the engine's configuration says.
    pub kv_keep: Option<KvKeep>,
}

/// What of a prompt's states is told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pooling {
    /// The state after the last token.
    #[default]
    LastToken,
    /// The mean of the states after every token.
    Mean,
}

/// What the engine can take. Fixed when it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLimits {
    /// Most tokens of a sequence, prompt and output together.
    pub max_model_len: usize,
    /// Tokens that the whole KV cache holds.
    pub kv_cache_tokens: usize,
    /// Token ids are below this.
    pub vocab_size: usize,
    /// What requests may keep.
    pub kv: KvTerms,
}

/// Why a request was refused. `field` is the name that the OpenAI API and vLLM use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {reason}")]
pub struct InvalidRequest {
    /// Which part of the request is wrong.
    pub field: &'static str,
    /// What is wrong with it, and what would be right.
    pub reason: String,
}

/// A request that the engine can serve: only [`RequestLimits::validate`] makes one.
#[derive(Clone, Debug)]
pub struct ValidRequest {
    spec: RequestSpec,
    max_tokens: usize,
    retention: Retention,
}

impl RequestLimits {
    /// Most entries of a request's logit bias, stop tokens that are banned for a while included.
    pub const MAX_LOGIT_BIAS: usize = 1024;

    /// Most sequences of a request's bad words.
    pub const MAX_BAD_WORDS: usize = 128;

    /// Most stop token ids of a request.
    pub const MAX_STOP_TOKENS: usize = 128;

    /// Checks everything that the engine relies on.
    ///
    /// # Errors
    /// [`InvalidRequest`] naming the field, for the first thing that is wrong.
    pub fn validate(&self, spec: RequestSpec) -> Result<ValidRequest, InvalidRequest> {
        let keep = spec.kv_keep.unwrap_or(self.kv.usual);
        if let Err(reason) = self.kv.check(keep, self.kv_cache_tokens) {
            return invalid("kv_cache", reason);
        }
        self.check_prompt(&spec)?;
        let max_tokens = self.resolve_max_tokens(&spec)?;
        self.check_tokens(&spec)?;
        check_sampling(&spec.sampling)?;
        check_prompt_logprobs(&spec)?;
        let is_probed = spec.prompt_logprobs.is_some() || spec.pooling == Some(Pooling::Mean);
        if is_probed && matches!(keep, KvKeep::Attended(_)) {
            return invalid("kv_cache", "has a budget; the whole prompt cannot be told of as well");
        }
        let retention = self.kv.retention(keep, spec.prompt.len());
        self.check_places(&spec.prompt, max_tokens, retention)?;
        Ok(ValidRequest { spec, max_tokens, retention })
    }

    /// Most tokens that a sequence can have here that says nothing of what it keeps.
    pub fn max_sequence_len(&self) -> usize {
        self.max_len(None)
    }

    /// Most tokens of a sequence that asked to keep this.
    pub fn max_len(&self, keep: Option<KvKeep>) -> usize {
        let keep = keep.unwrap_or(self.kv.usual);
        self.max_model_len.min(self.kv.max_len(keep, self.kv_cache_tokens))
    }

    fn check_prompt(&self, spec: &RequestSpec) -> Result<(), InvalidRequest> {
        let (prompt, limit) = (&spec.prompt, self.max_len(spec.kv_keep));
        if prompt.is_empty() {
            return invalid("prompt", "is empty; it must have at least one token");
        }
        if prompt.len() >= limit {
            let what = format!("the prompt has {}", prompt.len());
            return invalid("prompt", self.too_long(limit, what));
        }
        match prompt.iter().find(|&&id| id as usize >= self.vocab_size) {
            Some(id) => invalid("prompt", self.unknown_token(*id)),
            None => Ok(()),
        }
    }

    /// Whether what the request keeps at once fits the cache. The last token needs no place.
    fn check_places(
        &self,
        prompt: &[u32],
        max_tokens: usize,
        retention: Retention,
    ) -> Result<(), InvalidRequest> {
        let block_size = self.kv.block_size;
        let needed = self.kv.blocks_of(retention, prompt.len() + max_tokens - 1);
        if needed <= self.kv_cache_tokens / block_size {
            return Ok(());
        }
        let (needed, has) = (needed * block_size, self.kv_cache_tokens);
        invalid("prompt", format!("needs {needed} places at once; the whole KV cache has {has}"))
    }

    fn resolve_max_tokens(&self, spec: &RequestSpec) -> Result<usize, InvalidRequest> {
        let limit = self.max_len(spec.kv_keep);
        let room = limit - spec.prompt.len();
        match spec.max_tokens {
            None => Ok(room),
            Some(0) => invalid("max_tokens", "is 0; it must be at least 1"),
            Some(asked) if asked > room => {
                let len = spec.prompt.len();
                let what = format!("{asked} were asked for after {len}");
                invalid("max_tokens", self.too_long(limit, what))
            }
            Some(asked) => Ok(asked),
        }
    }

    fn check_tokens(&self, spec: &RequestSpec) -> Result<(), InvalidRequest> {
        let bias = &spec.sampling.logit_bias;
        if bias.len() + spec.stop_token_ids.len() > Self::MAX_LOGIT_BIAS {
            let reason = format!("has {} entries; at most 1024 are allowed", bias.len());
            return invalid("logit_bias", reason);
        }
        if let Some((id, _)) = bias.iter().find(|(id, _)| *id as usize >= self.vocab_size) {
            return invalid("logit_bias", self.unknown_token(*id));
        }
        if bias.iter().any(|(_, value)| value.is_nan() || *value == f32::INFINITY) {
            return invalid("logit_bias", "has a value that is not a number");
        }
        if spec.stop_token_ids.len() > Self::MAX_STOP_TOKENS {
            return invalid("stop_token_ids", "has more than 128 entries");
        }
        self.check_bad_words(&spec.sampling.bad_words)?;
        match spec.stop_token_ids.iter().find(|&&id| id as usize >= self.vocab_size) {
            Some(id) => invalid("stop_token_ids", self.unknown_token(*id)),
            None => Ok(()),
        }
    }

    fn check_bad_words(&self, words: &[Vec<u32>]) -> Result<(), InvalidRequest> {
        if words.len() > Self::MAX_BAD_WORDS {
            let (has, most) = (words.len(), Self::MAX_BAD_WORDS);
            let reason = format!("has {has} token sequences; at most {most} are allowed");
            return invalid("bad_words", reason);
        }
        if words.iter().any(Vec::is_empty) {
            return invalid("bad_words", "has an empty word");
        }
        match words.iter().flatten().find(|&&id| id as usize >= self.vocab_size) {
            Some(id) => invalid("bad_words", self.unknown_token(*id)),
            None => Ok(()),
        }
    }

    fn unknown_token(&self, id: u32) -> String {
        format!("token id {id} is not in the vocabulary of {} tokens", self.vocab_size)
    }

    fn too_long(&self, limit: usize, what: String) -> String {
        let has_groups = !self.kv.other_windows.as_slice().is_empty();
        let is_room = limit == self.kv_cache_tokens || has_groups && limit < self.kv.context;
        let is_full = is_room && limit < self.max_model_len;
        let why = if is_full { " (the size of the KV cache)" } else { "" };
        format!("the model's maximum context length is {limit} tokens{why}; {what} tokens")
    }
}

impl ValidRequest {
    /// Token ids.
    pub fn prompt(&self) -> &[u32] {
        &self.spec.prompt
    }

    /// Most tokens that will be generated, resolved.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// What its outputs are held to.
    pub fn grammar(&self) -> Option<&SharedGrammar> {
        self.spec.grammar.as_ref()
    }

    /// On whose behalf it comes.
    pub fn tenant(&self) -> &Tenant {
        &self.spec.tenant
    }

    /// How long its answer may take.
    pub fn timeout(&self) -> Option<Duration> {
        self.spec.timeout
    }

    /// Whether how likely its prompt is was asked for.
    pub fn asks_about_prompt(&self) -> bool {
        self.spec.prompt_logprobs.is_some()
    }

    /// The same as another output of an earlier request, whose prompt it shares.
    #[must_use]
    pub fn sharing_prompt_of(mut self, leader: Option<RequestId>) -> Self {
        self.spec.shares_prompt_of = leader;
        self
    }

    pub(crate) fn into_spec(self) -> (RequestSpec, usize, Retention) {
        (self.spec, self.max_tokens, self.retention)
    }
}

fn check_sampling(sampling: &SamplingParams) -> Result<(), InvalidRequest> {
    let penalty = -2.0..=2.0;
    let checks: [(&'static str, f32, bool, &'static str); 10] = [
        ("temperature", sampling.temperature, sampling.temperature >= 0.0, "at least 0"),
        (
            "top_p",
            sampling.top_p,
            sampling.top_p > 0.0 && sampling.top_p <= 1.0,
            "over 0 and at most 1",
        ),
        ("min_p", sampling.min_p, (0.0..=1.0).contains(&sampling.min_p), "from 0 to 1"),
        (
            "repetition_penalty",
            sampling.repetition_penalty,
            sampling.repetition_penalty > 0.0,
            "over 0",
        ),
        (
            "presence_penalty",
            sampling.presence_penalty,
            penalty.contains(&sampling.presence_penalty),
            "from -2 to 2",
        ),
        (
            "frequency_penalty",
            sampling.frequency_penalty,
            penalty.contains(&sampling.frequency_penalty),
            "from -2 to 2",
        ),
        (
            "typical_p",
            sampling.typical_p,
            sampling.typical_p > 0.0 && sampling.typical_p <= 1.0,
            "over 0 and at most 1",
        ),
        ("top_n_sigma", sampling.top_n_sigma, sampling.top_n_sigma >= 0.0, "at least 0"),
        (
            "xtc_probability",
            sampling.xtc_probability,
            (0.0..=1.0).contains(&sampling.xtc_probability),
            "from 0 to 1",
        ),
        (
            "xtc_threshold",
            sampling.xtc_threshold,
            (0.0..=1.0).contains(&sampling.xtc_threshold),
            "from 0 to 1",
        ),
    ];
    for (field, value, allowed, range) in checks {
        if !allowed || !value.is_finite() {
            return invalid(field, format!("is {value}; it must be {range}"));
        }
    }
    check_dry(sampling.dry.as_ref())?;
    match sampling.top_logprobs {
        Some(count) if count as usize > MAX_TOP_LOGPROBS => {
            invalid("top_logprobs", format!("is {count}; at most {MAX_TOP_LOGPROBS} are reported"))
        }
        _ => Ok(()),
    }
}

fn check_prompt_logprobs(spec: &RequestSpec) -> Result<(), InvalidRequest> {
    match spec.prompt_logprobs {
        Some(count) if count as usize > MAX_TOP_LOGPROBS => {
            let reason = format!("is {count}; at most {MAX_TOP_LOGPROBS} are reported");
            invalid("prompt_logprobs", reason)
        }
        Some(_) if spec.pooling.is_some() => {
            invalid("prompt_logprobs", "are not told with the states of a prompt")
        }
        _ => Ok(()),
    }
}

fn check_dry(dry: Option<&DryParams>) -> Result<(), InvalidRequest> {
    let Some(dry) = dry else { return Ok(()) };
    if !(dry.multiplier > 0.0 && dry.multiplier.is_finite()) {
        return invalid("dry_multiplier", format!("is {}; it must be over 0", dry.multiplier));
    }
    if !(dry.base >= 1.0 && dry.base.is_finite()) {
        return invalid("dry_base", format!("is {}; it must be at least 1", dry.base));
    }
    match dry.allowed_length {
        0 => invalid("dry_allowed_length", "is 0; it must be at least 1"),
        _ => Ok(()),
    }
}

fn invalid<T>(field: &'static str, reason: impl Into<String>) -> Result<T, InvalidRequest> {
    Err(InvalidRequest { field, reason: reason.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const KV: KvTerms = KvTerms {
        usual: KvKeep::All,
        block_size: 16,
        max_row_len: 16,
        context: 32,
        other_windows: crate::OtherWindows::NONE,
        widest_window: None,
        narrowest_window: None,
        cuts_prompts: true,
    };
    const LIMITS: RequestLimits =
        RequestLimits { max_model_len: 16, kv_cache_tokens: 64, vocab_size: 100, kv: KV };

    fn spec(prompt_len: usize, max_tokens: Option<usize>) -> RequestSpec {
        RequestSpec { prompt: vec![1; prompt_len], max_tokens, ..RequestSpec::default() }
    }

    #[test]
    fn lengths_are_checked_at_their_limits() {
        let cases = [
            (0, None, Err("prompt")),
            (1, None, Ok(15)),
            (14, None, Ok(2)),
            (15, None, Ok(1)),
            (16, None, Err("prompt")),
            (17, None, Err("prompt")),
            (15, Some(1), Ok(1)),
            (15, Some(2), Err("max_tokens")),
            (4, Some(0), Err("max_tokens")),
            (4, Some(12), Ok(12)),
            (4, Some(usize::MAX), Err("max_tokens")),
        ];
        for (prompt_len, max_tokens, expected) in cases {
            let result = LIMITS.validate(spec(prompt_len, max_tokens));
            let result = result.map(|request| request.max_tokens()).map_err(|error| error.field);
            assert_eq!(result, expected, "prompt of {prompt_len}, max_tokens {max_tokens:?}");
        }
    }

    #[test]
    fn a_small_kv_cache_limits_the_context() {
        let limits = RequestLimits { kv_cache_tokens: 8, ..LIMITS };
        let error = limits.validate(spec(8, None)).unwrap_err();
        assert!(error.reason.contains("8 tokens (the size of the KV cache)"), "{error}");
    }

    #[test]
    fn what_is_kept_decides_how_long_a_request_may_be() {
        use crate::KvWindow;
        let limits = RequestLimits { max_model_len: 1000, ..LIMITS };
        let keep = |num_sinks, window| Some(KvKeep::Latest(KvWindow { num_sinks, window }));
        let long = |kv_keep| limits.validate(RequestSpec { kv_keep, ..spec(40, Some(900)) });
        assert_eq!(long(None).unwrap_err().field, "prompt", "the model was made for 32 tokens");
        assert!(long(keep(4, 16)).is_ok());
        let error = long(keep(4, 32)).unwrap_err();
        assert!(error.field == "kv_cache" && error.reason.contains("made for 32"), "{error}");
        let usual = KvTerms { usual: keep(4, 16).unwrap(), ..KV };
        let limits = RequestLimits { kv: usual, ..limits };
        assert_eq!((limits.max_sequence_len(), limits.max_len(Some(KvKeep::All))), (1000, 32));
    }

    #[test]
    fn every_bad_field_is_named() {
        let check = |field: &str, change: &dyn Fn(&mut RequestSpec)| {
            let mut spec = spec(2, None);
            change(&mut spec);
            assert_eq!(LIMITS.validate(spec).unwrap_err().field, field);
        };
        check("prompt", &|spec| spec.prompt[1] = 100);
        check("temperature", &|spec| spec.sampling.temperature = -0.1);
        check("temperature", &|spec| spec.sampling.temperature = f32::NAN);
        check("top_p", &|spec| spec.sampling.top_p = 0.0);
        check("min_p", &|spec| spec.sampling.min_p = 1.5);
        check("repetition_penalty", &|spec| spec.sampling.repetition_penalty = 0.0);
        check("presence_penalty", &|spec| spec.sampling.presence_penalty = 2.1);
        check("frequency_penalty", &|spec| spec.sampling.frequency_penalty = -2.1);
        check("top_logprobs", &|spec| spec.sampling.top_logprobs = Some(21));
        check("prompt_logprobs", &|spec| spec.prompt_logprobs = Some(21));
        check("prompt_logprobs", &|spec| {
            (spec.prompt_logprobs, spec.pooling) = (Some(1), Some(Pooling::Mean));
        });
        check("typical_p", &|spec| spec.sampling.typical_p = 0.0);
        check("top_n_sigma", &|spec| spec.sampling.top_n_sigma = -1.0);
        check("xtc_probability", &|spec| spec.sampling.xtc_probability = 1.1);
        check("xtc_threshold", &|spec| spec.sampling.xtc_threshold = f32::NAN);
        check("bad_words", &|spec| spec.sampling.bad_words = vec![vec![1, 100]]);
        check("bad_words", &|spec| spec.sampling.bad_words = vec![vec![]]);
        check("bad_words", &|spec| spec.sampling.bad_words = vec![vec![1]; 129]);
        let dry = |multiplier, base, allowed_length| {
            let breakers = std::sync::Arc::default();
            Some(DryParams { multiplier, base, allowed_length, last_n: 0, breakers })
        };
        check("dry_multiplier", &|spec| spec.sampling.dry = dry(-1.0, 1.75, 2));
        check("dry_base", &|spec| spec.sampling.dry = dry(1.0, 0.5, 2));
        check("dry_allowed_length", &|spec| spec.sampling.dry = dry(1.0, 1.75, 0));
        check("logit_bias", &|spec| spec.sampling.logit_bias = vec![(100, 0.0)]);
        check("logit_bias", &|spec| spec.sampling.logit_bias = vec![(1, 0.0); 1025]);
        check("stop_token_ids", &|spec| spec.stop_token_ids = vec![100]);
    }
}
