//! Files to a running engine: what `serve`, `run` and `chat` share.

use std::sync::Arc;
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result, anyhow};
use inflight_backend::{Backend, CpuBackend};
use inflight_engine::{Engine, EngineError, EngineHandle};
use inflight_model::{Decoder, ModelFiles};
use inflight_server::{EngineAlive, EngineClient};
use inflight_tokenizer::Tokenizer;

use crate::args::{EngineArgs, LoadFormat};
use crate::models::LocalModel;
use crate::progress::LoadingBar;
use crate::resolve::{Machine, Resolved, Workload, resolve};
use crate::summary::Summary;
use crate::text::load_tokenizer;
use crate::trace_file::TraceFile;

/// A model whose engine runs on a thread of its own.
pub(crate) struct Running {
    pub(crate) client: Arc<EngineClient>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) summary: Summary,
    thread: JoinHandle<Result<(), EngineError>>,
    trace: Option<TraceFile>,
}

/// Loads a model and starts its engine.
pub(crate) fn start(model: &LocalModel, args: &EngineArgs, workload: Workload) -> Result<Running> {
    let trace = args.trace_file.as_deref().map(TraceFile::create).transpose()?;
    let files = match args.load_format {
        LoadFormat::Auto => ModelFiles::open(&model.path)?,
        LoadFormat::Dummy => ModelFiles::dummy(&model.path, args.seed)?,
    };
    let resolved = resolve(args, workload, &files.config, Machine::detect())?;
    let tokenizer = Arc::new(load_tokenizer(&files)?);
    let backend = CpuBackend::new(resolved.cpu.clone())?;
    let decoder = load(&backend, &files, &resolved, args.no_progress)?;
    let matrix_bytes = decoder.matrix_bytes(&backend);
    let summary = Summary::new(&model.name, &files.config, &resolved, matrix_bytes)?;

    let (mut engine, handle) = Engine::new(backend, decoder, resolved.engine)?;
    let trace = trace.map(|(file, records)| {
        engine.trace_to(records);
        file
    });
    let (client, alive) = EngineClient::new(handle);
    let thread = spawn(engine, alive)?;
    Ok(Running { client: Arc::new(client), tokenizer, summary, thread, trace })
}

fn load<B: Backend>(
    backend: &B,
    files: &ModelFiles,
    resolved: &Resolved,
    no_progress: bool,
) -> Result<Decoder<B>> {
    let bar = LoadingBar::new(no_progress);
    let max_model_len = resolved.engine.max_model_len;
    let mut show = |progress| bar.show(progress);
    let decoder = Decoder::load(backend, &files.config, &files.weights, max_model_len, &mut show)?;
    bar.finish();
    Ok(decoder)
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
