//! One run: the real engine on a simulated device, from the first arrival to the last message.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use inflight_engine::{Engine, EngineError, EngineHandle, Record, RequestId, RequestLimits};
use inflight_model::{Decoder, DummyWeights, ModelConfig, Weights};

use super::client::Client;
use super::expected::{Sees, expected};
use super::requests::{Leaving, VOCAB_SIZE};
use super::scenario::Scenario;
use super::verdict::Verdict;
use crate::{CostModel, Gpu, SimBackend, SimConfig};

/// What a run that passed went through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Figures {
    pub num_requests: usize,
    pub num_steps: u64,
    pub num_tokens: u64,
    pub num_preemptions: u64,
    pub num_swaps: u64,
    /// Final messages by what they say.
    pub num_complete: u64,
    pub num_aborted: u64,
    pub num_lapsed: u64,
    pub num_failed: u64,
    /// Tokens that were found in the prefix cache, or shared with another output.
    pub num_shared: u64,
    /// Blocks of cold prefixes that came back from the host, and those of them of models with
    /// several layer groups.
    pub num_fetched: u64,
    pub num_fetched_of_groups: u64,
    /// Blocks of sinks whose keys were turned, and prompts that were cut.
    pub num_turns: u64,
    pub num_cuts: u64,
    /// Tokens that rows saw in another's table.
    pub num_cascaded: u64,
    /// Virtual time.
    pub took: Duration,
}

/// A run in which something did not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Repeats it.
    pub seed: u64,
    /// Steps before it was seen.
    pub num_steps: u64,
    /// What did not hold.
    pub violation: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, num_steps, violation } = self;
        writeln!(f, "seed {seed}, after {num_steps} steps: {violation}")?;
        write!(f, "  INFLIGHT_SIM_SEED={seed} cargo test -p inflight-sim --test seeds one_seed")
    }
}

/// May damage an engine.
pub type Saboteur<'a> = dyn FnMut(&mut Engine<SimBackend>) + 'a;

/// Bugs that are planted, to see that they are found.
#[derive(Default)]
pub struct Plants<'a> {
    /// May damage the engine after every step.
    pub after_step: Option<&'a mut Saboteur<'a>>,
    /// The final message of this request is lost.
    pub lost_final: Option<usize>,
    /// Gets what the scheduler was told and decided, whether the run passes or not.
    pub record: Option<&'a mut Option<Record>>,
}

/// Runs a scenario.
///
/// # Errors
/// The first thing that did not hold.
pub fn run(scenario: &Scenario) -> Result<Figures, Failure> {
    run_with(scenario, Plants::default())
}

/// The same with planted bugs.
///
/// # Errors
/// As [`run`].
pub fn run_with(scenario: &Scenario, plants: Plants<'_>) -> Result<Figures, Failure> {
    let mut num_steps = 0;
    let steps = &mut num_steps;
    let result = catch_unwind(AssertUnwindSafe(|| run_to_end(scenario, plants, steps)));
    let violation = match result {
        Ok(Ok(figures)) => return Ok(figures),
        Ok(Err(violation)) => violation,
        Err(panic) => format!("panicked: {}", message(panic.as_ref())),
    };
    Err(Failure { seed: scenario.seed, num_steps, violation })
}

fn message(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}

fn run_to_end(
    scenario: &Scenario,
    mut plants: Plants<'_>,
    num_steps: &mut u64,
) -> Result<Figures, String> {
    let backend = SimBackend::new(SimConfig {
        cost: CostModel::new(Gpu::of_rates(1e9, 1e12, 1e14)),
        checks: true,
        noise: scenario.noise,
        faults: scenario.faults,
        seed: scenario.seed,
    });
    let (engine, handle) = match start(scenario, &backend) {
        Ok(started) => started,
        Err(_) if scenario.faults.out_of_memory_at.is_some() => return Ok(Figures::default()),
        Err(_) if scenario.faults.lost_at.is_some() => return Ok(Figures::default()),
        Err(error) => return Err(format!("the engine does not start: {error}")),
    };
    let mut driver = Driver::new(scenario, backend, engine, handle, plants.lost_final);
    let result = driver.drive(&mut plants, num_steps);
    if let Some(record) = &mut plants.record {
        **record = Some(driver.engine.record());
    }
    match result? {
        Ended::Idle => driver.finish(),
        Ended::Lost(error) => driver.lose(&error),
    }
}

/// How a run came to its end.
enum Ended {
    /// All was served.
    Idle,
    /// The device was lost.
    Lost(EngineError),
}

/// The model: as little as there can be, with layers that look back on so many tokens.
fn model(windows: &[Option<usize>]) -> ModelConfig {
    let text = r#"{
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 32,
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1024, "rope_theta": 10000.0, "tie_word_embeddings": true,
        "sliding_window": null
    }"#;
    let model = ModelConfig::from_json("simulated", text);
    let model = model.expect("the text is part of this file");
    ModelConfig { num_layers: windows.len(), layer_windows: windows.to_vec(), ..model }
}

fn start(
    scenario: &Scenario,
    backend: &SimBackend,
) -> Result<(Engine<SimBackend>, EngineHandle), EngineError> {
    let config = model(&scenario.windows);
    assert_eq!(config.vocab_size, VOCAB_SIZE as usize);
    let weights = Weights::Dummy(DummyWeights { seed: 0 });
    let max_len = scenario.engine.max_model_len;
    let decoder = Decoder::load(backend, &config, &weights, max_len, &mut |_| {});
    let decoder = decoder.map_err(|error| match error {
        inflight_model::ModelError::Backend(error) => EngineError::Backend(error),
        other => panic!("made-up weights are whole: {other}"),
    })?;
    let (mut engine, handle) = Engine::new(backend.clone(), decoder, scenario.engine.clone())?;
    engine.set_policy(scenario.policy.clone())?;
    if scenario.checks_blocks {
        engine.check_blocks()?;
    }
    Ok((engine, handle))
}

/// A request that was handed over.
pub(super) struct Submitted {
    pub(super) id: RequestId,
    pub(super) client: Client,
    pub(super) at: Duration,
    pub(super) leaving: Option<Leaving>,
    pub(super) was_aborted: bool,
}

/// Whoever hands over requests, aborts them and looks at what comes.
struct Driver<'a> {
    scenario: &'a Scenario,
    backend: SimBackend,
    engine: Engine<SimBackend>,
    handle: EngineHandle,
    limits: RequestLimits,
    /// By place in the scenario; `None`: not come yet, or refused.
    submitted: Vec<Option<Submitted>>,
    next_request: usize,
    next_tuning: usize,
    /// Something was told to the engine that it has not seen.
    has_come: bool,
    lost_final: Option<usize>,
    verdict: Verdict,
}

impl<'a> Driver<'a> {
    fn new(
        scenario: &'a Scenario,
        backend: SimBackend,
        engine: Engine<SimBackend>,
        handle: EngineHandle,
        lost_final: Option<usize>,
    ) -> Self {
        Self {
            scenario,
            backend,
            engine,
            limits: *handle.limits(),
            handle,
            submitted: Vec::new(),
            next_request: 0,
            next_tuning: 0,
            has_come: false,
            lost_final,
            verdict: Verdict::new(scenario),
        }
    }

    fn now(&self) -> Duration {
        inflight_backend::Backend::clock(&self.backend).now()
    }

    /// Steps until there is nothing left to do.
    fn drive(&mut self, plants: &mut Plants<'_>, num_steps: &mut u64) -> Result<Ended, String> {
        loop {
            self.act();
            // Commands that have come are taken by a step, too.
            if self.engine.is_idle() && !self.has_come {
                if !self.skip_to_next() {
                    return Ok(Ended::Idle);
                }
                continue;
            }
            self.has_come = false;
            *num_steps += 1;
            if let Err(error) = self.engine.step() {
                return Ok(Ended::Lost(error));
            }
            if let Some(damage) = &mut plants.after_step {
                damage(&mut self.engine);
            }
            self.check_step(*num_steps)?;
        }
    }

    /// Does everything that is due.
    fn act(&mut self) {
        let now = self.now();
        while let Some((at, tuning)) = self.scenario.tunings.get(self.next_tuning)
            && *at <= now
        {
            self.handle.tune(tuning.clone());
            (self.next_tuning, self.has_come) = (self.next_tuning + 1, true);
        }
        while let Some(planned) = self.scenario.requests.get(self.next_request)
            && planned.at <= now
        {
            self.submit(self.next_request, now);
            (self.next_request, self.has_come) = (self.next_request + 1, true);
        }
        self.abort_due(now);
    }

    fn submit(&mut self, i: usize, now: Duration) {
        let planned = &self.scenario.requests[i];
        let leader = planned.leader.and_then(|leader| self.submitted[leader].as_ref());
        let mut spec = planned.spec.clone();
        spec.shares_prompt_of = leader.map(|leader| leader.id);
        let Ok(request) = self.limits.validate(spec.clone()) else {
            self.submitted.push(None);
            return;
        };
        let vanishes_after = match planned.leaving {
            Some(Leaving::VanishAtToken(count)) => Some(count),
            _ => None,
        };
        let windows = self.scenario.windows.clone();
        let sees = Sees { windows, block_size: self.limits.kv.block_size };
        let client = Client::new(expected(&spec, &self.limits, &sees), vanishes_after);
        if self.lost_final == Some(i) {
            client.lose_final();
        }
        // It came while the engine was at work: its time counts from then.
        let clock = inflight_backend::Backend::clock(&self.backend);
        clock.set(planned.at);
        let accepted = self.handle.submit(request, Box::new(client.clone()));
        clock.set(now);
        let id = accepted.expect("the queue has room for every request of a run");
        let (at, leaving, was_aborted) = (planned.at, planned.leaving, false);
        self.submitted.push(Some(Submitted { id, client, at, leaving, was_aborted }));
    }

    fn abort_due(&mut self, now: Duration) {
        for request in self.submitted.iter_mut().flatten() {
            let is_due = match request.leaving {
                Some(Leaving::AbortAfter(after)) => request.at + after <= now,
                Some(Leaving::AbortAtToken(count)) => request.client.received().num_tokens >= count,
                Some(Leaving::VanishAtToken(_)) | None => false,
            };
            if is_due && !request.was_aborted {
                self.handle.abort(request.id);
                (request.was_aborted, self.has_come) = (true, true);
            }
        }
    }

    /// Nothing is left to do now: time goes on to when there is. False if there will be nothing.
    fn skip_to_next(&self) -> bool {
        let arrival = self.scenario.requests.get(self.next_request).map(|request| request.at);
        let tuning = self.scenario.tunings.get(self.next_tuning).map(|(at, _)| *at);
        let Some(next) = arrival.into_iter().chain(tuning).min() else { return false };
        inflight_backend::Backend::clock(&self.backend).set(next.max(self.now()));
        true
    }

    fn check_step(&mut self, num_steps: u64) -> Result<(), String> {
        if let Some(violation) = self.backend.take_violations().into_iter().next() {
            return Err(violation);
        }
        let scheduler = self.engine.scheduler();
        scheduler.check_integrity()?;
        self.verdict.check_progress(scheduler, num_steps)?;
        self.verdict.check_clients(&self.submitted, false)
    }

    /// The device is lost, and every request must learn of it.
    fn lose(mut self, error: &EngineError) -> Result<Figures, String> {
        if self.scenario.faults.lost_at.is_none() {
            return Err(format!("the engine failed: {error}"));
        }
        self.engine.fail(error);
        // What was not taken from the inbox ends when the engine does.
        drop(self.engine);
        self.verdict.device_was_lost();
        self.verdict.check_clients(&self.submitted, true)?;
        Ok(self.verdict.figures(&self.submitted))
    }

    fn finish(self) -> Result<Figures, String> {
        self.verdict.check_clients(&self.submitted, true)?;
        self.verdict.check_idle(self.engine.scheduler(), &self.handle)?;
        let mut figures = self.verdict.figures(&self.submitted);
        figures.took = self.now();
        let usage = self.backend.usage();
        (figures.num_turns, figures.num_cuts) = (usage.num_turns, usage.num_cuts);
        figures.num_cascaded = usage.num_cascaded;
        figures.num_steps =
            self.handle.stats().num_steps.load(std::sync::atomic::Ordering::Relaxed);
        Ok(figures)
    }
}
