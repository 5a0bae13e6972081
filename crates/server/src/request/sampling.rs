//! Fields that say how tokens are drawn, where an output ends and how urgent it is.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use inflight_engine::{
    DryParams, KvKeep, RequestLimits, RequestSpec, SamplingParams, SharedGrammar,
};
use inflight_tokenizer::{TextPosition, Tokenizer};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::json;

use super::words;
use crate::error::ApiError;
use crate::generation::SequenceSpec;
use crate::random::random_u64;
use crate::request::kv_cache::KvCacheFields;
use crate::request::service::Service;
use crate::text_stream::TextOptions;

/// OpenAI allows 4 stop strings; more cost little.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;
/// What OpenAI allows: 100 bans or forces a token.
const MAX_BIAS: f32 = 100.0;
/// OpenAI allows 2. Beyond this one all tokens are about as likely as each other.
const MAX_TEMPERATURE: f32 = 100.0;
const MAX_SALT_BYTES: usize = 1024;
/// llama.cpp's.
const USUAL_XTC_THRESHOLD: f32 = 0.1;
const USUAL_DRY_BASE: f32 = 1.75;
const USUAL_DRY_LENGTH: usize = 2;
/// Most sequences of one HTTP request.
const MAX_SEQUENCES: usize = 1024;

/// OpenAI's sampling fields, and vLLM's.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
pub(crate) struct SamplingFields {
    pub(crate) temperature: Option<f32>,
    pub(crate) top_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    typical_p: Option<f32>,
    top_n_sigma: Option<f32>,
    xtc_probability: Option<f32>,
    xtc_threshold: Option<f32>,
    dry_multiplier: Option<f32>,
    dry_base: Option<f32>,
    dry_allowed_length: Option<usize>,
    dry_penalty_last_n: Option<i64>,
    dry_sequence_breakers: Option<Vec<String>>,
    bad_words: Option<Vec<String>>,
    logit_bias: Option<BTreeMap<String, f32>>,
    seed: Option<i64>,
    stop: Option<Stops>,
    stop_token_ids: Option<Vec<u32>>,
    include_stop_str_in_output: Option<bool>,
    min_tokens: Option<usize>,
    ignore_eos: Option<bool>,
    skip_special_tokens: Option<bool>,
    priority: Option<i32>,
    timeout_ms: Option<u64>,
    user: Option<String>,
    cache_salt: Option<String>,
    kv_cache: Option<KvCacheFields>,
}

/// How long an output may get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Length {
    /// What the client asked for.
    Asked(usize),
    /// What clients expect that ask for nothing; less if the context ends before.
    Usual(usize),
    /// As long as the context has room.
    Rest,
}

/// What all sequences of a request have in common.
#[derive(Clone, Debug)]
pub(crate) struct SequenceTemplate {
    sampling: SamplingParams,
    seed: Option<u64>,
    length: Length,
    service: Service,
    cache_salt: Option<String>,
    kv_keep: Option<KvKeep>,
    pub(crate) text: TextOptions,
    /// How many of the likeliest tokens are told at each place of the prompt; `None`: nothing is.
    pub(crate) prompt_logprobs: Option<u32>,
    /// Whether what is generated is not told: only the prompt is of interest.
    pub(crate) discards_output: bool,
    /// What the output must be; `None`: anything.
    pub(crate) grammar: Option<SharedGrammar>,
}

/// What [`SamplingFields`] do not say.
pub(crate) struct Surroundings<'a> {
    pub(crate) limits: &'a RequestLimits,
    pub(crate) tokenizer: &'a Tokenizer,
    pub(crate) eos_ids: &'a [u32],
    pub(crate) length: Length,
    pub(crate) top_logprobs: Option<u32>,
    pub(crate) position: TextPosition,
}

impl SamplingFields {
    /// Takes stop strings from a field of another name.
    ///
    /// # Errors
    /// There are too many, or one is empty or too long, or `stop` is given as well.
    pub(crate) fn set_stops(
        &mut self,
        stops: Option<Vec<String>>,
        field: &'static str,
    ) -> Result<(), ApiError> {
        let Some(stops) = stops else { return Ok(()) };
        if self.stop.is_some() {
            return Err(ApiError::invalid("stop", format!("give only `{field}`")));
        }
        check_stops(&stops, field)?;
        self.stop = Some(Stops(stops));
        Ok(())
    }

    /// Fills in defaults and checks what the engine does not.
    pub(crate) fn resolve(
        mut self,
        around: &Surroundings<'_>,
    ) -> Result<SequenceTemplate, ApiError> {
        let dry = self.dry(around.tokenizer)?;
        let sampling = SamplingParams {
            temperature: resolve_temperature(self.temperature)?,
            top_k: resolve_top_k(self.top_k)?,
            top_p: self.top_p.unwrap_or(1.0),
            min_p: self.min_p.unwrap_or(0.0),
            repetition_penalty: self.repetition_penalty.unwrap_or(1.0),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            typical_p: self.typical_p.unwrap_or(1.0),
            top_n_sigma: resolve_sigma(self.top_n_sigma)?,
            xtc_probability: self.xtc_probability.unwrap_or(0.0),
            xtc_threshold: self.xtc_threshold.unwrap_or(USUAL_XTC_THRESHOLD),
            dry,
            bad_words: words::bad_words(&self.bad_words.unwrap_or_default(), around.tokenizer)?,
            logit_bias: resolve_logit_bias(self.logit_bias.unwrap_or_default())?,
            seed: 0,
            top_logprobs: around.top_logprobs,
        };
        let min_tokens = self.min_tokens.unwrap_or(0);
        if let Length::Asked(max) | Length::Usual(max) = around.length
            && min_tokens > max
        {
            let reason = format!("is {min_tokens}; it must not be over max_tokens, which is {max}");
            return Err(ApiError::invalid("min_tokens", reason));
        }
        let mut stop_token_ids = self.stop_token_ids.unwrap_or_default();
        if !self.ignore_eos.unwrap_or(false) {
            // Some files name end tokens that the model cannot produce.
            let can_come = |id: &&u32| (**id as usize) < around.limits.vocab_size;
            stop_token_ids.extend(around.eos_ids.iter().filter(can_come));
        }
        stop_token_ids.sort_unstable();
        stop_token_ids.dedup();
        let service = Service::resolve(self.priority, self.timeout_ms, self.user.as_deref())?;
        let text = TextOptions {
            stops: resolve_stops(self.stop)?,
            stop_token_ids,
            include_stop: self.include_stop_str_in_output.unwrap_or(false),
            min_tokens,
            skip_special_tokens: self.skip_special_tokens.unwrap_or(true),
            shown_ids: Vec::new(),
            position: around.position,
        };
        let seed = self.seed.map(i64::cast_unsigned);
        Ok(SequenceTemplate {
            sampling,
            seed,
            length: around.length,
            service,
            cache_salt: resolve_salt(self.cache_salt)?,
            kv_keep: self.kv_cache.map(KvCacheFields::resolve).transpose()?,
            text,
            prompt_logprobs: None,
            discards_output: false,
            grammar: None,
        })
    }
}

impl SamplingFields {
    /// llama.cpp's fields and defaults.
    fn dry(&mut self, tokenizer: &Tokenizer) -> Result<Option<DryParams>, ApiError> {
        let multiplier = self.dry_multiplier.unwrap_or(0.0);
        if multiplier == 0.0 {
            return Ok(None);
        }
        let last_n = match self.dry_penalty_last_n.unwrap_or(-1) {
            -1 => 0,
            // No token is looked at: nothing is a repetition.
            0 => return Ok(None),
            last_n => usize::try_from(last_n).map_err(|_| {
                let reason = format!("is {last_n}; it must be a number of tokens, or -1 for all");
                ApiError::invalid("dry_penalty_last_n", reason)
            })?,
        };
        Ok(Some(DryParams {
            multiplier,
            base: self.dry_base.unwrap_or(USUAL_DRY_BASE),
            allowed_length: self.dry_allowed_length.unwrap_or(USUAL_DRY_LENGTH),
            last_n,
            breakers: words::dry_breakers(self.dry_sequence_breakers.take(), tokenizer)?,
        }))
    }
}

impl SequenceTemplate {
    /// `n` sequences for every prompt, those of a prompt beside each other.
    pub(crate) fn sequences(
        &self,
        prompts: &[Vec<u32>],
        n: usize,
        limits: &RequestLimits,
    ) -> Result<Vec<SequenceSpec>, ApiError> {
        if prompts.len().saturating_mul(n) > MAX_SEQUENCES {
            let reason = format!(
                "{n} outputs for each of {} prompts are over the limit of {MAX_SEQUENCES}",
                prompts.len()
            );
            return Err(ApiError::invalid("n", reason));
        }
        let each = |prompt: &Vec<u32>| (0..n).map(|i| self.sequence(prompt, i, limits)).collect();
        Ok(prompts.iter().flat_map(|prompt| -> Vec<_> { each(prompt) }).collect())
    }

    fn sequence(&self, prompt: &[u32], index: usize, limits: &RequestLimits) -> SequenceSpec {
        let room = limits.max_len(self.kv_keep).saturating_sub(prompt.len());
        let max_tokens = match self.length {
            Length::Asked(max_tokens) => Some(max_tokens),
            Length::Usual(max_tokens) => Some(max_tokens.min(room).max(1)),
            Length::Rest => None,
        };
        let seed = match self.seed {
            Some(seed) => seed.wrapping_add(index as u64),
            None => random_u64(),
        };
        let request = RequestSpec {
            prompt: prompt.to_vec(),
            max_tokens,
            min_tokens: self.text.min_tokens,
            stop_token_ids: self.text.stop_token_ids.clone(),
            sampling: SamplingParams { seed, ..self.sampling.clone() },
            grammar: self.grammar.clone(),
            pooling: None,
            prompt_logprobs: self.prompt_logprobs,
            priority: self.service.priority,
            tenant: self.service.tenant.clone(),
            timeout: self.service.timeout,
            cache_salt: self.cache_salt.clone(),
            shares_prompt_of: None,
            kv_keep: self.kv_keep,
        };
        let discards_output = self.discards_output;
        SequenceSpec { request, text: self.text.clone(), discards_output }
    }
}

/// As in vLLM: an empty salt would look like protection and be none.
fn resolve_salt(salt: Option<String>) -> Result<Option<String>, ApiError> {
    let len = salt.as_ref().map_or(1, String::len);
    if !(1..=MAX_SALT_BYTES).contains(&len) {
        let reason = format!("has {len} bytes; it must have 1 to {MAX_SALT_BYTES}");
        return Err(ApiError::invalid("cache_salt", reason));
    }
    Ok(salt)
}

fn resolve_temperature(temperature: Option<f32>) -> Result<f32, ApiError> {
    let temperature = temperature.unwrap_or(1.0);
    if !(0.0..=MAX_TEMPERATURE).contains(&temperature) {
        let reason = format!("is {temperature}; it must be from 0 to {MAX_TEMPERATURE}");
        return Err(ApiError::invalid("temperature", reason));
    }
    Ok(temperature)
}

/// vLLM writes "all" as -1, others as 0.
fn resolve_top_k(top_k: Option<i64>) -> Result<u32, ApiError> {
    match top_k.unwrap_or(0) {
        -1 | 0 => Ok(0),
        top_k => u32::try_from(top_k).map_err(|_| {
            let reason = format!("is {top_k}; it must be a number of tokens, or 0 or -1 for all");
            ApiError::invalid("top_k", reason)
        }),
    }
}

/// llama.cpp writes "off" as -1.
fn resolve_sigma(top_n_sigma: Option<f32>) -> Result<f32, ApiError> {
    match top_n_sigma.unwrap_or(0.0) {
        -1.0 => Ok(0.0),
        num if num >= 0.0 => Ok(num),
        num => Err(ApiError::invalid("top_n_sigma", format!("is {num}; it must be at least 0"))),
    }
}

fn resolve_logit_bias(bias: BTreeMap<String, f32>) -> Result<Vec<(u32, f32)>, ApiError> {
    let resolve = |(id, value): (String, f32)| {
        let id = id.parse().map_err(|_| {
            ApiError::invalid("logit_bias", format!("the key {id:?} is not a token id"))
        })?;
        if !(-MAX_BIAS..=MAX_BIAS).contains(&value) {
            let reason = format!("{value} for token {id} is not from -{MAX_BIAS} to {MAX_BIAS}");
            return Err(ApiError::invalid("logit_bias", reason));
        }
        Ok((id, value))
    };
    bias.into_iter().map(resolve).collect()
}

fn resolve_stops(stops: Option<Stops>) -> Result<Vec<String>, ApiError> {
    let stops = stops.map_or_else(Vec::new, |stops| stops.0);
    check_stops(&stops, "stop")?;
    Ok(stops)
}

fn check_stops(stops: &[String], field: &'static str) -> Result<(), ApiError> {
    if stops.len() > MAX_STOPS {
        let reason = format!("has {} strings; at most {MAX_STOPS} are allowed", stops.len());
        return Err(ApiError::invalid(field, reason));
    }
    for stop in stops {
        if stop.is_empty() || stop.len() > MAX_STOP_BYTES {
            let (len, max) = (stop.len(), MAX_STOP_BYTES);
            let reason = format!("a string of {len} bytes; it must have 1 to {max} bytes");
            return Err(ApiError::invalid(field, reason));
        }
    }
    Ok(())
}

/// One stop string, or a list of them.
#[derive(Clone, Debug)]
struct Stops(Vec<String>);

impl<'de> Deserialize<'de> for Stops {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(StopsVisitor)
    }
}

impl JsonSchema for Stops {
    fn schema_name() -> Cow<'static, str> {
        "Stops".into()
    }

    fn json_schema(_generator: &mut SchemaGenerator) -> Schema {
        let stop = json!({"type": "string", "minLength": 1, "maxLength": MAX_STOP_BYTES});
        json_schema!({"anyOf": [
            stop, {"type": "array", "items": stop, "maxItems": MAX_STOPS},
        ]})
    }
}

struct StopsVisitor;

impl<'de> Visitor<'de> for StopsVisitor {
    type Value = Stops;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of strings")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Stops, E> {
        Ok(Stops(vec![text.to_owned()]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Stops, A::Error> {
        let mut stops = Vec::new();
        while let Some(stop) = items.next_element()? {
            stops.push(stop);
        }
        Ok(Stops(stops))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, LazyLock};

    use inflight_engine::{DryBreakers, KvTerms};
    use inflight_tokenizer::GgufVocab;

    use super::*;

    const LIMITS: RequestLimits = RequestLimits {
        kv: KvTerms::UNBOUND,
        max_model_len: 32,
        kv_cache_tokens: 64,
        vocab_size: 100,
    };

    /// Its ids are bytes.
    static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
        let tokens: Vec<_> = (0..=255).map(|byte| format!("<0x{byte:02X}>")).collect();
        Tokenizer::from_gguf(GgufVocab {
            model: "llama".to_owned(),
            scores: vec![0.0; tokens.len()],
            token_types: vec![6; tokens.len()],
            add_space_prefix: Some(false),
            tokens,
            ..GgufVocab::default()
        })
        .unwrap()
    });

    fn resolve(json: &str, length: Length) -> Result<SequenceTemplate, ApiError> {
        let fields: SamplingFields = serde_json::from_str(json).unwrap();
        fields.resolve(&Surroundings {
            limits: &LIMITS,
            tokenizer: &TOKENIZER,
            eos_ids: &[2, 500],
            length,
            top_logprobs: None,
            position: TextPosition::Start,
        })
    }

    #[test]
    fn absent_fields_get_openai_defaults() {
        let template = resolve("{}", Length::Rest).unwrap();
        let neutral = SamplingParams { temperature: 1.0, ..SamplingParams::default() };
        assert_eq!(template.sampling, neutral);
        assert_eq!(template.text.stop_token_ids, [2], "500 is not in the vocabulary");
        assert!(template.text.skip_special_tokens);
        assert!(
            resolve("{\"ignore_eos\": true}", Length::Rest).unwrap().text.stop_token_ids.is_empty()
        );
    }

    #[test]
    fn given_fields_reach_the_engine() {
        let json = r#"{"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1,
            "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": -0.3,
            "typical_p": 0.8, "top_n_sigma": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.2,
            "dry_multiplier": 0.8, "dry_penalty_last_n": 99, "dry_sequence_breakers": ["ab"],
            "bad_words": ["xy"], "logit_bias": {"7": -100, "3": 1.5}, "seed": -1, "stop": "x",
            "stop_token_ids": [9, 2], "min_tokens": 3, "include_stop_str_in_output": true,
            "skip_special_tokens": false, "cache_salt": "ours"}"#;
        let template = resolve(json, Length::Asked(8)).unwrap();
        let sequences = template.sequences(&[vec![1], vec![4, 5]], 2, &LIMITS).unwrap();
        let expected = SamplingParams {
            temperature: 0.5,
            top_k: 40,
            top_p: 0.9,
            min_p: 0.1,
            repetition_penalty: 1.1,
            presence_penalty: 0.2,
            frequency_penalty: -0.3,
            typical_p: 0.8,
            top_n_sigma: 1.5,
            xtc_probability: 0.5,
            xtc_threshold: 0.2,
            dry: Some(DryParams {
                multiplier: 0.8,
                base: 1.75,
                allowed_length: 2,
                last_n: 99,
                breakers: Arc::new(DryBreakers([(97, vec![vec![98]])].into())),
            }),
            bad_words: vec![vec![120, 121], vec![226, 150, 129, 120, 121]],
            logit_bias: vec![(3, 1.5), (7, -100.0)],
            seed: u64::MAX,
            top_logprobs: None,
        };
        assert_eq!(sequences[0].request.sampling, expected);
        let seeds: Vec<_> = sequences.iter().map(|s| s.request.sampling.seed).collect();
        assert_eq!(seeds, [u64::MAX, 0, u64::MAX, 0], "seed + place among the outputs");
        let prompts: Vec<_> = sequences.iter().map(|s| s.request.prompt.len()).collect();
        assert_eq!(prompts, [1, 1, 2, 2]);
        let request = &sequences[3].request;
        assert_eq!(request.max_tokens, Some(8));
        assert_eq!(request.min_tokens, 3);
        assert_eq!(request.stop_token_ids, [2, 9]);
        assert_eq!(request.cache_salt.as_deref(), Some("ours"));
        let text = &sequences[3].text;
        assert_eq!(text.stops, ["x"]);
        assert!(text.include_stop && !text.skip_special_tokens);
    }

    #[test]
    fn lengths() {
        let max_tokens = |length, prompt_len| {
            let template = resolve("{}", length).unwrap();
            let sequences = template.sequences(&[vec![1; prompt_len]], 1, &LIMITS).unwrap();
            sequences[0].request.max_tokens
        };
        assert_eq!(max_tokens(Length::Asked(1000), 8), Some(1000), "the engine refuses it");
        assert_eq!(max_tokens(Length::Usual(16), 8), Some(16));
        assert_eq!(max_tokens(Length::Usual(16), 24), Some(8));
        assert_eq!(max_tokens(Length::Usual(16), 40), Some(1), "the engine refuses the prompt");
        assert_eq!(max_tokens(Length::Rest, 8), None);
    }

    #[test]
    fn unseeded_sequences_differ() {
        let template = resolve("{}", Length::Rest).unwrap();
        let sequences = template.sequences(&[vec![1]], 2, &LIMITS).unwrap();
        assert_ne!(sequences[0].request.sampling.seed, sequences[1].request.sampling.seed);
    }

    #[test]
    fn wrong_values_are_named() {
        let check = |json: &str, expected: &str| match resolve(json, Length::Asked(4)).unwrap_err()
        {
            ApiError::Invalid { param, .. } => assert_eq!(param, expected, "{json}"),
            other => panic!("{json}: {other}"),
        };
        check(r#"{"top_k": -2}"#, "top_k");
        check(r#"{"top_k": 4294967296}"#, "top_k");
        check(r#"{"logit_bias": {"x": 1}}"#, "logit_bias");
        check(r#"{"logit_bias": {"-1": 1}}"#, "logit_bias");
        check(r#"{"logit_bias": {"1": 100.5}}"#, "logit_bias");
        check(r#"{"stop": ""}"#, "stop");
        check(r#"{"stop": ["a", ""]}"#, "stop");
        check(&format!(r#"{{"stop": {:?}}}"#, vec!["a"; 17]), "stop");
        check(&format!(r#"{{"stop": "{}"}}"#, "a".repeat(1025)), "stop");
        check(r#"{"top_n_sigma": -2}"#, "top_n_sigma");
        check(r#"{"bad_words": [" "]}"#, "bad_words");
        let dry = |fields: &str| format!(r#"{{"dry_multiplier": 1, {fields}}}"#);
        check(&dry(r#""dry_penalty_last_n": -2"#), "dry_penalty_last_n");
        check(&dry(r#""dry_sequence_breakers": [""]"#), "dry_sequence_breakers");
        check(r#"{"min_tokens": 5}"#, "min_tokens");
        check(r#"{"cache_salt": ""}"#, "cache_salt");
        check(&format!(r#"{{"cache_salt": "{}"}}"#, "a".repeat(1025)), "cache_salt");
        let template = resolve("{}", Length::Rest).unwrap();
        assert!(template.sequences(&vec![vec![1]; 9], 114, &LIMITS).is_err(), "1,026 sequences");
    }
}
