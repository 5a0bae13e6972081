//! Requests as they are sent.

use hyper::body::Bytes;
use inflight_backend::philox;
use serde_json::{Map, Value, json};

use super::LoadLengths;

/// Most tokens of all prompts of a run: their bodies are in memory before it begins.
const MAX_PROMPT_TOKENS: usize = 1 << 27;

/// One token each, with the space in front of it, in the vocabularies of most models.
const WORDS: [&str; 64] = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
    "father",
    "power",
    "hour",
    "game",
    "line",
    "end",
    "member",
    "law",
];

/// Which of OpenAI's endpoints is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
}

impl Endpoint {
    /// Behind the server's address.
    #[must_use]
    pub fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }
}

/// What prompts are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptKind {
    /// Words, of about one token each.
    Text,
    /// Token ids, from the first up to but without the second; only for completions.
    Ids(u32, u32),
}

/// What is asked of the server.
#[derive(Clone, Debug)]
pub struct ServeWorkload {
    /// Which endpoint.
    pub endpoint: Endpoint,
    /// The model's name.
    pub model: String,
    /// Requests of a run.
    pub num_requests: usize,
    /// How long prompts and outputs are.
    pub lengths: LoadLengths,
    /// What prompts are made of.
    pub prompts: PromptKind,
    /// Tokens at the begin of every prompt that are the same.
    pub shared_prefix: usize,
    /// Randomness of the outputs.
    pub temperature: f64,
    /// Whether outputs go on to their full length: a field that vLLM and others know.
    pub ignores_eos: bool,
    /// Whether the server is asked to count its tokens.
    pub asks_usage: bool,
    /// Put into every body, over what is there.
    pub extra: Map<String, Value>,
    /// Keys prompts and lengths.
    pub seed: u64,
}

/// One request, ready to be sent.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedRequest {
    /// JSON.
    pub body: Bytes,
    /// Most tokens of its output.
    pub output_len: usize,
}

impl ServeWorkload {
    /// All requests of run `run`; other runs have other prompts.
    ///
    /// # Errors
    /// There are too many tokens to keep.
    pub fn plan(&self, run: u64) -> Result<Vec<PlannedRequest>, String> {
        let seed = self.seed.wrapping_add(run);
        let lengths = |i| self.lengths.draw(seed, i);
        let num_tokens = (0..self.num_requests).fold(0_usize, |all, i| all + lengths(i).0);
        if num_tokens > MAX_PROMPT_TOKENS {
            return Err(format!(
                "{num_tokens} tokens of prompts; {MAX_PROMPT_TOKENS} are the most of a run"
            ));
        }
        Ok((0..self.num_requests).map(|i| self.request(seed, i, lengths(i))).collect())
    }

    fn request(
        &self,
        seed: u64,
        i: usize,
        (input_len, output_len): (usize, usize),
    ) -> PlannedRequest {
        let prompt = self.prompt(seed, i as u64, input_len);
        let mut body = json!({
            "model": self.model,
            "max_tokens": output_len,
            "temperature": self.temperature,
            "stream": true,
        });
        match self.endpoint {
            Endpoint::Completions => body["prompt"] = prompt,
            Endpoint::Chat => body["messages"] = json!([{"role": "user", "content": prompt}]),
        }
        if self.asks_usage {
            body["stream_options"] = json!({"include_usage": true});
        }
        if self.ignores_eos {
            body["ignore_eos"] = json!(true);
        }
        for (key, value) in &self.extra {
            body[key] = value.clone();
        }
        let output_len = body["max_tokens"].as_u64().map_or(output_len, |most| most as usize);
        PlannedRequest { body: body.to_string().into(), output_len }
    }

    fn prompt(&self, seed: u64, request: u64, len: usize) -> Value {
        // A key of its own for each request; the prefix has that of none.
        let own = seed.wrapping_add((request + 1) << 32);
        let draw = |i: usize, range: usize| {
            let key = if i < self.shared_prefix { seed } else { own };
            (philox::uniform(key, i as u32) * range as f64) as usize
        };
        match self.prompts {
            PromptKind::Text => {
                let words: Vec<_> = (0..len).map(|i| WORDS[draw(i, WORDS.len())]).collect();
                words.join(" ").into()
            }
            PromptKind::Ids(low, high) => {
                let ids = (0..len).map(|i| low + draw(i, (high - low) as usize) as u32);
                ids.collect::<Vec<_>>().into()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::LengthDistribution;

    fn workload() -> ServeWorkload {
        let fixed = LengthDistribution::Fixed;
        ServeWorkload {
            endpoint: Endpoint::Completions,
            model: "m".to_owned(),
            num_requests: 3,
            lengths: LoadLengths::Drawn { input: fixed(10), output: fixed(5) },
            prompts: PromptKind::Ids(100, 200),
            shared_prefix: 4,
            temperature: 0.0,
            ignores_eos: true,
            asks_usage: true,
            extra: Map::new(),
            seed: 1,
        }
    }

    fn bodies(workload: &ServeWorkload, run: u64) -> Vec<Value> {
        let planned = workload.plan(run).unwrap();
        planned.iter().map(|request| serde_json::from_slice(&request.body).unwrap()).collect()
    }

    #[test]
    fn prompts_share_their_prefix_only() {
        let first = bodies(&workload(), 0);
        let prompts: Vec<_> = first.iter().map(|b| b["prompt"].as_array().unwrap()).collect();
        assert!(prompts.iter().all(|prompt| prompt.len() == 10));
        assert!(
            prompts.iter().flat_map(|p| *p).all(|id| (100..200).contains(&id.as_u64().unwrap()))
        );
        assert_eq!(prompts[0][..4], prompts[1][..4]);
        assert_ne!(prompts[0][4..], prompts[1][4..]);
        assert_eq!(first, bodies(&workload(), 0), "the same again");
        assert_ne!(first, bodies(&workload(), 1), "another run");
    }

    #[test]
    fn bodies_say_what_was_asked_for() {
        let mut asked = workload();
        asked.endpoint = Endpoint::Chat;
        asked.prompts = PromptKind::Text;
        asked.extra.insert("max_tokens".to_owned(), json!(9));
        let body = &bodies(&asked, 0)[0];
        let text = body["messages"][0]["content"].as_str().unwrap();
        assert_eq!(text.split(' ').count(), 10);
        assert_eq!((&body["ignore_eos"], &body["max_tokens"]), (&json!(true), &json!(9)));
        assert_eq!(body["stream_options"]["include_usage"], true);
        assert_eq!(asked.plan(0).unwrap()[0].output_len, 9);
        assert!(body.get("prompt").is_none());
    }

    #[test]
    fn too_many_tokens_are_refused() {
        let input = LengthDistribution::Fixed(1 << 22);
        let output = LengthDistribution::Fixed(1);
        let lengths = LoadLengths::Drawn { input, output };
        let workload = ServeWorkload { num_requests: 1000, lengths, ..workload() };
        assert!(workload.plan(0).unwrap_err().contains("most of a run"));
    }
}
