//! One engine on one simulated GPU serves a load.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use inflight_backend::{Backend, Clock};
use inflight_engine::{
    Engine, EngineConfig, EngineError, EngineHandle, FinishReason, InvalidRequest, Policy,
    RequestSpec, SinkClosed, SubmitError, Tenant, TokenSink, Update,
};
use inflight_model::{Decoder, ModelConfig, ModelError, Weights};

use super::report::PlanReport;
use super::workload::Arrival;
use crate::{CostModel, Faults, SimBackend, SimConfig};

/// What is planned for.
pub struct Planned<'a> {
    /// The model.
    pub model: &'a ModelConfig,
    /// Its weights, of which only sizes are looked at.
    pub weights: &'a Weights,
    /// The device.
    pub cost: CostModel,
    /// The engine.
    pub engine: EngineConfig,
    /// What decides beside its limits.
    pub policy: Policy,
    /// Operators take up to this share longer than they should, at random.
    pub noise: f64,
    /// Keys that.
    pub seed: u64,
}

/// Why something cannot be simulated.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The model's files are not as they should be.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The engine cannot be.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A request cannot be served by this engine.
    #[error("a request of the workload: {0}")]
    Request(#[from] InvalidRequest),
    /// The engine takes no more.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// A request did not end by its length.
    #[error("a request of the workload ended by {0:?}")]
    Ended(FinishReason),
}

/// When a request came and when each of its tokens did, in seconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Served {
    /// Its arrival.
    pub at_s: f64,
    /// Its tokens.
    pub tokens_s: Vec<f64>,
}

/// Serves all `arrivals`, which must be in order.
///
/// # Errors
/// [`PlanError`].
pub fn simulate(
    planned: &Planned<'_>,
    arrivals: &[Arrival],
) -> Result<(PlanReport, Vec<Served>), PlanError> {
    let backend = SimBackend::new(SimConfig {
        cost: planned.cost,
        checks: false,
        noise: planned.noise,
        faults: Faults::default(),
        seed: planned.seed,
    });
    let max_len = planned.engine.max_model_len;
    let decoder = Decoder::load(&backend, planned.model, planned.weights, max_len, &mut |_| {})?;
    let (mut engine, handle) = Engine::new(backend.clone(), decoder, planned.engine.clone())?;
    engine.set_policy(planned.policy.clone()).map_err(EngineError::from)?;
    let clock = backend.clock();
    let start = clock.now();
    let before = backend.usage();
    let mut clients = Vec::with_capacity(arrivals.len());
    let mut coming = arrivals.iter().enumerate().peekable();
    loop {
        let now = clock.now();
        while let Some((i, arrival)) = coming.next_if(|(_, arrival)| start + at(arrival) <= now) {
            clock.set(start + at(arrival));
            clients.push(submit(&handle, &clock, start, (i, arrival))?);
            clock.set(now);
        }
        let has_work = !engine.is_idle() || handle.num_outstanding() > 0;
        match coming.peek() {
            _ if has_work => engine.step()?,
            Some((_, next)) => clock.set(start + at(next)),
            None => break,
        }
    }
    let mut all = Vec::with_capacity(clients.len());
    for client in clients {
        all.push(client.served()?);
    }
    let usage = backend.usage();
    let busy = usage.busy - before.busy;
    let report = PlanReport::new(arrivals, &all, busy, handle.stats());
    Ok((report, all))
}

fn at(arrival: &Arrival) -> Duration {
    Duration::from_secs_f64(arrival.at_s)
}

fn submit(
    handle: &EngineHandle,
    clock: &Clock,
    start: Duration,
    (i, arrival): (usize, &Arrival),
) -> Result<Stopwatch, PlanError> {
    let vocab_size = handle.limits().vocab_size as u64;
    // No two prompts begin alike.
    let token = |position: usize| {
        (crate::random::mix((i as u64) << 32 | position as u64) % vocab_size) as u32
    };
    let request = handle.limits().validate(RequestSpec {
        prompt: (0..arrival.prompt_len).map(token).collect(),
        max_tokens: Some(arrival.output_len),
        tenant: Tenant::named(&arrival.tenant.to_string()),
        ..RequestSpec::default()
    })?;
    let served = Served { at_s: arrival.at_s, tokens_s: Vec::with_capacity(arrival.output_len) };
    let seen = Arc::new(Mutex::new(Seen { served, finish: None }));
    let client = Stopwatch { clock: clock.clone(), start, seen };
    handle.submit(request, Box::new(client.clone()))?;
    Ok(client)
}

/// Writes down when tokens come.
#[derive(Clone)]
struct Stopwatch {
    clock: Clock,
    start: Duration,
    seen: Arc<Mutex<Seen>>,
}

struct Seen {
    served: Served,
    finish: Option<FinishReason>,
}

impl Stopwatch {
    fn served(self) -> Result<Served, PlanError> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        match seen.finish.take() {
            Some(FinishReason::Length) => Ok(std::mem::take(&mut seen.served)),
            Some(other) => Err(PlanError::Ended(other)),
            None => Err(PlanError::Ended(FinishReason::Failed("nothing".to_owned()))),
        }
    }
}

impl TokenSink for Stopwatch {
    fn send(&mut self, update: Update) -> Result<(), SinkClosed> {
        let now = self.clock.now().saturating_sub(self.start).as_secs_f64();
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        match update {
            Update::Prompt(_) => {}
            Update::Token(_) => seen.served.tokens_s.push(now),
            Update::Finished(reason) => seen.finish = Some(reason),
        }
        Ok(())
    }
}
