//! How many GPUs a rate needs.

use serde::Serialize;

use super::report::PlanReport;
use super::simulate::{PlanError, Planned, simulate};
use super::workload::Workload;

/// What a GPU's load must stay within.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Aims {
    /// Milliseconds to a first token, for 99 of 100 requests.
    pub ttft_ms: Option<f64>,
    /// Milliseconds between two tokens, for 99 of 100.
    pub itl_ms: Option<f64>,
}

/// So many GPUs, each with its share of the requests.
#[derive(Clone, Debug, Serialize)]
pub struct Fleet {
    /// GPUs.
    pub num_gpus: usize,
    /// Requests a second for each.
    pub rate_each: f64,
    /// What one of them does.
    pub report: PlanReport,
}

/// A queue that grows is told by this: the later half waits so much longer for a first token.
const GROWTH: f64 = 2.0;
/// More GPUs than these are not tried.
const MOST_GPUS: usize = 1 << 14;

impl Aims {
    /// Whether a load stays within them.
    #[must_use]
    pub fn are_met(&self, report: &PlanReport) -> bool {
        let within = |aim: Option<f64>, value: f64| aim.is_none_or(|most| value <= most);
        within(self.ttft_ms, report.ttft_ms.p99) && within(self.itl_ms, report.itl_ms.p99)
    }
}

/// The fewest GPUs that serve `workload`'s rate within `aims`, requests being dealt out evenly at
/// random; `None` if not even one request at a time stays within them. `show` sees each try.
///
/// # Errors
/// [`PlanError`].
///
/// # Panics
/// If the workload comes all at once.
pub fn gpus_needed(
    planned: &Planned<'_>,
    workload: &Workload,
    aims: Aims,
    show: &mut dyn FnMut(usize, &PlanReport, bool),
) -> Result<Option<Fleet>, PlanError> {
    let rate = workload.rate.expect("a rate needs GPUs, a burst does not");
    let mut attempt = |num_gpus: usize| -> Result<Option<Fleet>, PlanError> {
        let rate_each = rate / num_gpus as f64;
        let share = Workload { rate: Some(rate_each), ..workload.clone() };
        let arrivals = share.arrivals(planned.engine.max_model_len);
        let (report, served) = simulate(planned, &arrivals)?;
        let first = |half: &[super::Served]| {
            let waits = half.iter().filter_map(|s| Some(s.tokens_s.first()? - s.at_s));
            waits.sum::<f64>() / half.len().max(1) as f64
        };
        let (early, late) = served.split_at(served.len() / 2);
        // A step's time is no growth.
        let grows = first(late) > GROWTH * first(early) + 1e-3 * report.itl_ms.p99;
        let is_enough = aims.are_met(&report) && !grows;
        show(num_gpus, &report, is_enough);
        Ok(is_enough.then_some(Fleet { num_gpus, rate_each, report }))
    };
    // Twice as many each time, then half-way between too few and enough.
    let (mut too_few, mut count) = (0, 1);
    let mut enough = loop {
        if let Some(fleet) = attempt(count)? {
            break fleet;
        }
        (too_few, count) = (count, 2 * count);
        if count > MOST_GPUS {
            return Ok(None);
        }
    };
    while enough.num_gpus - too_few > 1 {
        let middle = too_few + (enough.num_gpus - too_few) / 2;
        match attempt(middle)? {
            Some(fleet) => enough = fleet,
            None => too_few = middle,
        }
    }
    Ok(Some(enough))
}
