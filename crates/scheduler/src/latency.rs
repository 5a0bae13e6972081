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
const REOPEN: f64 = 0.9;
/// A target below what one row alone takes cannot be met. This multiple of it is aimed at then.
const LEAST_TARGET: f64 = 1.25;
/// Weight of the newest step in the mean time of steps.
const NEWEST: f64 = 0.1;

/// The controller: a model of steps and what it allowed last. Lowers its limits at once and raises
/// them late, so that noise does not make them flap.
#[derive(Debug, Default)]
pub(crate) struct LatencyControl {
    model: StepModel,
    limit: Option<usize>,
    num_higher: u32,
    is_full: bool,
    mean_step_s: Option<f64>,
}

impl LatencyControl {
    pub(crate) fn observe(&mut self, batch: &Batch, took: Duration) {
        let seconds = took.as_secs_f64();
        let mean = self.mean_step_s.get_or_insert(seconds);
        *mean += NEWEST * (seconds - *mean);
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
        let wanted = self.wanted(target, decodes, start, most);
        let limit = self.limit.unwrap_or(COLD_LIMIT);
        let is_higher = wanted as f64 > limit as f64 * RAISE_FACTOR;
        self.num_higher = if is_higher { self.num_higher + 1 } else { 0 };
        let next = if wanted < limit || self.num_higher >= RAISE_AFTER { wanted } else { limit };
        if next != limit {
            self.num_higher = 0;
        }
        self.limit = Some(next);
        next.min(most)
    }

    fn wanted(&self, target: Duration, decodes: &StepLoad, start: usize, most: usize) -> usize {
        let Some(allowed_s) = self.allowed_s(target) else { return COLD_LIMIT.min(most) };
        let fits = |len: usize| {
            let mut load = *decodes;
            load.add_row(start, len, true);
            self.model.predict(&load).is_some_and(|seconds| seconds <= allowed_s)
        };
        let trusted = self.model.trusted_tokens().saturating_sub(decodes.num_tokens as usize);
        // The most units that fit: times grow with tokens.
        let (mut fitting, mut too_many) = (0, trusted.min(most) / QUANTUM + 1);
        while fitting + 1 < too_many {
            let middle = fitting.midpoint(too_many);
            if fits(middle * QUANTUM) {
                fitting = middle;
            } else {
                too_many = middle;
            }
        }
        fitting.max(1) * QUANTUM
    }

    /// Whether one more row, behind `len` tokens, keeps a step of these rows within the target.
    pub(crate) fn has_room_for_row(
        &mut self,
        target: Duration,
        rows: &StepLoad,
        len: usize,
    ) -> bool {
        let Some(allowed_s) = self.allowed_s(target) else { return true };
        let mut load = *rows;
        load.add_row(len, 1, true);
        let Some(seconds) = self.model.predict(&load) else { return true };
        let part = if self.is_full { REOPEN } else { 1.0 };
        self.is_full = seconds > allowed_s * part;
        !self.is_full
    }

    /// What a prediction may be at most; `None` while nothing can be predicted.
    fn allowed_s(&self, target: Duration) -> Option<f64> {
        let mut alone = StepLoad::default();
        alone.add_row(1, 1, true);
        let least = self.model.predict(&alone)? * LEAST_TARGET;
        Some(target.as_secs_f64().max(least) / self.model.margin())
    }
}
