//! Small engines on the CPU, and clients that write down all they get.

#![allow(dead_code, unreachable_pub, reason = "each test uses some of it")]
#![allow(clippy::unwrap_used, reason = "a test's helpers fail as tests do")]

use std::{
    path::Path,
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, Sender, SyncSender, sync_channel},
    },
    thread::JoinHandle,
};

use inflight_backend::{Backend, CpuBackend, CpuConfig};
use inflight_engine::{
    DryBreakers, DryParams, Engine, EngineConfig, EngineError, EngineHandle, FinishReason, KvKeep,
    MemoryConfig, PromptToken, RequestId, RequestSpec, SamplingParams, SinkClosed, TokenSink,
    TokenUpdate, Update,
};
use inflight_model::{Decoder, ModelConfig, ModelFiles};

/// Two layers, 256 tokens: its weights are random, so its outputs are as varied as can be.
pub const MODEL: &str = "../model/tests/fixtures/llama3";
pub const VOCAB_SIZE: u32 = 256;

/// An engine on its own thread.
pub struct Running {
    pub handle: EngineHandle,
    pub thread: JoinHandle<Result<(), EngineError>>,
}

pub fn config(overlap: bool) -> EngineConfig {
    EngineConfig {
        overlap,
        max_num_seqs: 16,
        max_num_batched_tokens: 48,
        max_model_len: 128,
        block_size: 4,
        num_blocks: 512,
        memory: MemoryConfig::default(),
        max_outstanding: 4096,
        kv_keep: KvKeep::All,
    }
}

pub fn cpu() -> CpuBackend {
    CpuBackend::new(CpuConfig { num_threads: 2, ..CpuConfig::detect() }).unwrap()
}

pub fn engine(config: EngineConfig) -> (Engine<CpuBackend>, EngineHandle) {
    engine_on(cpu(), config)
}

pub fn engine_on<B: Backend>(backend: B, config: EngineConfig) -> (Engine<B>, EngineHandle) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(MODEL);
    let files = ModelFiles::open(&folder).unwrap();
    let max_len = config.max_model_len;
    // Its weights mean nothing, at whatever position.
    let model =
        ModelConfig { max_position: files.config.max_position.max(max_len), ..files.config };
    let decoder = Decoder::load(&backend, &model, &files.weights, max_len, &mut |_| {});
    Engine::new(backend, decoder.unwrap(), config).unwrap()
}

pub fn start(config: EngineConfig) -> Running {
    let (engine, handle) = engine(config);
    Running { handle, thread: std::thread::spawn(|| engine.run()) }
}

impl Running {
    /// Serves what was accepted and ends.
    pub fn stop(self) {
        self.handle.drain();
        self.thread.join().unwrap().unwrap();
    }

    pub fn submit(&self, spec: RequestSpec) -> Client {
        submit(&self.handle, spec)
    }

    pub fn num_free_blocks(&self) -> usize {
        self.handle.stats().num_free_blocks.load(std::sync::atomic::Ordering::Relaxed)
    }
}

pub fn submit(handle: &EngineHandle, spec: RequestSpec) -> Client {
    let request = handle.limits().validate(spec).unwrap();
    let (sender, updates) = sync_channel(1024);
    let id = handle.submit(request, Box::new(Sink(sender))).unwrap();
    Client { id, updates }
}

/// Submits outputs of one request: all but the first share its prompt.
pub fn submit_outputs(handle: &EngineHandle, specs: Vec<RequestSpec>) -> Vec<Client> {
    let mut clients: Vec<Client> = Vec::new();
    for spec in specs {
        let shares_prompt_of = clients.first().map(|client| client.id);
        clients.push(submit(handle, RequestSpec { shares_prompt_of, ..spec }));
    }
    clients
}

struct Sink(SyncSender<Update>);

impl TokenSink for Sink {
    fn send(&mut self, update: Update) -> Result<(), SinkClosed> {
        self.0.try_send(update).map_err(|_| SinkClosed)
    }
}

/// The receiving end of a request.
pub struct Client {
    pub id: RequestId,
    pub updates: Receiver<Update>,
}

/// All that a request gave.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// What is told of the prompt.
    pub prompt: Vec<PromptToken>,
    pub tokens: Vec<TokenUpdate>,
    pub finish: FinishReason,
}

impl Client {
    /// Waits for the end. There must be one final message, and nothing after it.
    pub fn wait(self) -> Output {
        self.wait_and_count().0
    }

    /// The same, and how many tokens of the prompt others had computed: of that the output must not
    /// depend.
    pub fn wait_and_count(self) -> (Output, usize) {
        let mut num_cached_tokens = 0;
        let mut prompt = Vec::new();
        let mut tokens = Vec::new();
        let mut finish = None;
        for update in &self.updates {
            assert_eq!(finish, None, "something came after the final message");
            match update {
                Update::Prompt(more) => {
                    assert!(tokens.is_empty(), "the prompt comes before what follows");
                    prompt.extend(more);
                }
                Update::Token(token) => {
                    num_cached_tokens = token.num_cached_tokens;
                    tokens.push(TokenUpdate { num_cached_tokens: 0, ..token });
                }
                Update::Finished(reason) => finish = Some(reason),
            }
        }
        let finish = finish.expect("there was no final message");
        (Output { prompt, tokens, finish }, num_cached_tokens)
    }
}

impl Output {
    pub fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|update| update.token).collect()
    }
}

/// A sink that remembers its final messages.
#[derive(Clone, Default)]
pub struct Finals(pub Arc<Mutex<Vec<FinishReason>>>);

impl TokenSink for Finals {
    fn send(&mut self, update: Update) -> Result<(), SinkClosed> {
        if let Update::Finished(reason) = update {
            self.0.lock().unwrap().push(reason);
        }
        Ok(())
    }
}

/// The `i`-th of a family of requests that differ in everything: lengths, greedy or sampled,
/// penalties, bias, stop tokens, logprobs.
pub fn mixed_request(i: u32) -> RequestSpec {
    let prompt_len = 1 + (i * 7) % 60;
    let prompt = (0..prompt_len).map(|k| (i * 31 + k * k * 5 + 3) % VOCAB_SIZE).collect();
    let mut sampling = SamplingParams { seed: u64::from(i), ..SamplingParams::default() };
    if !i.is_multiple_of(3) {
        sampling.temperature = 0.5 + (i % 5) as f32 * 0.3;
        sampling.top_k = (i % 4) * 10;
        sampling.top_p = 1.0 - (i % 2) as f32 * 0.1;
        sampling.min_p = (i % 7) as f32 * 0.01;
    }
    if i % 4 == 1 {
        sampling.repetition_penalty = 1.2;
        sampling.presence_penalty = 0.5;
        sampling.frequency_penalty = -0.3;
    }
    if i % 5 == 2 {
        sampling.logit_bias = vec![(i % VOCAB_SIZE, 2.0), (7, f32::NEG_INFINITY)];
    }
    if i % 8 == 5 {
        sampling.typical_p = 0.8;
        sampling.xtc_probability = 0.5;
        sampling.xtc_threshold = 0.02;
    }
    if i % 8 == 2 {
        sampling.top_n_sigma = 1.5;
        let breakers = Arc::new(DryBreakers([(9, vec![vec![]])].into()));
        sampling.dry =
            Some(DryParams { multiplier: 2.0, base: 1.75, allowed_length: 1, last_n: 0, breakers });
        sampling.bad_words = vec![vec![20], vec![i % VOCAB_SIZE, 30], vec![40, 50, 60]];
    }
    let prompt_logprobs = (i % 7 == 3).then_some(i % 3);
    sampling.top_logprobs = i.is_multiple_of(6).then_some(i % 4);
    RequestSpec {
        prompt,
        max_tokens: Some(1 + (i as usize * 11) % 64),
        min_tokens: (i as usize % 3) * 4,
        stop_token_ids: if i.is_multiple_of(2) {
            (0..24).map(|k| k * 10).collect()
        } else {
            Vec::new()
        },
        sampling,
        prompt_logprobs,
        ..RequestSpec::default()
    }
}

/// Hands the state of a request on that pools.
pub struct StateSink(pub Sender<Vec<f32>>);

impl TokenSink for StateSink {
    fn send(&mut self, update: Update) -> Result<(), SinkClosed> {
        assert_eq!(update, Update::Finished(FinishReason::Length), "no token comes");
        Ok(())
    }

    fn send_state(&mut self, state: Vec<f32>) -> Result<(), SinkClosed> {
        self.0.send(state).map_err(|_| SinkClosed)
    }
}
