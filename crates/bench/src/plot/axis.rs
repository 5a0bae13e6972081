//! Values to places.

/// About so many ticks.
const NUM_TICKS: f64 = 5.0;

/// One direction of a plot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis {
    low: f64,
    high: f64,
    is_log: bool,
    /// Where `low` and `high` are.
    from: f64,
    to: f64,
}

impl Axis {
    /// From 0 to a round number at or over every value.
    pub(super) fn from_zero(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let most = values.filter(|value| value.is_finite()).fold(0.0, f64::max);
        let most = if most > 0.0 { most } else { 1.0 };
        let step = round_step(most / NUM_TICKS);
        Self { low: 0.0, high: (most / step - 1e-9).ceil() * step, is_log: false, from, to }
    }

    /// From the least to the largest value.
    pub(super) fn around(
        values: impl Iterator<Item = f64>,
        is_log: bool,
        from: f64,
        to: f64,
    ) -> Self {
        let values = values.filter(|value| value.is_finite() && (!is_log || *value > 0.0));
        let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
            (low.min(value), high.max(value))
        });
        match (low < high, low.is_finite()) {
            (true, _) => Self { low, high, is_log, from, to },
            (false, true) => Self { low: low * 0.5, high: low * 1.5 + 1e-9, is_log, from, to },
            (false, false) => Self { low: 0.1, high: 1.0, is_log, from, to },
        }
    }

    /// Where `value` is; nowhere, if it is no number or cannot be drawn.
    pub(super) fn place(&self, value: f64) -> Option<f64> {
        let scale = |value: f64| if self.is_log { value.ln() } else { value };
        let (low, high) = (scale(self.low), scale(self.high));
        let part = (scale(value) - low) / (high - low);
        part.is_finite().then(|| self.from + part.clamp(0.0, 1.0) * (self.to - self.from))
    }

    /// Round values to mark.
    pub(super) fn ticks(&self) -> Vec<f64> {
        if self.is_log {
            let powers = (-30..60).map(|power| 2_f64.powi(power));
            let all: Vec<_> = powers.filter(|tick| (self.low..=self.high).contains(tick)).collect();
            let every = all.len().div_ceil(10).max(1);
            return all.into_iter().step_by(every).collect();
        }
        let step = round_step((self.high - self.low) / NUM_TICKS);
        let first = (self.low / step - 1e-9).ceil() as i64;
        let ticks = (first..first + 20).map(|i| i as f64 * step);
        ticks.take_while(|tick| *tick <= self.high + step * 1e-9).collect()
    }
}

/// 1, 2, 2.5 or 5 times a power of ten: the least that is not below `step`.
fn round_step(step: f64) -> f64 {
    let power = 10_f64.powf(step.log10().floor());
    let factors = [1.0, 2.0, 2.5, 5.0, 10.0];
    let factor = factors.into_iter().find(|factor| factor * power >= step * (1.0 - 1e-9));
    factor.unwrap_or(10.0) * power
}

/// A value with three digits that count, and no zeros behind.
pub(super) fn short(value: f64) -> String {
    let text = match value.abs() {
        0.0 => return "0".to_owned(),
        1e6.. => return format!("{}M", short(value / 1e6)),
        1e4.. => return format!("{}k", short(value / 1e3)),
        100.0.. => return format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        1.0.. => format!("{value:.2}"),
        0.01.. => format!("{value:.3}"),
        _ => return format!("{value:.1e}"),
    };
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_reach_over_all_values() {
        let axis = Axis::from_zero([3.0, 73.0].into_iter(), 0.0, 100.0);
        assert_eq!(axis.ticks(), [0.0, 20.0, 40.0, 60.0, 80.0]);
        assert_eq!(axis.place(40.0), Some(50.0));
        let axis = Axis::from_zero([100.0].into_iter(), 0.0, 1.0);
        assert_eq!(axis.ticks().last(), Some(&100.0));
        let log = Axis::around([1.0, 256.0].into_iter(), true, 0.0, 8.0);
        assert_eq!(log.ticks(), [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0]);
        assert!((log.place(16.0).unwrap() - 4.0).abs() < 1e-12);
    }

    #[test]
    fn values_are_short() {
        let check = |value, expected| assert_eq!(short(value), expected);
        check(0.0, "0");
        check(0.25, "0.25");
        check(2.5, "2.5");
        check(73.26, "73.3");
        check(1362.4, "1362");
        check(31_273.0, "31.3k");
        check(2.4e6, "2.4M");
    }
}
