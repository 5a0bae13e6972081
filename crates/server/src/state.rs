//! What all handlers share.

use std::convert::Infallible;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use inflight_engine::{Pooling, SharedGrammar};
use inflight_grammar::{Constraint, GrammarCompiler, GrammarError};
use inflight_observe::StepRecorder;
use inflight_tokenizer::Tokenizer;
use serde_json::Value;
use tokio::sync::watch;

use crate::access::{Account, ApiKeys, Caller, CorsOrigins};
use crate::chat::ChatStyle;
use crate::engine::Generate;
use crate::error::ApiError;
use crate::files::FileStore;
use crate::observe::{KvCapacity, Metrics};
use crate::output::ToolFormat;
use crate::pace::Pace;

/// How the server serves. Frozen when it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerConfig {
    /// Names that requests may use for the model, at least one; `/v1/models` lists them all.
    pub model_names: Vec<String>,
    /// Most bytes of a request's body. Default: 16 MiB, which is some million tokens.
    pub max_body_bytes: usize,
    /// Keys of which every request must bear one, but for a few paths. Default: none, the server
    /// is open to everybody.
    pub keys: ApiKeys,
    /// Origins whose pages may ask. Default: none but the server's own page.
    pub cors_origins: CorsOrigins,
    /// Most connections at once; further ones are told so and closed. Default: 4096.
    pub max_connections: usize,
    /// How long a request's head, and after it its body, may take to arrive. Default: 60 s.
    pub receive_timeout: Duration,
    /// How long a request may take in the engine. Default: no limit.
    pub request_timeout: Option<Duration>,
    /// How the model writes tool calls; `None`: as its chat template tells.
    pub tool_format: Option<ToolFormat>,
    /// Whether a model's thoughts are told apart from its answer, if its template knows thoughts.
    pub splits_reasoning: bool,
    /// Whether `/metrics` has figures under vLLM's names too. Default: yes.
    pub vllm_metrics: bool,
    /// What of a prompt's states its embedding is. Default: the one after the last token.
    pub pooling: Pooling,
    /// Where files and batches are kept. Default: nowhere, there are none.
    pub files: Option<FileStore>,
    /// How long running requests may go on after the server was told to shut down. Default: 30 s.
    pub shutdown_timeout: Duration,
    /// How long work may wait without a step until `/health/ready` fails. Default: 60 s.
    pub stall_timeout: Duration,
    /// Whether the engine goes by the requests' priorities; if not, those that have one are
    /// refused. Default: no.
    pub orders_by_priority: bool,
    /// Whether the engine limits time in the queue. Default: no.
    pub limits_queue_time: bool,
    /// What the KV cache's memory would hold with numbers of each type, for `/metrics`. Default:
    /// nothing is said.
    pub kv_capacities: Vec<KvCapacity>,
}

impl ServerConfig {
    /// Serves one model name with the defaults.
    pub fn new(model_name: impl Into<String>) -> Self {
        Self {
            model_names: vec![model_name.into()],
            max_body_bytes: 16 << 20,
            keys: ApiKeys::default(),
            cors_origins: CorsOrigins::default(),
            max_connections: 4096,
            receive_timeout: Duration::from_secs(60),
            request_timeout: None,
            tool_format: None,
            splits_reasoning: true,
            vllm_metrics: true,
            pooling: Pooling::LastToken,
            files: None,
            shutdown_timeout: Duration::from_secs(30),
            stall_timeout: Duration::from_secs(60),
            orders_by_priority: false,
            limits_queue_time: false,
            kv_capacities: Vec::new(),
        }
    }
}

/// How far the server is in shutting down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    Serving,
    /// No new requests; those that run go on.
    Draining,
    /// Those that run are ended.
    Aborting,
}

/// The model, the engine that runs it, and where the server is in its life. Cheap to clone.
#[derive(Clone)]
pub struct ServerState {
    shared: Arc<Shared>,
    /// Who asks, in the state that a request's handler gets.
    caller: Caller,
}

struct Shared {
    engine: Arc<dyn Generate>,
    tokenizer: Arc<Tokenizer>,
    config: ServerConfig,
    style: Arc<ChatStyle>,
    grammars: Grammars,
    started_unix_s: u64,
    system_fingerprint: String,
    phase: watch::Sender<Phase>,
    pace: Pace,
    metrics: Arc<Metrics>,
    /// Of the keys, in their order.
    accounts: Vec<Arc<Account>>,
    openapi: OnceLock<Value>,
}

impl ServerState {
    /// Joins what handlers need.
    ///
    /// # Panics
    /// If `config` names no model.
    pub fn new(engine: Arc<dyn Generate>, tokenizer: Arc<Tokenizer>, config: ServerConfig) -> Self {
        assert!(!config.model_names.is_empty(), "a served model has a name");
        let accounts = config.keys.all().iter().cloned().map(Account::new).map(Arc::new);
        let shared = Shared {
            accounts: accounts.collect(),
            system_fingerprint: fingerprint(&config.model_names[0], engine.limits().vocab_size),
            style: Arc::new(ChatStyle::new(&tokenizer, &config)),
            grammars: Grammars::new(Arc::clone(&tokenizer), engine.limits().vocab_size),
            engine,
            tokenizer,
            config,
            started_unix_s: unix_time_s(),
            phase: watch::Sender::new(Phase::Serving),
            pace: Pace::default(),
            metrics: Arc::default(),
            openapi: OnceLock::new(),
        };
        Self { shared: Arc::new(shared), caller: Caller::default() }
    }

    pub(crate) fn engine(&self) -> &Arc<dyn Generate> {
        &self.shared.engine
    }

    pub(crate) fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.shared.tokenizer
    }

    pub(crate) fn config(&self) -> &ServerConfig {
        &self.shared.config
    }

    /// Where files and batches are.
    ///
    /// # Errors
    /// There are none.
    pub(crate) fn files(&self) -> Result<&FileStore, ApiError> {
        self.config().files.as_ref().ok_or(ApiError::NoFiles)
    }

    /// Whether requests are served, and will be.
    pub(crate) fn is_serving(&self) -> bool {
        self.phase() == Phase::Serving && self.engine().is_alive()
    }

    /// What the model's chat template knows.
    pub(crate) fn style(&self) -> &Arc<ChatStyle> {
        &self.shared.style
    }

    /// What compiles schemas and grammars.
    pub(crate) fn grammars(&self) -> &Grammars {
        &self.shared.grammars
    }

    pub(crate) fn pace(&self) -> &Pace {
        &self.shared.pace
    }

    /// Seconds after which a client that finds the queue full should come back.
    pub(crate) fn retry_after_s(&self) -> u64 {
        let num_running = self.engine().stats().num_running.load(Ordering::Relaxed);
        self.pace().retry_after_s(num_running)
    }

    /// What has become of each key; empty if the server is open to everybody.
    pub(crate) fn accounts(&self) -> &[Arc<Account>] {
        &self.shared.accounts
    }

    /// The API's description, made when it is first asked for.
    pub(crate) fn openapi(&self, make: impl FnOnce() -> Value) -> &Value {
        self.shared.openapi.get_or_init(make)
    }

    /// Who asks.
    pub(crate) fn caller(&self) -> &Caller {
        &self.caller
    }

    pub(crate) fn metrics(&self) -> &Arc<Metrics> {
        &self.shared.metrics
    }

    /// What keeps the engine's last steps, if anything does.
    pub(crate) fn recorder(&self) -> Option<&StepRecorder> {
        self.shared.engine.recorder()
    }

    /// When the server started, in seconds since 1970.
    pub(crate) fn started_unix_s(&self) -> u64 {
        self.shared.started_unix_s
    }

    /// Names model and software: equal as long as the same seed means the same output.
    pub(crate) fn system_fingerprint(&self) -> &str {
        &self.shared.system_fingerprint
    }

    pub(crate) fn phase(&self) -> Phase {
        *self.shared.phase.borrow()
    }

    pub(crate) fn set_phase(&self, phase: Phase) {
        self.shared.phase.send_replace(phase);
    }

    /// A view of the phase to wait on.
    pub(crate) fn watch_phase(&self) -> watch::Receiver<Phase> {
        self.shared.phase.subscribe()
    }

    /// The name to answer with: the one that was asked for, or the first if none was.
    pub(crate) fn model_name(&self, asked: Option<String>) -> Result<String, ApiError> {
        let names = &self.config().model_names;
        match asked {
            None => Ok(names[0].clone()),
            Some(asked) if names.contains(&asked) => Ok(asked),
            Some(model) => Err(ApiError::UnknownModel { model, known: names.join("`, `") }),
        }
    }
}

/// The state of a handler whose request costs something: it knows who asks.
impl FromRequestParts<ServerState> for ServerState {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, state: &Self) -> Result<Self, Infallible> {
        let caller = parts.extensions.get::<Caller>().cloned().unwrap_or_default();
        Ok(Self { shared: Arc::clone(&state.shared), caller })
    }
}

/// A compiler of schemas and grammars, made when it is first needed.
pub(crate) struct Grammars {
    tokenizer: Arc<Tokenizer>,
    vocab_size: usize,
    compiler: OnceLock<Result<GrammarCompiler, GrammarError>>,
}

impl Grammars {
    fn new(tokenizer: Arc<Tokenizer>, vocab_size: usize) -> Self {
        Self { tokenizer, vocab_size, compiler: OnceLock::new() }
    }

    /// Blocks, for some tenths of a second when it is first called.
    pub(crate) fn compile(&self, constraint: &Constraint) -> Result<SharedGrammar, GrammarError> {
        let compiler = || GrammarCompiler::new(&self.tokenizer, self.vocab_size);
        self.compiler.get_or_init(compiler).as_ref().map_err(Clone::clone)?.compile(constraint)
    }
}

pub(crate) fn unix_time_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// FNV-1a of what the outputs depend on.
fn fingerprint(model: &str, vocab_size: usize) -> String {
    let text = format!("{} {model} {vocab_size}", env!("CARGO_PKG_VERSION"));
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("fp_{:010x}", hash >> 24)
}
