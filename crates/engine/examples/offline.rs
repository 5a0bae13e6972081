//! Many requests at once through the engine, without a server: time, tokens, how busy the device
//! was.
//!
//! ```text
//! offline --dummy CONFIG.json | --model FILE  [--device cuda|cpu] [--requests 32] [--input 256]
//!         [--output 256] [--no-overlap] [--no-graphs] [--spin] [--cache FOLDER] [--chunk 2048]
//!         [--gpu-memory-utilization 0.9] [--sampled | --penalised] [--cold]
//!         [--tokens FILE]
//! ```

use std::{
    collections::HashMap,
    error::Error,
    path::PathBuf,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use inflight_backend::{
    Backend, CpuBackend, CpuConfig, CudaBackend, CudaConfig, cuda::usual_library_folders, philox,
};
use inflight_engine::{
    Engine, EngineConfig, EngineHandle, RequestSpec, SamplingParams, SinkClosed, StepRecord,
    TokenSink, Update,
};
use inflight_model::{Decoder, ModelFiles};

type Failure = Box<dyn Error + Send + Sync>;

/// Tokens of a block of the KV cache.
const BLOCK_SIZE: usize = 16;

/// What the command line asks for.
struct Options {
    values: HashMap<String, String>,
}

impl Options {
    fn parse() -> Self {
        let mut values = HashMap::new();
        let mut arguments = std::env::args().skip(1).peekable();
        while let Some(name) = arguments.next() {
            let value = arguments.next_if(|next| !next.starts_with("--")).unwrap_or_default();
            values.insert(name, value);
        }
        Self { values }
    }

    fn has(&self, name: &str) -> bool {
        self.values.contains_key(name)
    }

    fn number(&self, name: &str, default: usize) -> Result<usize, Failure> {
        self.values.get(name).map_or(Ok(default), |value| Ok(value.parse()?))
    }

    fn path(&self, name: &str) -> Option<PathBuf> {
        self.values.get(name).map(PathBuf::from)
    }
}

fn main() -> Result<(), Failure> {
    let options = Options::parse();
    let files = match (options.path("--model"), options.path("--dummy")) {
        (Some(path), _) => ModelFiles::open(&path)?,
        (None, Some(path)) => ModelFiles::dummy(&path, 0)?,
        (None, None) => return Err("--model FILE or --dummy CONFIG.json is needed".into()),
    };
    if options.values.get("--device").is_some_and(|device| device == "cpu") {
        return run(&CpuBackend::new(CpuConfig::detect())?, &files, &options, Ok);
    }
    let started = Instant::now();
    let backend = CudaBackend::new(CudaConfig {
        ordinal: 0,
        library_folders: usual_library_folders(|name| std::env::var_os(name)),
        cache: options.path("--cache"),
        graphs: !options.has("--no-graphs"),
        blocking_waits: !options.has("--spin"),
    })?;
    println!("device open      {:.2?}", started.elapsed());
    let utilization = options.values.get("--gpu-memory-utilization");
    let utilization = utilization.map(|fraction| fraction.parse::<f64>()).transpose()?;
    let bytes_per_block =
        BLOCK_SIZE * inflight_model::kv_bytes_per_token(&files.config, backend.kv_dtype());
    run(&backend, &files, &options, |config| {
        let Some(utilization) = utilization else { return Ok(config) };
        let activations = backend.activation_dtype();
        let working = config.working_bytes(&files.config, activations);
        let plan = backend.memory_plan(utilization, working)?;
        println!("{plan}");
        Ok(EngineConfig { num_blocks: plan.num_blocks(bytes_per_block), ..config })
    })?;
    let (free, total) = backend.memory()?;
    println!("memory           {:.2} of {:.2} GiB free at the end", gib(free), gib(total));
    Ok(())
}

fn gib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

/// As much KV cache as the requests need, or as `resize` makes of that when the weights are loaded.
fn run<B: Backend>(
    backend: &B,
    files: &ModelFiles,
    options: &Options,
    resize: impl FnOnce(EngineConfig) -> Result<EngineConfig, Failure>,
) -> Result<(), Failure> {
    println!("device           {}", backend.description());
    let (num_requests, input) =
        (options.number("--requests", 32)?, options.number("--input", 256)?);
    let output = options.number("--output", 256)?;
    let max_model_len = input + output;
    let started = Instant::now();
    let decoder =
        Decoder::load(backend, &files.config, &files.weights, max_model_len, &mut |_| {})?;
    println!("weights loaded   {:.2?}", started.elapsed());
    let config = EngineConfig {
        overlap: !options.has("--no-overlap"),
        max_num_seqs: num_requests,
        max_num_batched_tokens: options.number("--chunk", 2048)?.max(num_requests),
        max_model_len,
        block_size: BLOCK_SIZE,
        num_blocks: num_requests * (max_model_len.div_ceil(BLOCK_SIZE) + 1),
        max_outstanding: num_requests,
    };
    let config = resize(config)?;
    let started = Instant::now();
    let (mut engine, handle) = Engine::new(backend.clone(), decoder, config)?;
    println!("engine ready     {:.2?}", started.elapsed());
    let (records, steps) = mpsc::sync_channel(2 * max_model_len + 10_000);
    engine.trace_to(records);
    let vocab_size = files.config.vocab_size;
    // Submitted before the engine runs, requests meet the same schedule with overlap as without.
    let (mut requests, mut started) = (Vec::new(), Instant::now());
    if options.has("--cold") {
        requests = submit_all(&handle, options, vocab_size, output)?;
    }
    let engine = thread::spawn(move || engine.run());
    if !options.has("--cold") {
        // What is only slow the first time: the device loads code when it first runs it.
        let warm_up = submit_all(&handle, options, vocab_size, 2)?;
        warm_up.into_iter().try_for_each(|updates| collect(updates).map(|_| ()))?;
        println!("warm-up          {} steps", steps.try_iter().count());
        started = Instant::now();
        requests = submit_all(&handle, options, vocab_size, output)?;
    }
    let tokens = requests.into_iter().map(collect).collect::<Result<Vec<_>, _>>()?;
    let wall = started.elapsed();
    handle.drain();
    drop(handle);
    engine.join().map_err(|_| "the engine's thread panicked")??;
    report(&tokens, wall, &steps.try_iter().collect::<Vec<_>>());
    if let Some(path) = options.path("--tokens") {
        let lines = tokens.iter().map(|tokens| format!("{tokens:?}\n"));
        std::fs::write(path, lines.collect::<String>())?;
    }
    Ok(())
}

/// Sends a request's updates to whoever collects them.
struct Sink(mpsc::Sender<Update>);

impl TokenSink for Sink {
    fn send(&mut self, update: Update) -> Result<(), SinkClosed> {
        self.0.send(update).map_err(|_| SinkClosed)
    }
}

/// Requests of random prompts that differ from each other.
fn submit_all(
    handle: &EngineHandle,
    options: &Options,
    vocab_size: usize,
    output: usize,
) -> Result<Vec<mpsc::Receiver<Update>>, Failure> {
    let (num_requests, input) =
        (options.number("--requests", 32)?, options.number("--input", 256)?);
    let mut receivers = Vec::new();
    for request in 0..num_requests {
        let draw = |i| (philox::uniform(request as u64, i) * vocab_size as f64) as u32;
        let mut sampling = SamplingParams { seed: request as u64, ..SamplingParams::default() };
        if options.has("--sampled") {
            (sampling.temperature, sampling.top_p, sampling.top_k) = (0.8, 0.95, 50);
        }
        if options.has("--penalised") {
            (sampling.repetition_penalty, sampling.top_logprobs) = (1.2, Some(5));
        }
        let spec = RequestSpec {
            prompt: (0..u32::try_from(input)?).map(draw).collect(),
            max_tokens: Some(output),
            sampling,
            ..RequestSpec::default()
        };
        let (sink, receiver) = mpsc::channel();
        handle.submit(handle.limits().validate(spec)?, Box::new(Sink(sink)))?;
        receivers.push(receiver);
    }
    Ok(receivers)
}

fn collect(updates: mpsc::Receiver<Update>) -> Result<Vec<u32>, Failure> {
    let mut tokens = Vec::new();
    for update in updates {
        match update {
            Update::Token(update) => tokens.push(update.token),
            Update::Finished(inflight_engine::FinishReason::Failed(why)) => return Err(why.into()),
            Update::Finished(_) => break,
        }
    }
    Ok(tokens)
}

fn report(tokens: &[Vec<u32>], wall: Duration, steps: &[StepRecord]) {
    let num_tokens: usize = tokens.iter().map(Vec::len).sum();
    println!("wall             {:.3} s", wall.as_secs_f64());
    println!(
        "tokens           {num_tokens}, {:.0} a second",
        num_tokens as f64 / wall.as_secs_f64()
    );
    let (Some(first), Some(last)) = (steps.first(), steps.last()) else { return };
    let device = last.compute.end.saturating_sub(first.compute.start);
    let busy: Duration =
        steps.iter().map(|step| step.compute.end.saturating_sub(step.compute.start)).sum();
    let fraction = busy.as_secs_f64() / device.as_secs_f64().max(f64::MIN_POSITIVE);
    println!("device busy      {:.3} % of {:.3} s", fraction * 100.0, device.as_secs_f64());
    let decode: Vec<&StepRecord> = steps.iter().filter(|s| s.num_tokens == s.num_rows).collect();
    let prefill = steps.len() - decode.len();
    let spent = steps.iter().filter(|s| s.num_tokens > s.num_rows);
    let spent: Duration = spent.map(|s| s.compute.end.saturating_sub(s.compute.start)).sum();
    println!("prefill steps    {prefill}, {:.1} ms on the device", spent.as_secs_f64() * 1e3);
    println!("decode steps     {}", decode.len());
    for (i, quarter) in decode.chunks(decode.len().div_ceil(4).max(1)).enumerate() {
        let ms = |time: &dyn Fn(&StepRecord) -> Duration| {
            let mut all: Vec<f64> =
                quarter.iter().map(|step| time(step).as_secs_f64() * 1e3).collect();
            all.sort_by(f64::total_cmp);
            all[all.len() / 2]
        };
        let span = |s: &StepRecord| s.compute.end.saturating_sub(s.compute.start);
        let pace = quarter[quarter.len() - 1].compute.end.saturating_sub(quarter[0].compute.end);
        let pace = pace.as_secs_f64() * 1e3 / (quarter.len() - 1).max(1) as f64;
        println!(
            "quarter {}        {pace:.3} ms a step; medians: device {:.3}, plan {:.3}, \
             stage {:.3}, launch {:.3}, blocked {:.3}, collect {:.3}",
            i + 1,
            ms(&span),
            ms(&|s| s.plan.end - s.plan.start),
            ms(&|s| s.stage.end - s.stage.start),
            ms(&|s| s.launch.end - s.launch.start),
            ms(&|s| s.blocked.end - s.blocked.start),
            ms(&|s| s.collect.end - s.collect.start),
        );
    }
    let checksum = tokens
        .iter()
        .flatten()
        .fold(0u64, |sum, token| (sum ^ u64::from(*token)).wrapping_mul(0x0000_0100_0000_01b3));
    println!("tokens checksum  {checksum:016x}");
}
