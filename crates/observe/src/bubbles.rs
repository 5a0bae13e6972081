//! When the device had nothing to run, and why.

use std::time::Duration;

use inflight_engine::{LaunchKind, Span, StepRecord};
use serde::Serialize;

/// What the device waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Nothing was asked of the engine.
    NoWork,
    /// The host waited for results and to be woken.
    HostWaits,
    /// The host read the results of earlier batches.
    HostCollects,
    /// The host took requests in and planned.
    HostPlans,
    /// The host wrote the inputs.
    HostStages,
    /// The host enqueued.
    HostLaunches,
    /// The host enqueued operator by operator, as the step held prefill and so had no graph.
    PrefillWithoutGraph,
    /// The host captured a graph, as the step was the first of its size.
    GraphCapture,
    /// The host allocated memory of the device.
    Allocation,
    /// What rows under a grammar may draw was not known yet.
    GrammarLate,
    /// The inputs were being copied.
    InputsLate,
    /// All was enqueued: what the device itself takes from one batch to the next.
    Device,
}

impl Cause {
    /// Every cause.
    pub const ALL: [Self; 12] = [
        Self::NoWork,
        Self::HostWaits,
        Self::HostCollects,
        Self::HostPlans,
        Self::HostStages,
        Self::HostLaunches,
        Self::PrefillWithoutGraph,
        Self::GraphCapture,
        Self::Allocation,
        Self::GrammarLate,
        Self::InputsLate,
        Self::Device,
    ];

    /// For machines: one word.
    pub fn label(self) -> &'static str {
        match self {
            Self::NoWork => "no_work",
            Self::HostWaits => "host_waits",
            Self::HostCollects => "host_collects",
            Self::HostPlans => "host_plans",
            Self::HostStages => "host_stages",
            Self::HostLaunches => "host_launches",
            Self::PrefillWithoutGraph => "prefill_without_graph",
            Self::GraphCapture => "graph_capture",
            Self::Allocation => "allocation",
            Self::GrammarLate => "grammar_late",
            Self::InputsLate => "inputs_late",
            Self::Device => "device",
        }
    }

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoWork => "no work",
            Self::HostWaits => "host late: waits for results",
            Self::HostCollects => "host late: collects",
            Self::HostPlans => "host late: plans",
            Self::HostStages => "host late: stages",
            Self::HostLaunches => "host late: launches",
            Self::PrefillWithoutGraph => "host late: launches prefill without a graph",
            Self::GraphCapture => "host late: captures a graph",
            Self::Allocation => "host late: allocates",
            Self::GrammarLate => "grammar late",
            Self::InputsLate => "inputs late",
            Self::Device => "device: between batches",
        }
    }

    /// For people who do not know the engine: what went on while the device had nothing to run.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::NoWork => "there was no request to work on",
            Self::HostWaits => "the host waited for earlier results before it went on",
            Self::HostCollects => "the host was handing out the tokens of earlier batches",
            Self::HostPlans => "the host was taking requests in and choosing the next batch",
            Self::HostStages => "the host was writing down the next batch's inputs",
            Self::HostLaunches => "the host was still handing the next batch to the device",
            Self::PrefillWithoutGraph => {
                "the host was handing over a batch with prompts, operator by operator"
            }
            Self::GraphCapture => "the host was recording a graph, once for each size of batch",
            Self::Allocation => "the host was allocating memory of the device",
            Self::GrammarLate => "it was not known yet which tokens a grammar allows",
            Self::InputsLate => "the next batch's inputs were still being copied",
            Self::Device => "all was there: the device takes this long from one batch to the next",
        }
    }
}

/// A gap between the compute intervals of two batches, or inside one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bubble {
    /// From the end of one batch to the begin of the next; inside one, from the end of its forward
    /// pass to when its tokens could be drawn.
    pub span: Span,
    /// What took most of it.
    pub cause: Cause,
}

/// Finds bubbles in records that come in order.
#[derive(Clone, Debug, Default)]
pub struct Bubbles {
    /// The two records before: with two batches in flight, the host may be collecting either.
    before: [Option<StepRecord>; 2],
}

impl Bubbles {
    /// The bubbles before `record`'s batch and inside it, in order.
    pub fn of(&mut self, record: &StepRecord) -> impl Iterator<Item = Bubble> + use<> {
        let inside = (record.stalled.end > record.stalled.start)
            .then_some(Bubble { span: record.stalled, cause: Cause::GrammarLate });
        self.before(record).into_iter().chain(inside)
    }

    /// The bubble before `record`'s batch, if there was one.
    fn before(&mut self, record: &StepRecord) -> Option<Bubble> {
        let [older, last] = &self.before;
        let bubble = last.as_ref().and_then(|last| {
            let span = Span { start: last.compute.end, end: record.compute.start };
            let earlier = older.iter().chain([last]);
            (span.end > span.start).then(|| Bubble { span, cause: cause(span, earlier, record) })
        });
        self.before = [self.before[1].take(), Some(record.clone())];
        bubble
    }
}

/// Whatever takes most of `gap`.
fn cause<'a>(
    gap: Span,
    earlier: impl Iterator<Item = &'a StepRecord>,
    record: &StepRecord,
) -> Cause {
    let mut shares = vec![
        (Cause::HostPlans, shared(gap, record.admit) + shared(gap, record.plan)),
        (Cause::HostStages, shared(gap, record.stage)),
        (launching(record), shared(gap, record.launch)),
        (Cause::GrammarLate, shared(gap, record.late)),
    ];
    let mut collected = Duration::ZERO;
    for step in earlier {
        // A step collected after this one was launched did not hold it up.
        if step.collect.end <= record.launch.start {
            shares.push((Cause::HostWaits, shared(gap, step.blocked)));
            shares.push((Cause::HostCollects, shared(gap, step.collect)));
            shares.push((Cause::GrammarLate, shared(gap, step.late)));
            collected = collected.max(step.collect.end);
        }
    }
    if collected > Duration::ZERO {
        let idle = Span { start: collected, end: record.admit.start };
        shares.push((Cause::NoWork, shared(gap, idle)));
    }
    // The copy of inputs counts only once the host is done with its part.
    let copied = Span { start: record.launch.end.max(record.h2d.start), end: record.h2d.end };
    shares.push((Cause::InputsLate, shared(gap, copied)));
    let enqueued = record.launch.end.max(record.h2d.end);
    shares.push((Cause::Device, shared(gap, Span { start: enqueued, end: gap.end })));
    let most = shares.into_iter().max_by_key(|(_, share)| *share);
    most.map_or(Cause::Device, |(cause, _)| cause)
}

/// What launching a step means for the device that waits for it.
fn launching(record: &StepRecord) -> Cause {
    match (record.launched_as, record.allocated) {
        (LaunchKind::CapturedGraph, _) => Cause::GraphCapture,
        (_, true) => Cause::Allocation,
        (LaunchKind::WithoutGraph, false) => Cause::PrefillWithoutGraph,
        (LaunchKind::Graph | LaunchKind::NoGraphs, false) => Cause::HostLaunches,
    }
}

/// How long both spans are.
fn shared(a: Span, b: Span) -> Duration {
    a.end.min(b.end).saturating_sub(a.start.max(b.start))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(start: u64, end: u64) -> Span {
        Span { start: Duration::from_micros(start), end: Duration::from_micros(end) }
    }

    /// A step collected at 130..140 whose compute interval ended at 100.
    fn first() -> StepRecord {
        StepRecord {
            batch: 1,
            launch: span(5, 10),
            compute: span(12, 100),
            blocked: span(10, 130),
            collect: span(130, 140),
            ..StepRecord::default()
        }
    }

    fn check(second: StepRecord, expected: Option<(Span, Cause)>) {
        let mut bubbles = Bubbles::default();
        assert_eq!(bubbles.of(&first()).next(), None, "nothing comes before the first");
        let found: Vec<_> = bubbles.of(&second).map(|b| (b.span, b.cause)).collect();
        assert_eq!(found, expected.into_iter().collect::<Vec<_>>());
    }

    /// A step whose host work begins at `at`, with these lengths of plan, stage and launch.
    fn step(at: u64, [plan, stage, launch]: [u64; 3], compute: u64) -> StepRecord {
        let (planned, staged) = (at + plan, at + plan + stage);
        StepRecord {
            batch: 2,
            admit: span(at, at),
            plan: span(at, planned),
            stage: span(planned, staged),
            launch: span(staged, staged + launch),
            h2d: span(staged + launch, staged + launch),
            compute: span(compute, compute + 50),
            ..StepRecord::default()
        }
    }

    #[test]
    fn batches_back_to_back_leave_no_bubble() {
        check(step(20, [1, 1, 1], 100), None);
    }

    #[test]
    fn the_longest_share_is_the_cause() {
        // Planned while the first computed: what is left is the device's own.
        check(step(20, [1, 1, 1], 103), Some((span(100, 103), Cause::Device)));
        check(step(141, [60, 2, 2], 206), Some((span(100, 206), Cause::HostPlans)));
        check(step(141, [2, 60, 2], 206), Some((span(100, 206), Cause::HostStages)));
        check(step(141, [2, 2, 60], 206), Some((span(100, 206), Cause::HostLaunches)));
        // 30 µs from the batch's end to the host's waking, and little else.
        check(step(141, [2, 2, 2], 148), Some((span(100, 148), Cause::HostWaits)));
        // The next request came 860 µs after the first was done.
        check(step(1000, [2, 2, 2], 1007), Some((span(100, 1007), Cause::NoWork)));
    }

    #[test]
    fn a_slow_launch_has_its_own_reasons() {
        let slow = step(141, [2, 2, 60], 206);
        let check_launch = |launched_as, allocated, cause| {
            let record = StepRecord { launched_as, allocated, ..slow.clone() };
            check(record, Some((span(100, 206), cause)));
        };
        check_launch(LaunchKind::Graph, false, Cause::HostLaunches);
        check_launch(LaunchKind::NoGraphs, false, Cause::HostLaunches);
        check_launch(LaunchKind::WithoutGraph, false, Cause::PrefillWithoutGraph);
        check_launch(LaunchKind::WithoutGraph, true, Cause::Allocation);
        check_launch(LaunchKind::CapturedGraph, true, Cause::GraphCapture);
    }

    #[test]
    fn a_late_grammar_stalls_the_device_inside_a_batch_or_before_it() {
        // Its forward pass ends at 150; what it may draw is there at 190.
        let inside = StepRecord { stalled: span(150, 190), ..step(20, [1, 1, 1], 100) };
        check(inside, Some((span(150, 190), Cause::GrammarLate)));
        // The batch before was drawn late, and the host could only then plan the next.
        let mut bubbles = Bubbles::default();
        let late = StepRecord { late: span(101, 180), ..first() };
        bubbles
            .of(&StepRecord { collect: span(185, 186), blocked: span(184, 185), ..late })
            .count();
        let found: Vec<_> = bubbles.of(&step(187, [2, 2, 2], 195)).collect();
        assert_eq!(found, [Bubble { span: span(100, 195), cause: Cause::GrammarLate }]);
    }

    #[test]
    fn inputs_may_be_late() {
        let late = StepRecord { h2d: span(147, 300), ..step(141, [2, 2, 2], 301) };
        check(late, Some((span(100, 301), Cause::InputsLate)));
    }
}
