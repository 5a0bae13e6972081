//! A scripted engine, a tokenizer whose ids are bytes, and a client without a network.

#![allow(dead_code, reason = "each test file uses a part")]
#![allow(clippy::unwrap_used, reason = "this is test code")]

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request, StatusCode};
use axum::response::Response;
use inflight_engine::{
    Allowed, EngineStats, FinishReason, KvTerms, RequestId, RequestLimits, SharedGrammar,
    SubmitError, TokenSink, TokenUpdate, Update, ValidRequest,
};
use inflight_server::{Generate, ServerConfig, ServerState, router};
use inflight_tokenizer::{GgufVocab, Tokenizer};
use serde_json::{Value, json};
use tower::ServiceExt;

/// Ids 0 to 255 are bytes.
pub(crate) const START: u32 = 256;
pub(crate) const END: u32 = 257;
/// A llama over two tokens of two bytes: no character by themselves.
pub(crate) const LLAMA_HEAD: u32 = 258;
pub(crate) const LLAMA_TAIL: u32 = 259;
pub(crate) const HELLO: u32 = 260;
/// Marks of thoughts as tokens, of models that have them; others spell them in bytes.
pub(crate) const THINK: u32 = 261;
pub(crate) const END_THINK: u32 = 262;
pub(crate) const VOCAB_SIZE: usize = 261;

/// Writes `<|im_start|>role\ncontent<|im_end|>` for each message; refuses a system message that
/// is not the first.
const TEMPLATE: &str = "{% for m in messages %}\
    {% if m.role == 'system' and not loop.first %}{{ raise_exception('too late') }}{% endif %}\
    <|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ suffix }}";

/// Tells tools, writes calls and thoughts, as Qwen's does in more words.
pub(crate) const RICH_TEMPLATE: &str = "\
    {% for t in tools %}<tools>{{ t | tojson }}</tools>{% endfor %}\
    {% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\
    {% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\
    <|im_end|>{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n\
    {% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}\
    {% endif %}";

/// The byte alphabet of GPT-2 by byte: printable Latin-1 stands for itself, the rest from U+0100.
fn alphabet() -> Vec<char> {
    let is_printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut next = 256;
    let mut spell = |byte: u8| {
        let code = if is_printable(byte) { u32::from(byte) } else { next };
        next += u32::from(code >= 256);
        char::from_u32(code).unwrap()
    };
    (0..=255).map(&mut spell).collect()
}

pub(crate) fn tokenizer() -> Arc<Tokenizer> {
    tokenizer_with(TEMPLATE, VOCAB_SIZE)
}

fn tokenizer_with(template: &str, vocab_size: usize) -> Arc<Tokenizer> {
    let alphabet = alphabet();
    let spell = |bytes: &[u8]| -> String { bytes.iter().map(|b| alphabet[*b as usize]).collect() };
    let mut tokens: Vec<String> = alphabet.iter().map(char::to_string).collect();
    let llama = "🦙".as_bytes();
    tokens.extend(["<|im_start|>", "<|im_end|>"].map(str::to_owned));
    tokens.extend([spell(&llama[..2]), spell(&llama[2..]), spell(b"Hello")]);
    tokens.extend(["<think>", "</think>"].map(str::to_owned));
    tokens.truncate(vocab_size);
    let is_control = |id: usize| [START, END, THINK, END_THINK].contains(&(id as u32));
    let token_types = (0..vocab_size).map(|id| if is_control(id) { 3 } else { 1 }).collect();
    let vocab = GgufVocab {
        model: "gpt2".to_owned(),
        pre: Some("gpt-2".to_owned()),
        tokens,
        token_types,
        eos: Some(END),
        chat_template: Some(template.to_owned()),
        ..GgufVocab::default()
    };
    Arc::new(Tokenizer::from_gguf(vocab).unwrap())
}

pub(crate) fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// Updates that spell tokens and then end.
pub(crate) fn script(tokens: &[u32], end: FinishReason) -> Vec<Update> {
    let token = |&token| Update::Token(TokenUpdate { token, ..TokenUpdate::default() });
    tokens.iter().map(token).chain([Update::Finished(end)]).collect()
}

/// Generates `text`, then the end token.
pub(crate) fn says(text: &str) -> Vec<Update> {
    let mut tokens = bytes(text);
    tokens.push(END);
    script(&tokens, FinishReason::Stop { token: END })
}

type Script = Box<dyn Fn(&[u32], usize) -> Vec<Update> + Send + Sync>;

/// An engine that says what a script says, as a function of the prompt and of how many requests
/// came before. A script without an end leaves the request running until it is aborted.
pub(crate) struct FakeEngine {
    limits: RequestLimits,
    stats: EngineStats,
    script: Script,
    alive: AtomicBool,
    stalled_ms: AtomicU64,
    max_running: usize,
    num_submitted: AtomicUsize,
    running: Mutex<HashMap<RequestId, Box<dyn TokenSink>>>,
    prompts: Mutex<Vec<(Vec<u32>, usize)>>,
    /// Whose each request was, and how long it was given.
    terms: Mutex<Vec<(Option<String>, Option<Duration>)>>,
    /// What the last one's outputs are held to.
    grammar: Mutex<Option<SharedGrammar>>,
    aborted: Mutex<Vec<RequestId>>,
}

impl FakeEngine {
    pub(crate) fn new(
        script: impl Fn(&[u32], usize) -> Vec<Update> + Send + Sync + 'static,
    ) -> Self {
        Self {
            limits: RequestLimits {
                max_model_len: 256,
                kv_cache_tokens: 1024,
                vocab_size: VOCAB_SIZE,
                kv: KvTerms::UNBOUND,
            },
            stats: EngineStats::default(),
            script: Box::new(script),
            alive: AtomicBool::new(true),
            stalled_ms: AtomicU64::new(0),
            max_running: 64,
            num_submitted: AtomicUsize::new(0),
            running: Mutex::default(),
            prompts: Mutex::default(),
            terms: Mutex::default(),
            grammar: Mutex::default(),
            aborted: Mutex::default(),
        }
    }

    /// With room for so many tokens.
    pub(crate) fn with_context(mut self, num_tokens: usize) -> Self {
        self.limits.max_model_len = num_tokens;
        self.limits.kv_cache_tokens = 4 * num_tokens;
        self
    }

    /// Whose model has tokens for the marks of thoughts.
    pub(crate) fn with_thought_tokens(mut self) -> Self {
        self.limits.vocab_size = VOCAB_SIZE + 2;
        self
    }

    pub(crate) fn with_max_running(self, max_running: usize) -> Self {
        Self { max_running, ..self }
    }

    /// Sends to every request that runs.
    pub(crate) fn send(&self, update: &Update) {
        for sink in self.running.lock().unwrap().values_mut() {
            sink.send(update.clone()).unwrap();
        }
    }

    /// Ends every request that runs.
    pub(crate) fn finish(&self, reason: &FinishReason) {
        for (_, mut sink) in self.running.lock().unwrap().drain() {
            // Whoever went away does not miss the message.
            let _ = sink.send(Update::Finished(reason.clone()));
        }
    }

    /// Pretends that work has waited for so long.
    pub(crate) fn stall(&self, duration: Duration) {
        self.stalled_ms.store(u64::try_from(duration.as_millis()).unwrap(), Ordering::Relaxed);
    }

    pub(crate) fn die(&self) {
        self.alive.store(false, Ordering::Relaxed);
        self.finish(&FinishReason::Failed("the device is lost".to_owned()));
    }

    pub(crate) fn num_running(&self) -> usize {
        self.running.lock().unwrap().len()
    }

    pub(crate) fn num_aborted(&self) -> usize {
        self.aborted.lock().unwrap().len()
    }

    /// Whose all requests so far were.
    pub(crate) fn tenants(&self) -> Vec<Option<String>> {
        self.terms.lock().unwrap().iter().map(|terms| terms.0.clone()).collect()
    }

    /// How long they were given.
    pub(crate) fn timeouts(&self) -> Vec<Option<Duration>> {
        self.terms.lock().unwrap().iter().map(|terms| terms.1).collect()
    }

    /// Whether the last request's outputs may be, or begin with, these tokens: after how many of
    /// them one may not come.
    pub(crate) fn last_allows(&self, tokens: &[u32]) -> Result<(), usize> {
        let grammar = self.grammar.lock().unwrap().clone().expect("nothing is asked of it");
        let mut matcher = grammar.0.start();
        for (i, token) in tokens.iter().enumerate() {
            let mut mask = vec![0_u32; self.limits.vocab_size.div_ceil(32)];
            let is_allowed = match matcher.allowed(&mut mask).unwrap() {
                Allowed::All => true,
                Allowed::Nothing => false,
                Allowed::Masked => mask[*token as usize / 32] >> (token % 32) & 1 == 1,
            };
            if !is_allowed {
                return Err(i);
            }
            matcher.advance(*token).unwrap();
        }
        Ok(())
    }

    /// Prompts and `max_tokens` of all requests so far.
    pub(crate) fn requests(&self) -> Vec<(Vec<u32>, usize)> {
        self.prompts.lock().unwrap().clone()
    }
}

impl Generate for FakeEngine {
    fn limits(&self) -> &RequestLimits {
        &self.limits
    }

    fn submit(
        &self,
        request: ValidRequest,
        mut sink: Box<dyn TokenSink>,
    ) -> Result<RequestId, SubmitError> {
        if !self.is_alive() {
            return Err(SubmitError::Stopped);
        }
        let mut running = self.running.lock().unwrap();
        if running.len() >= self.max_running {
            return Err(SubmitError::QueueFull { max_outstanding: self.max_running });
        }
        let number = self.num_submitted.fetch_add(1, Ordering::Relaxed);
        let id = RequestId(number as u64);
        self.prompts.lock().unwrap().push((request.prompt().to_vec(), request.max_tokens()));
        let tenant = request.tenant().name().map(str::to_owned);
        self.terms.lock().unwrap().push((tenant, request.timeout()));
        *self.grammar.lock().unwrap() = request.grammar().cloned();
        // Of use to those that asked for a state only.
        let _ = sink.send_state(vec![3.0, 4.0]);
        let updates = (self.script)(request.prompt(), number);
        let ends = matches!(updates.last(), Some(Update::Finished(_)));
        for update in updates {
            sink.send(update).unwrap();
        }
        if !ends {
            running.insert(id, sink);
        }
        Ok(id)
    }

    fn abort(&self, id: RequestId) {
        self.aborted.lock().unwrap().push(id);
        if let Some(mut sink) = self.running.lock().unwrap().remove(&id) {
            let _ = sink.send(Update::Finished(FinishReason::Aborted));
        }
    }

    fn stats(&self) -> &EngineStats {
        &self.stats
    }

    fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Relaxed)
    }

    fn stalled_for(&self) -> Duration {
        Duration::from_millis(self.stalled_ms.load(Ordering::Relaxed))
    }
}

/// A server without a network.
#[derive(Clone)]
pub(crate) struct TestServer {
    pub(crate) engine: Arc<FakeEngine>,
    pub(crate) state: ServerState,
}

impl TestServer {
    pub(crate) fn new(engine: FakeEngine) -> Self {
        Self::with_template(engine, TEMPLATE)
    }

    /// A server whose model has this chat template.
    pub(crate) fn with_template(engine: FakeEngine, template: &str) -> Self {
        Self::configured(engine, template, |_| {})
    }

    /// A server with some settings of its own.
    pub(crate) fn set(engine: FakeEngine, set: impl FnOnce(&mut ServerConfig)) -> Self {
        Self::configured(engine, TEMPLATE, set)
    }

    fn configured(engine: FakeEngine, template: &str, set: impl FnOnce(&mut ServerConfig)) -> Self {
        let engine = Arc::new(engine);
        let mut config = ServerConfig::new("tiny");
        config.model_names.push("org/tiny".to_owned());
        config.max_body_bytes = 64 << 10;
        set(&mut config);
        let tokenizer = tokenizer_with(template, engine.limits.vocab_size);
        let state = ServerState::new(engine.clone(), tokenizer, config);
        Self { engine, state }
    }

    /// A server whose every sequence generates these tokens and then its length is reached.
    pub(crate) fn generating(tokens: &[u32]) -> Self {
        let tokens = tokens.to_vec();
        Self::new(FakeEngine::new(move |_, _| script(&tokens, FinishReason::Length)))
    }

    pub(crate) fn saying(text: &'static str) -> Self {
        Self::new(FakeEngine::new(move |_, _| says(text)))
    }

    /// A server that says `text` and whose template knows tools and thoughts.
    pub(crate) fn rich(text: &'static str) -> Self {
        Self::rich_with(move |_, _| says(text))
    }

    /// The same of a model that has tokens for the marks of its thoughts.
    pub(crate) fn thinking(text: &'static str) -> Self {
        let engine = FakeEngine::new(move |_, _| says(text));
        Self::with_template(engine.with_context(4096).with_thought_tokens(), RICH_TEMPLATE)
    }

    pub(crate) fn rich_with(
        script: impl Fn(&[u32], usize) -> Vec<Update> + Send + Sync + 'static,
    ) -> Self {
        Self::with_template(FakeEngine::new(script).with_context(4096), RICH_TEMPLATE)
    }

    /// The last prompt as text; `|` for control tokens.
    pub(crate) fn last_prompt(&self) -> String {
        let prompt = self.engine.requests().last().unwrap().0.clone();
        let bytes = prompt.into_iter().map(|id| u8::try_from(id).unwrap_or(b'|'));
        String::from_utf8(bytes.collect()).unwrap()
    }

    pub(crate) async fn send(&self, request: Request<Body>) -> Response {
        router(self.state.clone()).oneshot(request).await.unwrap()
    }

    pub(crate) async fn get(&self, path: &str) -> (StatusCode, Value) {
        let request = Request::get(path).body(Body::empty()).unwrap();
        let (status, _, value) = read(self.send(request).await).await;
        (status, value)
    }

    pub(crate) async fn post_text(&self, path: &str, body: &str) -> (StatusCode, HeaderMap, Value) {
        read(self.send(json_request(path, body)).await).await
    }

    /// Posts a request that must succeed.
    pub(crate) async fn post(&self, path: &str, body: Value) -> Value {
        let (status, _, value) = self.post_text(path, &body.to_string()).await;
        assert_eq!(status, StatusCode::OK, "{value}");
        value
    }

    /// Posts a request that must be streamed, and gives its events' data.
    pub(crate) async fn stream(&self, path: &str, body: Value) -> Vec<String> {
        events(&self.stream_text(path, body).await)
    }

    /// Posts a request whose stream must have named events, and gives them; each must say its
    /// name in its data too.
    pub(crate) async fn stream_named(&self, path: &str, body: Value) -> Vec<Value> {
        let text = self.stream_text(path, body).await;
        let event = |event: &str| {
            let (name, data) = event.split_once('\n').unwrap();
            let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            assert_eq!(data["type"], name.strip_prefix("event: ").unwrap());
            data
        };
        text.split_terminator("\n\n").map(event).collect()
    }

    async fn stream_text(&self, path: &str, mut body: Value) -> String {
        body["stream"] = json!(true);
        let response = self.send(json_request(path, &body.to_string())).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let text = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        String::from_utf8(text.to_vec()).unwrap()
    }
}

/// The data of server-sent events.
pub(crate) fn events(text: &str) -> Vec<String> {
    let event = |event: &str| {
        event.strip_prefix("data: ").unwrap_or_else(|| panic!("{event:?}")).to_owned()
    };
    text.split_terminator("\n\n").map(event).collect()
}

/// Events of a stream that ended well, as JSON and without what changes from run to run.
pub(crate) fn chunks(events: &[String]) -> Vec<Value> {
    let (done, chunks) = events.split_last().unwrap();
    assert_eq!(done, "[DONE]");
    chunks.iter().map(|chunk| steady(serde_json::from_str(chunk).unwrap())).collect()
}

/// Checks what changes from run to run and takes it out.
pub(crate) fn steady(mut response: Value) -> Value {
    let fields = response.as_object_mut().unwrap();
    assert!(fields.shift_remove("id").unwrap().is_string());
    assert!(fields.shift_remove("created").unwrap().as_u64().unwrap() > 1_700_000_000);
    let fingerprint = fields.shift_remove("system_fingerprint").unwrap();
    assert!(fingerprint.as_str().unwrap().starts_with("fp_"));
    response
}

pub(crate) fn json_request(path: &str, body: &str) -> Request<Body> {
    let request = Request::post(path).header("content-type", "application/json");
    request.body(Body::from(body.to_owned())).unwrap()
}

pub(crate) async fn read(response: Response) -> (StatusCode, HeaderMap, Value) {
    let (parts, body) = response.into_parts();
    let body = to_bytes(body, usize::MAX).await.unwrap();
    let value = serde_json::from_slice(&body).unwrap_or_else(|_| panic!("{body:?}"));
    (parts.status, parts.headers, value)
}
