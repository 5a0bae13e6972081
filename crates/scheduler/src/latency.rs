//! How many prompt tokens and rows a step may have, so that latencies stay within their targets.

use std::time::Duration;

use crate::batch::Batch;
use crate::step_model::{StepLoad, StepModel};

/// Prompt tokens come in multiples of this, and so many are always allowed: prompts never starve.
const QUANTUM: usize = 16;
/// Prompt tokens beside decodes while nothing is known of the device.
const COLD_LIMIT: usize = 4 * QUANTUM;
/// A limit is raised only by more than this factor, and only when so many plans in a row wanted it.
const RAISE_FACTOR: f64 = 1.125;
const RAISE_AFTER: u32 = 4;
/// Rows are held back at the target, and let in again below this part of it.
const REOPEN: f64 = 0.97;
/// A target below what one row alone takes cannot be met. This multiple of it is aimed at then.
const LEAST_TARGET: f64 = 1.25;
/// A step with a chunk that cannot keep the target is made worth it: it may take this multiple of
/// what the smallest chunk takes.
const WORTHWHILE: f64 = 2.0;
/// Steps without prompts after which one with a prompt is due, whatever the target.
const MOST_STEPS_WITHOUT: u32 = 100;
/// Time that steps have saved or overdrawn is remembered up to this multiple of the target.
const MOST_CREDIT: f64 = 50.0;
/// Weight of the newest step in the mean time of steps.
const NEWEST: f64 = 0.1;

/// The controller: a model of steps and what it allowed last. Lowers its limits at once and raises
/// them late, so that noise does not make them flap.
///
/// Where no step with a prompt can keep the target, because having a chunk costs that much, the
/// target is kept on average: such steps come when the others have saved the time for it.
#[derive(Debug, Default)]
pub(crate) struct LatencyControl {
    model: StepModel,
    limit: Option<usize>,
    num_higher: u32,
    is_full: bool,
    mean_step_s: Option<f64>,
    /// The target in force, and the time that steps have saved below it.
    target_s: f64,
    credit_s: f64,
    /// Plans that must pass until the last step over the target was observed.
    num_unobserved: u32,
    /// Plans in a row that had no prompt for the target's sake.
    num_without: u32,
}

impl LatencyControl {
    pub(crate) fn observe(&mut self, batch: &Batch, took: Duration) {
        let seconds = took.as_secs_f64();
        let mean = self.mean_step_s.get_or_insert(seconds);
        *mean += NEWEST * (seconds - *mean);
        let most = MOST_CREDIT * self.target_s;
        self.credit_s = (self.credit_s + self.target_s - seconds).clamp(-most, most);
        self.model.observe(&StepLoad::of(batch), took);
    }

    /// The mean time of a step.
    pub(crate) fn mean_step_s(&self) -> Option<f64> {
        self.mean_step_s.filter(|&mean| mean > 0.0)
    }

    /// What a batch should take, with its margin.
    pub(crate) fn predict(&self, batch: &Batch) -> Option<Duration> {
        let seconds = self.model.predict(&StepLoad::of(batch))?;
        Duration::try_from_secs_f64(seconds * self.model.margin()).ok()
    }

    /// Most prompt tokens, up to `most`, beside these decodes. `start`: positions that lie before
    /// the first prompt's next chunk.
    pub(crate) fn prefill_limit(
        &mut self,
        target: Duration,
        decodes: &StepLoad,
        start: usize,
        most: usize,
    ) -> usize {
        self.target_s = target.as_secs_f64();
        self.num_unobserved = self.num_unobserved.saturating_sub(1);
        let Some(allowed_s) = self.allowed_s(target, self.model.wide_margin()) else {
            return self.follow(COLD_LIMIT).min(most);
        };
        let chunks = Chunks { model: &self.model, decodes, start, most };
        let len = chunks.longest_within(allowed_s);
        // One that keeps the target but for noise is no reason to give it up.
        if len == 0 && chunks.longest_within(self.target_s) == 0 {
            return self.spread(decodes, start, most);
        }
        self.num_without = 0;
        self.follow(len.max(QUANTUM)).min(most)
    }

    /// Moves the limit to what is wanted: down at once, up late.
    fn follow(&mut self, wanted: usize) -> usize {
        let limit = self.limit.unwrap_or(COLD_LIMIT);
        let is_higher = wanted as f64 > limit as f64 * RAISE_FACTOR;
        self.num_higher = if is_higher { self.num_higher + 1 } else { 0 };
        let next = if wanted < limit || self.num_higher >= RAISE_AFTER { wanted } else { limit };
        if next != limit {
            self.num_higher = 0;
        }
        self.limit = Some(next);
        next
    }

    /// The limit where every step with a prompt breaks the target: nothing, until enough was saved
    /// for a step that is worth it.
    fn spread(&mut self, decodes: &StepLoad, start: usize, most: usize) -> usize {
        self.num_without += 1;
        let chunks = Chunks { model: &self.model, decodes, start, most };
        let least_s = chunks.predict(QUANTUM.min(most)).unwrap_or(0.0);
        let len = chunks.longest_within(WORTHWHILE * least_s).max(QUANTUM.min(most));
        let over_s = chunks.predict(len).unwrap_or(0.0) - self.target_s;
        let is_saved = self.credit_s >= over_s && self.num_unobserved == 0;
        if !is_saved && self.num_without <= MOST_STEPS_WITHOUT {
            return 0;
        }
        self.num_unobserved = 3;
        self.num_without = 0;
        len
    }

    /// Whether one more row, behind `len` tokens, keeps a step of these rows within the target.
    pub(crate) fn has_room_for_row(
        &mut self,
        target: Duration,
        rows: &StepLoad,
        len: usize,
    ) -> bool {
        let Some(allowed_s) = self.allowed_s(target, self.model.margin()) else { return true };
        let mut load = *rows;
        load.add_row(len, 1, true);
        let Some(seconds) = self.model.predict(&load) else { return true };
        let part = if self.is_full { REOPEN } else { 1.0 };
        self.is_full = seconds > allowed_s * part;
        !self.is_full
    }

    /// What a prediction may be at most; `None` while nothing can be predicted.
    fn allowed_s(&self, target: Duration, margin: f64) -> Option<f64> {
        let mut alone = StepLoad::default();
        alone.add_row(1, 1, true);
        let least = self.model.predict(&alone)? * LEAST_TARGET;
        Some(target.as_secs_f64().max(least) / margin)
    }
}

/// Chunks of different lengths beside the same decodes.
struct Chunks<'a> {
    model: &'a StepModel,
    decodes: &'a StepLoad,
    /// Positions before the first prompt's next chunk.
    start: usize,
    /// Most prompt tokens.
    most: usize,
}

impl Chunks<'_> {
    fn predict(&self, len: usize) -> Option<f64> {
        let mut load = *self.decodes;
        load.add_row(self.start, len, true);
        self.model.predict(&load)
    }

    /// The most units that take no longer; 0 if the smallest takes longer. A unit is always
    /// trusted, or nothing would ever be learned of chunks.
    fn longest_within(&self, seconds: f64) -> usize {
        let fits = |num_units: usize| {
            self.predict(num_units * QUANTUM).is_some_and(|predicted| predicted <= seconds)
        };
        let trusted = self.model.trusted_tokens().saturating_sub(self.decodes.num_tokens as usize);
        // Times grow with tokens.
        let (mut fitting, mut too_many) = (0, (trusted.min(self.most) / QUANTUM).max(1) + 1);
        while fitting + 1 < too_many {
            let middle = fitting.midpoint(too_many);
            if fits(middle) {
                fitting = middle;
            } else {
                too_many = middle;
            }
        }
        fitting * QUANTUM
    }
}
