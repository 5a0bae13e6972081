//! Files to a running engine.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result, anyhow};
use inflight_backend::Backend;
use inflight_bench::BuiltInConfig;
use inflight_engine::{Engine, EngineError, EngineHandle, StepRecord};
use inflight_model::{ModelConfig, ModelFiles};
use inflight_observe::StepRecorder;
use inflight_server::{EngineAlive, EngineClient, KvCapacity};
use inflight_tokenizer::Tokenizer;

use crate::args::{EngineArgs, LoadFormat, PolicyArgs, Quantization, StepArgs};
use crate::assembly::{Assembled, Model, UseEngine, with_engine};
use crate::device::choose;
use crate::models::{LocalModel, ModelArgument};
use crate::policy::resolve_policy;
use crate::progress::is_watched;
use crate::replay::keep_record_of_failure;
use crate::resolve::{Workload, resolve_gpu_use};
use crate::summary::Summary;
use crate::text::load_tokenizer;
use crate::trace_file::TraceFile;

/// A model whose engine runs on a thread of its own.
pub(crate) struct Running {
    pub(crate) client: Arc<EngineClient>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) summary: Summary,
    pub(crate) kv_capacities: Vec<KvCapacity>,
    thread: JoinHandle<Result<(), EngineError>>,
    trace: Option<TraceFile>,
}

/// Loads a model and starts its engine.
pub(crate) fn start(
    model: &LocalModel,
    args: &EngineArgs,
    steps: &StepArgs,
    policy: &PolicyArgs,
    workload: Workload,
) -> Result<Running> {
    let trace = steps.trace_file.as_deref().map(TraceFile::create).transpose()?;
    let files = quantized(open(model, args)?, args);
    let tokenizer = Arc::new(load_tokenizer(&files)?);
    let device = choose(args.device, resolve_gpu_use(args))?;
    let model = Model { name: &model.name, path: Some(&model.path), files: &files };
    with_engine(&device, &model, args, workload, Start { tokenizer, policy, trace })
}

/// A model's configuration and weights, or made-up weights.
pub(crate) fn open(model: &LocalModel, args: &EngineArgs) -> Result<ModelFiles> {
    Ok(match args.load_format {
        LoadFormat::Auto => ModelFiles::open(&model.path)?,
        LoadFormat::Dummy => ModelFiles::dummy(&model.path, args.seed)?,
    })
}

/// The configuration of a model of which only the sizes count: its weights stay on disk.
pub(crate) fn sizes_of(
    config: Option<BuiltInConfig>,
    model: &str,
    no_progress: bool,
) -> Result<ModelConfig> {
    if let Some(config) = config {
        return Ok(config.dummy(0)?.config);
    }
    let model = ModelArgument::parse(model)?.fetch(is_watched(no_progress))?;
    Ok(ModelFiles::open(&model.path)?.config)
}

/// `files` as `--quantization` wants them.
pub(crate) fn quantized(mut files: ModelFiles, args: &EngineArgs) -> ModelFiles {
    if let Some(quantization) = args.quantization {
        files.round_to_fp8(quantization == Quantization::Fp8All);
    }
    files
}

/// Gives an engine a thread and takes its records.
struct Start<'a> {
    tokenizer: Arc<Tokenizer>,
    policy: &'a PolicyArgs,
    trace: Option<(TraceFile, SyncSender<StepRecord>)>,
}

impl UseEngine for Start<'_> {
    type Output = Running;

    fn use_engine<B: Backend>(self, assembled: Assembled<B>) -> Result<Running> {
        let Assembled { mut engine, handle, config, summary, kv_capacities, .. } = assembled;
        engine.set_policy(resolve_policy(self.policy, config.max_num_seqs)?)?;
        engine.on_failure(keep_record_of_failure());
        let trace = self.trace.map(|(file, records)| {
            engine.trace_to(records);
            file
        });
        let (recorder, records) = StepRecorder::start().context("no thread for the recorder")?;
        engine.trace_to(records);
        let (client, alive) = EngineClient::new(handle);
        let client = client.recorded_by(recorder);
        let thread = spawn(engine, alive)?;
        let (client, tokenizer) = (Arc::new(client), self.tokenizer);
        Ok(Running { client, tokenizer, summary, kv_capacities, thread, trace })
    }
}

fn spawn<B: Backend>(
    engine: Engine<B>,
    alive: EngineAlive,
) -> Result<JoinHandle<Result<(), EngineError>>> {
    let run = move || {
        // Dropped when the engine ends, also by a panic.
        let _alive = alive;
        engine.run()
    };
    thread::Builder::new().name("engine".to_owned()).spawn(run).context("no thread for the engine")
}

impl Running {
    pub(crate) fn handle(&self) -> &EngineHandle {
        self.client.handle()
    }

    /// Lets the engine serve what it has accepted and waits for its end.
    ///
    /// # Errors
    /// The engine had ended by itself: its device was lost.
    pub(crate) fn stop(self) -> Result<()> {
        self.handle().drain();
        let ended = self.thread.join().map_err(|_| anyhow!("the engine panicked"))?;
        if let Some(trace) = self.trace {
            trace.finish()?;
        }
        ended.context("the engine failed")
    }
}
