//! The text that Prometheus reads.

use std::fmt::Write;

use inflight_observe::HistogramSnapshot;

/// Puts metrics together, each with its help and type.
///
/// # Source
/// "Exposition formats", Prometheus' documentation: text format 0.0.4.
#[derive(Default)]
pub(crate) struct Exposition {
    text: String,
    /// Of every sample, as in `a="b",c="d"`.
    labels: String,
}

impl Exposition {
    /// With the same labels on every sample.
    pub(crate) fn new(labels: &[(&str, &str)]) -> Self {
        let labels = labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escape(value)));
        Self { text: String::new(), labels: labels.collect::<Vec<_>>().join(",") }
    }

    /// A value that goes up and down.
    pub(crate) fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.describe(name, help, "gauge");
        self.sample(name, "", value);
    }

    /// Values that go up and down, one for each value of a label.
    pub(crate) fn gauges<'a>(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        values: impl IntoIterator<Item = (&'a str, f64)>,
    ) {
        self.describe(name, help, "gauge");
        for (of, value) in values {
            self.sample(name, &format!("{label}=\"{}\"", escape(of)), value);
        }
    }

    /// A value that only grows; the name ends in `_total`.
    pub(crate) fn counter(&mut self, name: &str, help: &str, value: f64) {
        self.describe(name, help, "counter");
        self.sample(name, "", value);
    }

    /// Values that only grow, one for each value of a label.
    pub(crate) fn counters<'a>(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        values: impl IntoIterator<Item = (&'a str, f64)>,
    ) {
        self.describe(name, help, "counter");
        for (of, value) in values {
            self.sample(name, &format!("{label}=\"{}\"", escape(of)), value);
        }
    }

    /// Durations in buckets, in seconds.
    pub(crate) fn histogram(&mut self, name: &str, help: &str, histogram: &HistogramSnapshot) {
        self.describe(name, help, "histogram");
        let buckets = format!("{name}_bucket");
        for (bound, count) in histogram.cumulative() {
            self.sample(&buckets, &format!("le=\"{bound:?}\""), count as f64);
        }
        let count = histogram.count() as f64;
        self.sample(&buckets, "le=\"+Inf\"", count);
        self.sample(&format!("{name}_sum"), "", histogram.sum_s);
        self.sample(&format!("{name}_count"), "", count);
    }

    pub(crate) fn finish(self) -> String {
        self.text
    }

    fn describe(&mut self, name: &str, help: &str, kind: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, label: &str, value: f64) {
        let comma = if self.labels.is_empty() || label.is_empty() { "" } else { "," };
        let labels = format!("{}{comma}{label}", self.labels);
        let _ = match labels.as_str() {
            "" => writeln!(self.text, "{name} {value}"),
            labels => writeln!(self.text, "{name}{{{labels}}} {value}"),
        };
    }
}

fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use inflight_observe::Histogram;

    use super::*;

    #[test]
    fn samples_are_as_the_format_has_them() {
        let mut exposition = Exposition::new(&[("model_name", "a\"b\\c")]);
        exposition.gauge("rows", "Rows.", 3.0);
        exposition.counters("ended_total", "Ends.", "how", [("stop", 2.0)]);
        let histogram = Histogram::new(&[0.5, 1.0]);
        histogram.add(Duration::from_millis(750));
        histogram.add(Duration::from_secs(3));
        exposition.histogram("wait_seconds", "Waits.", &histogram.snapshot());
        let model = r#"model_name="a\"b\\c""#;
        let expected = [
            "# HELP rows Rows.".to_owned(),
            "# TYPE rows gauge".to_owned(),
            format!("rows{{{model}}} 3"),
            "# HELP ended_total Ends.".to_owned(),
            "# TYPE ended_total counter".to_owned(),
            format!("ended_total{{{model},how=\"stop\"}} 2"),
            "# HELP wait_seconds Waits.".to_owned(),
            "# TYPE wait_seconds histogram".to_owned(),
            format!("wait_seconds_bucket{{{model},le=\"0.5\"}} 0"),
            format!("wait_seconds_bucket{{{model},le=\"1.0\"}} 1"),
            format!("wait_seconds_bucket{{{model},le=\"+Inf\"}} 2"),
            format!("wait_seconds_sum{{{model}}} 3.75"),
            format!("wait_seconds_count{{{model}}} 2"),
        ];
        assert_eq!(exposition.finish().lines().collect::<Vec<_>>(), expected);
    }
}
