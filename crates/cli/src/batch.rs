//! `inflight batch`: answer a file of requests.

use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use inflight_server::{BatchProgress, BatchRun, ServerConfig, ServerState};

use crate::args::{BatchArgs, OrderChoice, ReasoningParser, Switch};
use crate::models::ModelArgument;
use crate::pooling::resolve_pooling;
use crate::progress::{LineBar, is_watched};
use crate::resolve::Workload;
use crate::serve::tool_format;
use crate::signals::shutdown_requested;
use crate::start::{Running, start};

/// Lines that are being answered at a time: enough to fill any batch.
const MAX_AT_ONCE: usize = 1024;
/// Places in the engine's queue: those lines may have several outputs each.
const MAX_QUEUE: usize = 32 * MAX_AT_ONCE;

pub(crate) fn batch(args: &BatchArgs) -> Result<()> {
    // Before the model is loaded: a wrong name should not cost minutes.
    ensure!(args.input.is_file(), "{}: there is no such file", args.input.display());
    let is_watched = is_watched(args.engine.no_progress);
    let model = ModelArgument::parse(&args.model)?.fetch(is_watched)?;
    let workload = Workload::serving(MAX_QUEUE, args.steps.overlap == Switch::On);
    let running = start(&model, &args.engine, &args.steps, &args.policy, workload)?;
    let mut config = ServerConfig::new(model.name);
    if !args.served_model_name.is_empty() {
        config.model_names.clone_from(&args.served_model_name);
    }
    config.pooling = resolve_pooling(args.pooling, &model.path)?;
    config.tool_format = tool_format(args.tool_call_parser);
    config.splits_reasoning = args.reasoning_parser == ReasoningParser::Auto;
    config.limits_queue_time = args.policy.max_queue_time_ms.is_some();
    config.orders_by_priority = args.policy.scheduling_policy == OrderChoice::Priority;

    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let answered = runtime.block_on(answer_all(args, &running, config));
    // Requests whose answers nobody waits for are aborted.
    runtime.shutdown_background();
    answered.and(running.stop())
}

async fn answer_all(args: &BatchArgs, running: &Running, config: ServerConfig) -> Result<()> {
    let client = Arc::clone(&running.client);
    let state = ServerState::new(client, Arc::clone(&running.tokenizer), config);
    let run = BatchRun::open(&state, &args.input, &args.output, MAX_AT_ONCE)?;
    let BatchProgress { num_lines, num_found, .. } = run.progress();
    let bar = LineBar::new(num_lines, num_found, args.engine.no_progress);
    let (signal, again) = (shutdown_requested()?, "the same command goes on from here");
    let ended = tokio::select! {
        ended = run.run(|progress| bar.show(progress.num_answered, progress.num_failed)) => ended,
        () = signal => bail!("interrupted; {again}"),
    };
    bar.finish();
    let BatchProgress { num_answered, num_failed, .. } =
        ended.with_context(|| format!("the batch is not complete; {again}"))?;
    let num_new = num_answered - num_found;
    eprintln!(
        "{num_new} lines answered, {num_failed} of them with errors; {num_found} were before"
    );
    Ok(())
}
