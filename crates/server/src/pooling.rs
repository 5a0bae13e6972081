//! States of prompts instead of tokens.

use std::sync::Arc;

use futures_util::stream::{self, StreamExt, TryStreamExt};
use inflight_engine::{FinishReason, Pooling, RequestSpec, SinkClosed, TokenSink, Update};
use tokio::sync::oneshot;

use crate::error::{ApiError, Rename};
use crate::generation::{
    GenerationError, StartError, Submitted, check_priority, finish_of, put_on_account,
};
use crate::request::Service;
use crate::state::{Phase, ServerState};

/// Prompts of one request that the engine has at once: more would fill its queue.
const MAX_AT_ONCE: usize = 32;

/// The state after the last token of each prompt, or the mean of those after all of its tokens, as
/// it is before the output matrix.
///
/// # Errors
/// The first prompt that is invalid, is refused or fails; the others are aborted then.
pub(crate) async fn states(
    state: &ServerState,
    prompts: Vec<Vec<u32>>,
    service: &Service,
    rename: Rename,
) -> Result<Vec<Vec<f32>>, ApiError> {
    let pooling = state.config().pooling;
    // What is wrong is told before anything is computed.
    for prompt in &prompts {
        let checked = state.engine().limits().validate(spec(prompt.clone(), pooling, service));
        checked.map_err(|error| ApiError::from_start(error.into(), state, rename))?;
    }
    let one = |prompt| pool(state, spec(prompt, pooling, service), rename);
    stream::iter(prompts).map(one).buffered(MAX_AT_ONCE).try_collect().await
}

fn spec(prompt: Vec<u32>, pooling: Pooling, service: &Service) -> RequestSpec {
    RequestSpec {
        prompt,
        max_tokens: Some(1),
        pooling: Some(pooling),
        priority: service.priority,
        tenant: service.tenant.clone(),
        timeout: service.timeout,
        ..RequestSpec::default()
    }
}

async fn pool(
    state: &ServerState,
    mut spec: RequestSpec,
    rename: Rename,
) -> Result<Vec<f32>, ApiError> {
    put_on_account(state, &mut spec);
    check_priority(state, spec.priority)
        .map_err(|error| ApiError::from_start(error.into(), state, rename))?;
    let num_tokens = spec.prompt.len();
    let engine = state.engine();
    let refused = |error: StartError| ApiError::from_start(error, state, rename);
    let request = engine.limits().validate(spec).map_err(|error| refused(error.into()))?;
    let (sender, ended) = oneshot::channel();
    let sink = StateSink { state: None, ended: Some(sender) };
    let id = engine.submit(request, Box::new(sink)).map_err(|error| refused(error.into()))?;
    state.caller().spend_prompt(num_tokens);
    let mut submitted = Submitted { engine: Arc::clone(engine), id: Some(id) };
    let mut phase = state.watch_phase();
    let aborting = phase.wait_for(|phase| *phase == Phase::Aborting);
    let (pooled, reason) = tokio::select! {
        biased;
        ended = ended => ended.map_err(|_| ApiError::EngineStopped)?,
        _ = aborting => return Err(ApiError::ShuttingDown),
    };
    submitted.id = None;
    finish_of(reason, state)?;
    let none = || GenerationError::Failed("it told no state".to_owned());
    Ok(pooled.ok_or_else(none)?)
}

/// What the engine said when a request ended.
type Ended = (Option<Vec<f32>>, FinishReason);

/// The engine's end of a request for a state.
struct StateSink {
    state: Option<Vec<f32>>,
    ended: Option<oneshot::Sender<Ended>>,
}

impl TokenSink for StateSink {
    fn send(&mut self, update: Update) -> Result<(), SinkClosed> {
        let Update::Finished(reason) = update else { return Ok(()) };
        let ended = self.ended.take().ok_or(SinkClosed)?;
        ended.send((self.state.take(), reason)).map_err(|_| SinkClosed)
    }

    fn send_state(&mut self, state: Vec<f32>) -> Result<(), SinkClosed> {
        self.state = Some(state);
        Ok(())
    }
}
