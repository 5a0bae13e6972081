//! Two files of figures side by side, of any experiment.

use serde::Serialize;
use serde_json::{Map, Value};

/// Which way a figure is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// Times, for example.
    Lower,
    /// Rates, for example.
    Higher,
}

/// One figure of both files.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ComparedFigure {
    /// Where it is.
    pub name: String,
    /// In the first file.
    pub a: f64,
    /// In the second.
    pub b: f64,
    /// The second over the first; `None` over 0.
    pub ratio: Option<f64>,
    /// Which way it is better, if its name tells.
    pub better: Option<Better>,
}

/// What two files have in common and what not.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Comparison {
    /// Figures that both have, in the first one's order.
    pub figures: Vec<ComparedFigure>,
    /// What is no number and differs: name, first, second.
    pub differences: Vec<(String, String, String)>,
    /// Names of what only the first has.
    pub only_a: Vec<String>,
    /// Names of what only the second has.
    pub only_b: Vec<String>,
}

/// Numbers that tell what was measured, not how it came out.
const SETTINGS: [&str; 10] = [
    "num_rows",
    "context",
    "limit",
    "batch_size",
    "concurrency",
    "rate",
    "chunk",
    "target_ms",
    "interval_ms",
    "scale",
];
/// Texts and switches that tell members of a list apart.
const NAMES: [&str; 5] = ["operator", "mode", "phase", "overlap", "name"];

impl Comparison {
    /// Of two files' contents.
    #[must_use]
    pub fn new(a: &Value, b: &Value) -> Self {
        let (a, b) = (leaves(a), leaves(b));
        let find = |all: &[(String, Value)], name: &str| {
            all.iter().find(|(other, _)| other == name).map(|(_, value)| value.clone())
        };
        let mut comparison = Self::default();
        for (name, in_a) in &a {
            match (find(&b, name), in_a.as_f64()) {
                (None, _) => comparison.only_a.push(name.clone()),
                (Some(in_b), Some(in_a)) if in_b.is_number() => {
                    let in_b = in_b.as_f64().unwrap_or(f64::NAN);
                    comparison.figures.push(ComparedFigure::new(name, in_a, in_b));
                }
                (Some(in_b), _) if in_b != *in_a => {
                    comparison.differences.push((name.clone(), shown(in_a), shown(&in_b)));
                }
                _ => {}
            }
        }
        let only_b = b.into_iter().map(|(name, _)| name).filter(|name| find(&a, name).is_none());
        comparison.only_b = only_b.collect();
        comparison
    }
}

impl ComparedFigure {
    fn new(name: &str, a: f64, b: f64) -> Self {
        let (name, better) = (name.to_owned(), better(name));
        Self { name, a, b, ratio: (a != 0.0).then_some(b / a), better }
    }
}

/// Names end with their units, quantiles perhaps behind.
fn better(name: &str) -> Option<Better> {
    let mut parts = name.rsplit('.');
    let last = parts.next()?;
    let is_quantile = matches!(last, "p50" | "p90" | "p95" | "p99" | "mean" | "max");
    let key = if is_quantile { parts.next()? } else { last };
    // One of a list of values.
    let key = key.split_once('[').map_or(key, |(key, _)| key);
    let ends = |ends: &[&str]| ends.iter().any(|end| key.ends_with(end));
    match () {
        () if SETTINGS.contains(&key) || key.starts_with("ceiling") => None,
        () if key == "client_core_fraction" => None,
        () if ends(&["per_s", "_fraction"]) || name.ends_with("goodput.fraction") => {
            Some(Better::Higher)
        }
        () if ends(&["_s", "_ms", "_us", "ms_per_step"]) || key == "us" => Some(Better::Lower),
        () if name.contains("bubbles_s") => Some(Better::Lower),
        () => None,
    }
}

fn shown(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Everything that holds nothing else, by name.
fn leaves(value: &Value) -> Vec<(String, Value)> {
    let mut all = Vec::new();
    collect("", value, &mut all);
    all
}

fn collect(name: &str, value: &Value, all: &mut Vec<(String, Value)>) {
    let below = |key: &str| if name.is_empty() { key.to_owned() } else { format!("{name}.{key}") };
    match value {
        Value::Object(members) => {
            for (key, member) in members {
                collect(&below(key), member, all);
            }
        }
        Value::Array(members) => {
            let mut seen = Vec::new();
            for (i, member) in members.iter().enumerate() {
                let label = member.as_object().and_then(label).unwrap_or_else(|| i.to_string());
                let times = seen.iter().filter(|other| **other == label).count();
                seen.push(label.clone());
                let again = if times > 0 { format!(" #{}", times + 1) } else { String::new() };
                collect(&format!("{name}[{label}{again}]"), member, all);
            }
        }
        leaf => all.push((name.to_owned(), leaf.clone())),
    }
}

/// What tells a member of a list from others.
fn label(member: &Map<String, Value>) -> Option<String> {
    let names = member.iter().filter_map(|(key, value)| match value {
        Value::String(text) if NAMES.contains(&key.as_str()) => Some(text.clone()),
        Value::Bool(is_on) if NAMES.contains(&key.as_str()) => {
            Some(format!("{key} {}", if *is_on { "on" } else { "off" }))
        }
        Value::Number(number) if SETTINGS.contains(&key.as_str()) => {
            Some(format!("{key} {number}"))
        }
        _ => None,
    });
    let names: Vec<_> = names.collect();
    (!names.is_empty()).then(|| names.join(", "))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn members_of_lists_are_matched_by_what_they_are() {
        let row = |operator: &str, num_rows: u32, us: f64| {
            let gb_per_s = 1e3 / us;
            json!({"operator": operator, "num_rows": num_rows, "us": us, "gb_per_s": gb_per_s})
        };
        let a = json!({"device": "x", "operators": [row("qkv", 1, 10.0), row("qkv", 8, 20.0)]});
        let b = json!({"device": "y", "operators": [row("qkv", 8, 10.0), row("down", 1, 5.0)]});
        let comparison = Comparison::new(&a, &b);
        let figures: Vec<_> =
            comparison.figures.iter().map(|f| (f.name.as_str(), f.ratio, f.better)).collect();
        assert_eq!(
            figures,
            [
                ("operators[qkv, num_rows 8].num_rows", Some(1.0), None),
                ("operators[qkv, num_rows 8].us", Some(0.5), Some(Better::Lower)),
                ("operators[qkv, num_rows 8].gb_per_s", Some(2.0), Some(Better::Higher)),
            ]
        );
        let device = ("device".to_owned(), "x".to_owned(), "y".to_owned());
        assert!(comparison.differences.contains(&device));
        assert!(comparison.only_a.contains(&"operators[qkv, num_rows 1].us".to_owned()));
        assert!(comparison.only_b.contains(&"operators[down, num_rows 1].us".to_owned()));
    }

    #[test]
    fn repeated_members_are_matched_in_order() {
        let runs = |rates: &[f64]| {
            let run = |rate: &f64| json!({"concurrency": 8, "output_tokens_per_s": rate});
            json!({"runs": rates.iter().map(run).collect::<Vec<_>>()})
        };
        let comparison = Comparison::new(&runs(&[10.0, 20.0]), &runs(&[30.0, 80.0]));
        let rates = comparison.figures.iter().filter(|f| f.better.is_some());
        let ratios: Vec<_> = rates.map(|figure| figure.ratio).collect();
        assert_eq!(ratios, [Some(3.0), Some(4.0)]);
        assert!(comparison.figures[3].name.contains("#2"), "{:?}", comparison.figures[3]);
    }

    #[test]
    fn names_tell_which_way_is_better() {
        let check = |name: &str, expected| assert_eq!(better(name), expected, "{name}");
        check("runs[overlap on].wall_s", Some(Better::Lower));
        check("runs[0].output_tokens_per_s", Some(Better::Higher));
        check("runs[0].device_busy_fraction", Some(Better::Higher));
        check("runs[0].ttft_ms.p50", Some(Better::Lower));
        check("runs[0].ttft_ms.n", None);
        check("phases[host].ttft_ms[0]", Some(Better::Lower));
        check("interval_ms", None);
        check("runs[0].quarters[1].ms_per_step", Some(Better::Lower));
        check("runs[0].host[launch].median_us", Some(Better::Lower));
        check("runs[0].bubbles_s.host_waits", Some(Better::Lower));
        check("runs[0].goodput.fraction", Some(Better::Higher));
        check("runs[0].client_core_fraction", None);
        check("ceiling_gb_per_s", None);
        check("runs[0].num_steps", None);
    }
}
