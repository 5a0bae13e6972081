//! What a run's clients saw, in figures.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::time::Duration;

use serde::Serialize;

use super::answer::Served;
use super::{Arrivals, LoadRun, Pace};

/// Failures that are told in full.
const NUM_SAMPLES: usize = 5;

/// A run. Times in ms or s as their names say; tokens and times are of requests that ended well.
#[derive(Clone, Debug, Serialize)]
pub struct LoadFigures {
    /// `closed`, `poisson` or `constant`.
    pub mode: &'static str,
    /// Requests at a time, in a closed loop.
    pub concurrency: Option<usize>,
    /// Requests a second that came, at a rate.
    pub rate: Option<f64>,
    /// Requests that were sent, and those that ended well.
    pub num_requests: usize,
    /// Those that ended well.
    pub num_ok: usize,
    /// Others, by kind.
    pub failures: BTreeMap<String, usize>,
    /// What some of them said.
    pub failure_samples: Vec<String>,
    /// From the first request's begin to the last one's end.
    pub wall_s: f64,
    /// Most requests at once.
    pub peak_in_flight: usize,
    /// Requests a second that ended well.
    pub requests_per_s: f64,
    /// Tokens generated a second.
    pub output_tokens_per_s: f64,
    /// Tokens of prompts and generated ones a second.
    pub total_tokens_per_s: f64,
    /// Tokens of prompts, as the server counts.
    pub num_input_tokens: usize,
    /// Of these, tokens that the server did not compute, as it says.
    pub num_cached_tokens: usize,
    /// Tokens generated.
    pub num_output_tokens: usize,
    /// Whether the server counted all tokens; otherwise pieces of text were counted.
    pub is_counted_by_server: bool,
    /// From when a request was due to its first text.
    pub ttft_ms: Option<Quantiles>,
    /// Between two pieces of text.
    pub itl_ms: Option<Quantiles>,
    /// Between two tokens, a mean for each request.
    pub tpot_ms: Option<Quantiles>,
    /// From when a request was due to its end.
    pub e2e_ms: Option<Quantiles>,
    /// How much later than due requests were sent, at a rate.
    pub lateness_ms: Option<Quantiles>,
    /// Requests that met all targets.
    pub goodput: Option<Goodput>,
    /// Share of a core that the client itself took: near 1 it measures itself.
    pub client_core_fraction: Option<f64>,
}

/// Requests that met all targets.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Goodput {
    /// What was asked for.
    pub targets: GoodputTargets,
    /// Those requests a second.
    pub requests_per_s: f64,
    /// Their part of all that were sent.
    pub fraction: f64,
}

/// What a request must keep to be a good one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct GoodputTargets {
    /// Time to the first text.
    pub ttft_ms: Option<f64>,
    /// Mean time between tokens.
    pub tpot_ms: Option<f64>,
    /// Time to the end.
    pub e2e_ms: Option<f64>,
}

/// Values below which parts of all lie, straight between neighbours.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Quantiles {
    pub n: usize,
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p95: f64,
    pub p99: f64,
    pub max: f64,
}

impl Quantiles {
    /// Of durations, in milliseconds; `None` of none.
    pub(crate) fn of_times(times: impl Iterator<Item = Duration>) -> Option<Self> {
        let mut all: Vec<f64> = times.map(|time| time.as_secs_f64() * 1e3).collect();
        all.sort_unstable_by(f64::total_cmp);
        let max = *all.last()?;
        let at = |part: f64| {
            let place = part * (all.len() - 1) as f64;
            let below = all[place as usize];
            let above = all[(place as usize + 1).min(all.len() - 1)];
            below + (above - below) * place.fract()
        };
        Some(Self {
            n: all.len(),
            mean: all.iter().sum::<f64>() / all.len() as f64,
            p50: at(0.5),
            p90: at(0.9),
            p95: at(0.95),
            p99: at(0.99),
            max,
        })
    }
}

impl FromStr for GoodputTargets {
    type Err = String;

    /// `ttft:200,tpot:50,e2e:5000`, in ms, in any order, any of them.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut targets = Self::default();
        for part in text.split([',', ' ']).filter(|part| !part.is_empty()) {
            let (name, ms) = part.split_once(':').ok_or(format!("`{part}` is not NAME:MS"))?;
            let place = match name {
                "ttft" => &mut targets.ttft_ms,
                "tpot" => &mut targets.tpot_ms,
                "e2e" | "e2el" => &mut targets.e2e_ms,
                _ => return Err(format!("`{name}` is none of ttft, tpot, e2e")),
            };
            let ms: f64 = ms.parse().map_err(|_| format!("`{ms}` is no number of ms"))?;
            if !(ms.is_finite() && ms > 0.0) {
                return Err(format!("{ms} ms is not over 0"));
            }
            *place = Some(ms);
        }
        if targets == Self::default() {
            return Err("names no target".to_owned());
        }
        Ok(targets)
    }
}

impl GoodputTargets {
    fn are_met_by(&self, served: &Served) -> bool {
        let meets = |time: Option<Duration>, most: Option<f64>| match (most, time) {
            (None, _) => true,
            (Some(most), Some(time)) => time.as_secs_f64() * 1e3 <= most,
            (Some(_), None) => false,
        };
        // An answer of one token has no time between tokens to miss a target with.
        let tpot = served.tpot().or((served.num_output < 2).then_some(Duration::ZERO));
        meets(served.ttft(), self.ttft_ms)
            && meets(tpot, self.tpot_ms)
            && meets(Some(served.e2e()), self.e2e_ms)
    }
}

impl Served {
    fn ttft(&self) -> Option<Duration> {
        Some(self.times.first()?.saturating_sub(self.due))
    }

    fn tpot(&self) -> Option<Duration> {
        let (first, last) = (self.times.first()?, self.times.last()?);
        let num_gaps = u32::try_from(self.num_output.checked_sub(1)?).ok()?;
        (*last - *first).checked_div(num_gaps)
    }

    fn e2e(&self) -> Duration {
        self.ended.saturating_sub(self.due)
    }

    fn gaps(&self) -> impl Iterator<Item = Duration> {
        self.times.windows(2).map(|pair| pair[1] - pair[0])
    }
}

impl LoadFigures {
    /// The figures of `run`.
    #[must_use]
    pub fn new(run: &LoadRun, targets: Option<GoodputTargets>) -> Self {
        let good: Vec<&Served> = run.served.iter().filter(|s| s.failure.is_none()).collect();
        let start = run.served.iter().map(|served| served.due).min().unwrap_or_default();
        let end = run.served.iter().map(|served| served.ended).max().unwrap_or_default();
        let wall_s = end.saturating_sub(start).as_secs_f64();
        let per_s = |count: usize| count as f64 / wall_s.max(f64::MIN_POSITIVE);
        let num_output_tokens = good.iter().map(|served| served.num_output).sum();
        let num_input_tokens = good.iter().filter_map(|served| served.num_input).sum();
        let (mode, concurrency, rate) = match run.pace {
            Pace::Closed(concurrency) => ("closed", Some(concurrency), None),
            Pace::Open(rate, Arrivals::Poisson) => ("poisson", None, Some(rate)),
            Pace::Open(rate, Arrivals::Constant) => ("constant", None, Some(rate)),
        };
        let lateness = || run.served.iter().map(|served| served.sent - served.due);
        let of_good = |targets: GoodputTargets| {
            let num_good = good.iter().filter(|served| targets.are_met_by(served)).count();
            let fraction = num_good as f64 / run.served.len().max(1) as f64;
            Goodput { targets, requests_per_s: per_s(num_good), fraction }
        };
        let (failures, failure_samples) = failures(&run.served);
        Self {
            mode,
            concurrency,
            rate,
            num_requests: run.served.len(),
            num_ok: good.len(),
            failures,
            failure_samples,
            wall_s,
            peak_in_flight: run.peak_in_flight,
            requests_per_s: per_s(good.len()),
            output_tokens_per_s: per_s(num_output_tokens),
            total_tokens_per_s: per_s(num_input_tokens + num_output_tokens),
            num_input_tokens,
            num_cached_tokens: good.iter().map(|served| served.num_cached).sum(),
            num_output_tokens,
            is_counted_by_server: good.iter().all(|served| served.has_usage),
            ttft_ms: Quantiles::of_times(good.iter().filter_map(|served| served.ttft())),
            itl_ms: Quantiles::of_times(good.iter().flat_map(|served| served.gaps())),
            tpot_ms: Quantiles::of_times(good.iter().filter_map(|served| served.tpot())),
            e2e_ms: Quantiles::of_times(good.iter().map(|served| served.e2e())),
            lateness_ms: rate.and_then(|_| Quantiles::of_times(lateness())),
            goodput: targets.map(of_good),
            client_core_fraction: run
                .client_busy
                .map(|busy| busy.as_secs_f64() / wall_s.max(f64::MIN_POSITIVE)),
        }
    }

    /// What the load is called.
    #[must_use]
    pub fn load(&self) -> String {
        match (self.concurrency, self.rate) {
            (Some(concurrency), _) => format!("{concurrency} at once"),
            (None, rate) => format!("{} req/s", rate.unwrap_or_default()),
        }
    }
}

fn failures(served: &[Served]) -> (BTreeMap<String, usize>, Vec<String>) {
    let (mut kinds, mut samples) = (BTreeMap::new(), Vec::new());
    for (kind, detail) in served.iter().filter_map(|served| served.failure.as_ref()) {
        *kinds.entry(kind.clone().into_owned()).or_default() += 1;
        if samples.len() < NUM_SAMPLES {
            samples.push(format!("{kind}: {detail}"));
        }
    }
    (kinds, samples)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn served(due: u64, times: &[u64], num_output: usize) -> Served {
        Served {
            due: ms(due),
            sent: ms(due),
            times: times.iter().copied().map(ms).collect(),
            ended: ms(times.last().copied().unwrap_or(due)),
            num_output,
            num_input: Some(10),
            has_usage: true,
            ..Served::default()
        }
    }

    fn run() -> LoadRun {
        let failed =
            Served { failure: Some(("http_503".into(), "busy".into())), ..served(0, &[], 0) };
        LoadRun {
            // The second text holds two tokens.
            served: vec![served(0, &[100, 110, 130], 4), served(500, &[700, 1000], 2), failed],
            peak_in_flight: 2,
            client_busy: Some(ms(50)),
            pace: Pace::Closed(2),
        }
    }

    #[test]
    fn figures_are_of_requests_that_ended_well() {
        let targets = GoodputTargets { ttft_ms: Some(150.0), ..GoodputTargets::default() };
        let figures = LoadFigures::new(&run(), Some(targets));
        assert_eq!((figures.num_requests, figures.num_ok), (3, 2));
        assert_eq!(figures.failures, BTreeMap::from([("http_503".to_owned(), 1)]));
        assert!((figures.wall_s - 1.0).abs() < 1e-9);
        assert!((figures.output_tokens_per_s - 6.0).abs() < 1e-9);
        assert!((figures.total_tokens_per_s - 26.0).abs() < 1e-9);
        assert!((figures.client_core_fraction.unwrap() - 0.05).abs() < 1e-9);
        let ttft = figures.ttft_ms.unwrap();
        assert_eq!((ttft.n, ttft.mean, ttft.max), (2, 150.0, 200.0));
        // Gaps of 10, 20 and 300 ms; 10 and 300 ms a token.
        assert!((figures.itl_ms.unwrap().p50 - 20.0).abs() < 1e-9);
        assert!((figures.tpot_ms.unwrap().p50 - 155.0).abs() < 1e-9);
        let goodput = figures.goodput.unwrap();
        assert!((goodput.requests_per_s - 1.0).abs() < 1e-9);
        assert!((goodput.fraction - 1.0 / 3.0).abs() < 1e-9);
    }

    /// As numpy's default has them.
    #[test]
    fn quantiles_lie_straight_between_neighbours() {
        let quantiles = Quantiles::of_times([4, 1, 3, 2].into_iter().map(ms)).unwrap();
        assert!((quantiles.p50 - 2.5).abs() < 1e-9);
        assert!((quantiles.p95 - 3.85).abs() < 1e-9);
        assert_eq!((quantiles.n, quantiles.max), (4, 4.0));
        assert_eq!(Quantiles::of_times(std::iter::empty()), None);
    }

    #[test]
    fn targets_are_read() {
        let targets: GoodputTargets = "ttft:200,e2el:5000".parse().unwrap();
        assert_eq!(
            (targets.ttft_ms, targets.tpot_ms, targets.e2e_ms),
            (Some(200.0), None, Some(5000.0))
        );
        for wrong in ["", "ttft", "itl:5", "ttft:x", "ttft:-1"] {
            assert!(wrong.parse::<GoodputTargets>().is_err(), "{wrong}");
        }
    }
}
