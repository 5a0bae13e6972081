//! What is behind a simulated device: streams, time, memory, and the checks on their use.
//!
//! An operation's time is known when it is enqueued, since all that it waits for was enqueued
//! before; so its effect is computed at once, too. That order is one that events allow. That they
//! enforce it is checked apart, by [`Order`].

use std::time::Duration;

use inflight_backend::{BackendError, Clock, StepShape};

use super::memory::Memory;
use super::order::{HOST, Order, Past, Race, Uses};
use super::step::Step;
use super::{Faults, Wait};
use crate::CostModel;
use crate::random::Random;

/// What is simulated.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// What operators cost.
    pub cost: CostModel,
    /// Whether tokens depend on what memory holds, and all uses of memory are checked. Costs time
    /// in proportion to contexts: for small models.
    pub checks: bool,
    /// Operators take up to this share longer than they should.
    pub noise: f64,
    /// What goes wrong.
    pub faults: Faults,
    /// Keys noise and faults.
    pub seed: u64,
}

impl SimConfig {
    /// A device that does what it should, and no more is looked at.
    #[must_use]
    pub fn quiet(cost: CostModel) -> Self {
        Self { cost, checks: false, noise: 0.0, faults: Faults::default(), seed: 0 }
    }
}

/// How busy the device was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Time in which the compute stream had something to run.
    pub busy: Duration,
    /// Operations of all streams.
    pub num_operations: u64,
    /// Blocks that were copied with keys turned to other positions, if that is checked.
    pub num_turns: u64,
    /// Layers of prompts that were cut, if that is checked.
    pub num_cuts: u64,
    /// Tokens that rows saw in another's table, since they share a prefix, in all layers; likewise.
    pub num_cascaded: u64,
}

/// A stream: when it is done with all that was enqueued.
#[derive(Clone, Copy, Debug)]
pub struct SimStream {
    pub(super) thread: usize,
}

/// Index of an event.
#[derive(Clone, Copy, Debug)]
pub struct SimEvent(pub(super) usize);

/// An event as last recorded.
#[derive(Clone, Copy, Debug, Default)]
struct Recorded {
    at_ns: u64,
    past: Past,
}

pub(super) const COMPUTE: usize = 2;
const STREAMS: [&str; 3] = ["h2d", "compute", "d2h"];

/// The device.
#[derive(Debug)]
pub(super) struct State {
    pub(super) config: SimConfig,
    pub(super) clock: Clock,
    order: Option<Order>,
    /// By thread; the host's is not used.
    done_ns: [u64; 4],
    events: Vec<Recorded>,
    pub(super) memories: Vec<Memory>,
    pub(super) step: Step,
    /// By state slot: the sum of counted tokens.
    pub(super) counts: Vec<u64>,
    /// By row of the present step: what it saw of keys and values in all layers so far.
    pub(super) contexts: Vec<u64>,
    /// By block: the row of the present step that writes to it.
    pub(super) writers: Vec<(u32, usize)>,
    /// By layer group: the memory of its context lengths, which tells it from others.
    pub(super) group_ids: Vec<usize>,
    random: Random,
    pub(super) usage: Usage,
    slow_step: f64,
    /// The present step is launched as a graph.
    pub(super) is_graph: bool,
    /// A forward pass was enqueued and no draw.
    is_computing: bool,
    has_copied_outputs: bool,
    lost: Option<String>,
    pub(super) violations: Vec<String>,
}

impl State {
    pub(super) fn new(config: SimConfig, clock: Clock) -> Self {
        Self {
            order: config.checks.then(Order::default),
            random: Random::new(config.seed),
            config,
            clock,
            done_ns: [0; 4],
            events: Vec::new(),
            memories: Vec::new(),
            step: Step::default(),
            counts: Vec::new(),
            contexts: Vec::new(),
            writers: Vec::new(),
            group_ids: Vec::new(),
            usage: Usage::default(),
            slow_step: 1.0,
            is_graph: false,
            is_computing: false,
            has_copied_outputs: false,
            lost: None,
            violations: Vec::new(),
        }
    }

    pub(super) fn usage(&self) -> Usage {
        self.usage
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.clock.now().as_nanos()).expect("a simulation ends within centuries")
    }

    /// The host takes its time.
    pub(super) fn host_works(&self, seconds: f64) {
        self.clock.set(self.clock.now() + Duration::from_secs_f64(seconds));
    }

    /// Memory for `label`.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`], if that is what is to happen.
    pub(super) fn allocate(&mut self, label: &'static str, len: usize) -> Done<usize> {
        if self.config.faults.out_of_memory_at == Some(self.memories.len()) {
            let (device, what) = ("simulated", label.to_owned());
            return Err(BackendError::OutOfMemory { device, what, bytes: len });
        }
        self.memories.push(Memory::new(label));
        Ok(self.memories.len() - 1)
    }

    pub(super) fn stream(&self, name: &str) -> SimStream {
        let index = STREAMS.iter().position(|known| *known == name);
        SimStream { thread: 1 + index.expect("the engine has three streams") }
    }

    pub(super) fn new_event(&mut self) -> SimEvent {
        self.events.push(Recorded::default());
        SimEvent(self.events.len() - 1)
    }

    /// A new step is enqueued: it may be a slow one. Those of decodes alone are graphs.
    pub(super) fn begin_step(&mut self, shape: StepShape) {
        self.is_computing = true;
        self.is_graph = shape.num_tokens == shape.num_rows;
        let host = self.config.cost.gpu.host;
        let launch_s = if self.is_graph { host.graph_s } else { 0.0 };
        self.host_works(host.step_s + host.row_s * shape.num_rows as f64 + launch_s);
        let is_slow = self.random.any() % 1000 < self.config.faults.slow_per_mille;
        self.slow_step = if is_slow { 50.0 } else { 1.0 };
    }

    /// Enqueues an operation that takes so many seconds.
    ///
    /// # Errors
    /// The device is lost.
    pub(super) fn operate(&mut self, stream: SimStream, seconds: f64) -> Done<()> {
        let thread = stream.thread;
        self.check_lost()?;
        self.usage.num_operations += 1;
        if self.config.faults.lost_at == Some(self.usage.num_operations) {
            self.lost = Some("a fault of the simulation".to_owned());
            return self.check_lost();
        }
        let noise = 1.0 + self.config.noise * self.random.uniform();
        let ns = (seconds * noise * self.slow_step * 1e9).round() as u64;
        let start_ns = self.done_ns[thread].max(self.now_ns());
        self.done_ns[thread] = start_ns + ns;
        if thread == COMPUTE {
            self.usage.busy += Duration::from_nanos(ns);
        }
        if let Some(order) = &mut self.order {
            order.begin(thread);
        }
        Ok(())
    }

    fn check_lost(&self) -> Done<()> {
        self.lost.clone().map_or(Ok(()), |reason| Err(BackendError::DeviceLost(reason)))
    }

    pub(super) fn record(&mut self, event: SimEvent, stream: SimStream) -> Done<()> {
        self.check_lost()?;
        let past = self.order.as_ref().map(|order| order.past(stream.thread));
        let at_ns = self.done_ns[stream.thread].max(self.now_ns());
        self.events[event.0] = Recorded { at_ns, past: past.unwrap_or_default() };
        if stream.thread == COMPUTE {
            self.has_copied_outputs = false;
        }
        Ok(())
    }

    pub(super) fn wait(&mut self, event: SimEvent, stream: SimStream) -> Done<()> {
        self.check_lost()?;
        let wait = match (STREAMS[stream.thread - 1], self.is_computing) {
            ("h2d", _) => Wait::H2dForCompute,
            ("d2h", _) if self.has_copied_outputs => Wait::D2hForSwapIn,
            ("d2h", _) => Wait::D2hForCompute,
            (_, false) => Wait::ComputeForH2d,
            (_, true) => Wait::ComputeForLate,
        };
        self.is_computing &= wait != Wait::D2hForCompute;
        if self.config.faults.skipped_wait == Some(wait) {
            return Ok(());
        }
        let Recorded { at_ns, past } = self.events[event.0];
        let done = &mut self.done_ns[stream.thread];
        *done = (*done).max(at_ns);
        if let Some(order) = &mut self.order {
            order.join(stream.thread, &past);
        }
        Ok(())
    }

    pub(super) fn synchronize(&mut self, event: SimEvent) -> Done<()> {
        self.check_lost()?;
        let Recorded { at_ns, past } = self.events[event.0];
        self.clock.set(self.clock.now().max(Duration::from_nanos(at_ns)));
        if self.config.faults.skipped_wait != Some(Wait::HostForD2h)
            && let Some(order) = &mut self.order
        {
            order.join(HOST, &past);
        }
        Ok(())
    }

    pub(super) fn elapsed(&self, earlier: SimEvent, later: SimEvent) -> Duration {
        let [earlier, later] = [earlier, later].map(|event| self.events[event.0].at_ns);
        Duration::from_nanos(later.saturating_sub(earlier))
    }

    /// Notes where in a step the d2h stream is, to tell waits apart.
    pub(super) fn copied_outputs(&mut self) {
        self.has_copied_outputs = true;
    }

    // --- checks ---

    /// The host begins to use memory.
    pub(super) fn host_begins(&mut self) {
        if let Some(order) = &mut self.order {
            order.begin(HOST);
        }
    }

    pub(super) fn reads(&mut self, thread: usize, memory: usize) {
        self.check(memory, |order, memory| order.read(thread, &mut memory.uses));
    }

    pub(super) fn writes(&mut self, thread: usize, memory: usize) {
        self.check(memory, |order, memory| order.write(thread, &mut memory.uses));
    }

    pub(super) fn reads_block(&mut self, thread: usize, memory: usize, block: u32) {
        self.check_block(memory, block, |order, uses| order.read(thread, uses));
    }

    pub(super) fn writes_block(&mut self, thread: usize, memory: usize, block: u32) {
        self.check_block(memory, block, |order, uses| order.write(thread, uses));
    }

    fn check(&mut self, id: usize, check: impl FnOnce(&Order, &mut Memory) -> Result<(), Race>) {
        let Some(order) = &self.order else { return };
        let memory = &mut self.memories[id];
        if let Err(race) = check(order, memory) {
            let message = format!("{}: {}", memory.label, describe(race));
            self.violations.push(message);
        }
    }

    fn check_block(
        &mut self,
        id: usize,
        block: u32,
        check: impl FnOnce(&Order, &mut Uses) -> Result<(), Race>,
    ) {
        let Some(order) = &self.order else { return };
        let memory = &mut self.memories[id];
        let uses = &mut memory.block_mut(block as usize).uses;
        if let Err(race) = check(order, uses) {
            let message = format!("block {block} of {}: {}", memory.label, describe(race));
            self.violations.push(message);
        }
    }
}

/// What operations of a device give.
pub(super) type Done<T> = Result<T, BackendError>;

fn describe(race: Race) -> String {
    let Race { thread, does, other, other_does } = race;
    format!("{thread} {does} while {other} still {other_does}: no event orders the two")
}
