//! What `/metrics` says, as values.

use std::borrow::Cow;

use inflight_observe::HistogramSnapshot;

/// The samples of a text in Prometheus' format.
///
/// # Source
/// "Exposition formats", Prometheus' documentation: text format 0.0.4.
pub(super) struct Exposition(Vec<Sample>);

struct Sample {
    name: String,
    labels: Vec<(String, String)>,
    value: f64,
}

impl Exposition {
    /// Lines that are no samples are left out.
    pub(super) fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        Self(lines.filter_map(Sample::parse).collect())
    }

    /// The first sample's value; `None`: nobody tells it.
    pub(super) fn value(&self, name: &str) -> Option<f64> {
        self.samples(name).next().map(|sample| sample.value)
    }

    /// What a label is, on the first sample of that name.
    pub(super) fn label(&self, name: &str, label: &str) -> Option<&str> {
        self.samples(name).next()?.label(label)
    }

    /// Values by what `label` is.
    pub(super) fn by_label(&self, name: &str, label: &str) -> Vec<(String, f64)> {
        let told = |sample: &Sample| Some((sample.label(label)?.to_owned(), sample.value));
        self.samples(name).filter_map(told).collect()
    }

    /// The buckets of a histogram, each without those below it.
    pub(super) fn histogram(&self, name: &str) -> Option<HistogramSnapshot> {
        let (mut bounds, mut counts, mut below) = (vec![], vec![], 0.0);
        for sample in self.samples(&format!("{name}_bucket")) {
            let bound: f64 = sample.label("le")?.parse().ok()?;
            if bound.is_finite() {
                bounds.push(bound);
            }
            counts.push((sample.value - below).max(0.0) as u64);
            below = sample.value;
        }
        let is_whole = !bounds.is_empty() && counts.len() == bounds.len() + 1;
        let sum_s = self.value(&format!("{name}_sum")).unwrap_or(0.0);
        is_whole.then_some(HistogramSnapshot { bounds: Cow::Owned(bounds), counts, sum_s })
    }

    fn samples(&self, name: &str) -> impl Iterator<Item = &Sample> {
        self.0.iter().filter(move |sample| sample.name == name)
    }
}

impl Sample {
    fn parse(line: &str) -> Option<Self> {
        let (key, value) = line.trim_end().rsplit_once(' ')?;
        let value = value.parse().ok()?;
        let (name, labels) = match key.split_once('{') {
            Some((name, labels)) => (name, labels_of(labels.strip_suffix('}')?)?),
            None => (key, vec![]),
        };
        Some(Self { name: name.to_owned(), labels, value })
    }

    fn label(&self, name: &str) -> Option<&str> {
        let named = self.labels.iter().find(|(other, _)| other == name);
        named.map(|(_, value)| value.as_str())
    }
}

/// Labels as in `a="b",c="d"`; in values a backslash goes before quotes, backslashes and an `n`.
fn labels_of(mut text: &str) -> Option<Vec<(String, String)>> {
    let mut labels = vec![];
    while !text.is_empty() {
        let (name, rest) = text.split_once("=\"")?;
        let (mut value, mut chars) = (String::new(), rest.char_indices());
        let end = loop {
            match chars.next()? {
                (at, '"') => break at,
                (_, '\\') => value.push(match chars.next()?.1 {
                    'n' => '\n',
                    other => other,
                }),
                (_, other) => value.push(other),
            }
        };
        labels.push((name.to_owned(), value));
        text = rest[end + 1..].trim_start_matches(',');
    }
    Some(labels)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Written by hand after the format's documentation.
    const TEXT: &str = r#"
# HELP rows Rows.
# TYPE rows gauge
rows{model="a\"b\\c,d\ne",x=""} 3
plain 2.5e-3
idle_total{model="m",cause="no_work"} 1.5
idle_total{model="m",cause="device"} 0.25
wait_bucket{le="0.5"} 1
wait_bucket{le="1.0"} 4
wait_bucket{le="+Inf"} 6
wait_sum 7.5
wait_count 6
broken{le="0.5 1
broken
"#;

    #[test]
    fn samples_are_read_as_the_format_has_them() {
        let read = Exposition::parse(TEXT);
        assert_eq!(read.value("rows"), Some(3.0));
        assert_eq!(read.label("rows", "model"), Some("a\"b\\c,d\ne"));
        assert_eq!(read.label("rows", "x"), Some(""));
        assert_eq!(read.value("plain"), Some(0.0025));
        assert_eq!(read.value("broken"), None);
        let idle = [("no_work".to_owned(), 1.5), ("device".to_owned(), 0.25)];
        assert_eq!(read.by_label("idle_total", "cause"), idle);
    }

    #[test]
    fn buckets_lose_those_below_them() {
        let read = Exposition::parse(TEXT);
        let wait = read.histogram("wait").unwrap();
        assert_eq!((&wait.bounds[..], &wait.counts[..]), (&[0.5, 1.0][..], &[1, 3, 2][..]));
        assert_eq!(wait.sum_s, 7.5);
        // Rank 3 of 6 is two thirds into the second bucket.
        assert!((wait.quantile(0.5).unwrap() - (0.5 + 0.5 * 2.0 / 3.0)).abs() < 1e-9);
        assert_eq!(read.histogram("plain"), None);
    }
}
