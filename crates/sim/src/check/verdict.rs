//! What must hold in a run besides the scheduler's own books and the order of uses of memory.

use inflight_engine::{EngineConfig, EngineHandle, FinishReason};
use inflight_scheduler::{Batching, Mixing, Order, Policy, Scheduler, SequenceId, SequenceView};

use super::requests::Leaving;
use super::run::{Figures, Submitted};
use super::scenario::Scenario;

/// Looks at a run from outside.
pub(super) struct Verdict {
    /// Most steps that the run may take.
    tokens: u64,
    max_model_len: u64,
    /// Steps that move all blocks of the longest sequence away and back.
    moving: u64,
    may_lapse: bool,
    changes_policy: bool,
    /// The oldest sequence, how far it is, and since which step.
    oldest: Option<(SequenceId, usize, usize, u64)>,
    device_lost: bool,
    preemptions: (u64, u64),
    num_fetched: u64,
    has_groups: bool,
}

/// Steps in which the oldest sequence may stand still besides those that move all its blocks away
/// and back. One that waits for a prefix may be overtaken, and then waits for whoever did so.
const MOST_STEPS_STILL: u64 = 48;

/// Steps after which those that give way to each other will never end.
const MOST_STEPS: u64 = 100_000;

impl Verdict {
    pub(super) fn new(scenario: &Scenario) -> Self {
        let len = |spec: &inflight_engine::RequestSpec| {
            spec.prompt.len() + spec.max_tokens.unwrap_or(scenario.engine.max_model_len)
        };
        let EngineConfig { max_model_len, block_size, ref memory, .. } = scenario.engine;
        let most_blocks = max_model_len.div_ceil(block_size) * scenario.windows.len();
        let moving = 2 * most_blocks.div_ceil(memory.max_moved_blocks);
        let tokens: usize = scenario.requests.iter().map(|request| len(&request.spec)).sum();
        let mut policies = scenario.tunings.iter().map(|(_, tuning)| &tuning.policy);
        let queue_limit = scenario.policy.max_queue_time.is_some()
            || policies.any(|policy| policy.max_queue_time.is_some());
        let timeout = scenario.requests.iter().any(|request| request.spec.timeout.is_some());
        Self {
            tokens: tokens as u64,
            max_model_len: scenario.engine.max_model_len as u64,
            moving: moving as u64,
            may_lapse: queue_limit || timeout,
            changes_policy: !scenario.tunings.is_empty(),
            oldest: None,
            device_lost: false,
            preemptions: (0, 0),
            num_fetched: 0,
            has_groups: scenario.windows.iter().any(|window| *window != scenario.windows[0]),
        }
    }

    pub(super) fn device_was_lost(&mut self) {
        self.device_lost = true;
    }

    /// Nobody waits for ever: the run ends, and the oldest gets on where it is to go first.
    pub(super) fn check_progress(
        &mut self,
        scheduler: &Scheduler,
        num_steps: u64,
    ) -> Result<(), String> {
        self.preemptions = (scheduler.num_preemptions(), scheduler.num_swaps());
        self.num_fetched = scheduler.host_prefixes().num_fetched;
        let again = self.preemptions.0 * self.max_model_len;
        if num_steps > (200 + 8 * self.tokens + 2 * again).min(MOST_STEPS) {
            return Err(format!("{num_steps} steps for {} tokens: no end in sight", self.tokens));
        }
        let first = scheduler.view().into_iter().next();
        // After a change of policy the oldest may have to wait for a place.
        let is_due = |first: &SequenceView| first.is_running || !self.changes_policy;
        let by_arrival = goes_by_arrival(scheduler.policy());
        let Some(first) = first.filter(|first| by_arrival && is_due(first)) else {
            self.oldest = None;
            return Ok(());
        };
        let (id, len, num_computed) = (first.id, first.len, first.num_computed);
        match self.oldest {
            Some((same, .., since)) if self.oldest == Some((same, len, num_computed, since)) => {
                let overtaken = if first.is_running { 0 } else { self.max_model_len };
                if num_steps - since > MOST_STEPS_STILL + self.moving + overtaken {
                    return Err(format!("sequence {id} is the oldest and starves"));
                }
            }
            _ => self.oldest = Some((id, len, num_computed, num_steps)),
        }
        Ok(())
    }

    /// Every client got what it should so far; `at_end`: and its one final message.
    pub(super) fn check_clients(
        &self,
        submitted: &[Option<Submitted>],
        at_end: bool,
    ) -> Result<(), String> {
        for (i, request) in submitted.iter().enumerate() {
            let Some(request) = request else { continue };
            let received = request.client.received();
            if let Some(violation) = &received.violation {
                return Err(format!("request {i}: {violation}"));
            }
            let Some(finish) = &received.finish else {
                if at_end {
                    return Err(format!("request {i} has no final message"));
                }
                continue;
            };
            let may_end_so = match finish {
                FinishReason::Stop { .. } | FinishReason::Length => true,
                FinishReason::Aborted => {
                    let vanishes = matches!(request.leaving, Some(Leaving::VanishAtToken(_)));
                    request.was_aborted || vanishes
                }
                FinishReason::Lapsed(_) => self.may_lapse,
                FinishReason::Failed(_) => self.device_lost,
            };
            if !may_end_so {
                return Err(format!("request {i} ended by {finish:?} for no reason"));
            }
        }
        Ok(())
    }

    /// When all has ended nothing is held any more.
    pub(super) fn check_idle(
        &self,
        scheduler: &Scheduler,
        handle: &EngineHandle,
    ) -> Result<(), String> {
        let config = scheduler.config();
        let free = (scheduler.num_free_blocks(), scheduler.num_free_swap_blocks());
        let all = (config.num_blocks, config.memory.num_swap_blocks);
        if free != all {
            return Err(format!("at the end {free:?} blocks are free, not {all:?}"));
        }
        match handle.num_outstanding() {
            0 => Ok(()),
            count => Err(format!("at the end {count} places of the queue are taken")),
        }
    }

    pub(super) fn figures(&self, submitted: &[Option<Submitted>]) -> Figures {
        let (num_preemptions, num_swaps) = self.preemptions;
        let num_fetched = self.num_fetched;
        let num_fetched_of_groups = if self.has_groups { num_fetched } else { 0 };
        let mut figures = Figures {
            num_preemptions,
            num_swaps,
            num_fetched,
            num_fetched_of_groups,
            ..Figures::default()
        };
        for request in submitted.iter().flatten() {
            let received = request.client.received();
            figures.num_requests += 1;
            figures.num_tokens += received.num_tokens as u64;
            match received.finish {
                Some(FinishReason::Stop { .. } | FinishReason::Length) => figures.num_complete += 1,
                Some(FinishReason::Aborted) => figures.num_aborted += 1,
                Some(FinishReason::Lapsed(_)) => figures.num_lapsed += 1,
                Some(FinishReason::Failed(_)) => figures.num_failed += 1,
                None => {}
            }
            figures.num_shared += received.num_shared as u64;
        }
        figures
    }
}

/// Whether the oldest sequence goes first in everything.
fn goes_by_arrival(policy: &Policy) -> bool {
    policy.order == Order::Fcfs
        && policy.batching == Batching::Continuous
        && policy.mixing == Mixing::Chunked
        && policy.targets.itl.is_none()
        && policy.gate.waiting_served_ratio == 0.0
}
