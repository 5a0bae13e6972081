//! `inflight bench compare`: two files of figures side by side.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use inflight_bench::plot::{Bar, Bars, Plot, Sheet};
use inflight_bench::{Better, ComparedFigure, Comparison};
use serde_json::{Value, json};

use super::outputs::Outputs;
use crate::args::CompareArgs;

/// A figure that changed by less is as good.
const AS_GOOD: f64 = 0.01;
/// Most bars of a plot.
const MAX_BARS: usize = 24;

pub(super) fn bench_compare(args: &CompareArgs) -> Result<()> {
    let outputs = Outputs::create(&args.files)?;
    let comparison = Comparison::new(&read(&args.a)?, &read(&args.b)?);
    ensure!(
        !comparison.figures.is_empty(),
        "{} and {} have no figure in common: are they of the same experiment?",
        args.a.display(),
        args.b.display()
    );
    print_differences(&comparison);
    let shown = |figure: &&ComparedFigure| args.all || figure.better.is_some();
    let figures: Vec<_> = comparison.figures.iter().filter(shown).collect();
    print_figures(&figures);
    let told = || -> Result<Value> {
        let mut told = serde_json::to_value(&comparison)?;
        (told["a"], told["b"]) = (json!(args.a), json!(args.b));
        Ok(told)
    };
    outputs.write(told, || sheet(args, &figures))
}

fn read(path: &Path) -> Result<Value> {
    let text = fs::read(path).with_context(|| path.display().to_string())?;
    serde_json::from_slice(&text).with_context(|| format!("{} is no JSON", path.display()))
}

fn print_differences(comparison: &Comparison) {
    let Comparison { differences, only_a, only_b, .. } = comparison;
    for (name, a, b) in differences {
        println!("{name}: {a} | {b}");
    }
    if !only_a.is_empty() || !only_b.is_empty() {
        println!("only A has {} entries, only B {}", only_a.len(), only_b.len());
    }
    println!();
}

fn print_figures(figures: &[&ComparedFigure]) {
    let longest = figures.iter().map(|figure| figure.name.chars().count()).max().unwrap_or(0);
    println!("{:longest$} {:>14} {:>14} {:>8}", "", "A", "B", "B / A");
    for figure in figures {
        let ratio = figure.ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.3}"));
        let ComparedFigure { name, a, b, .. } = figure;
        let verdict = verdict(figure);
        println!("{name:longest$} {:>14} {:>14} {ratio:>8}  {verdict}", short(*a), short(*b));
    }
}

/// Whether the second is better.
fn verdict(figure: &ComparedFigure) -> &'static str {
    let (Some(better), Some(ratio)) = (figure.better, figure.ratio) else { return "" };
    let is_higher = ratio > 1.0;
    match better {
        _ if (ratio - 1.0).abs() < AS_GOOD => "",
        Better::Higher if is_higher => "better",
        Better::Lower if !is_higher => "better",
        Better::Higher | Better::Lower => "worse",
    }
}

/// Four digits that count.
fn short(value: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    let digits = 3 - value.abs().log10().floor() as i32;
    format!("{value:.*}", digits.clamp(0, 9) as usize)
}

fn sheet(args: &CompareArgs, figures: &[&ComparedFigure]) -> Sheet {
    let bar = |figure: &&ComparedFigure| {
        let label = figure.name.strip_prefix("runs").unwrap_or(&figure.name).to_owned();
        Some(Bar { label, values: vec![figure.ratio?] })
    };
    Sheet {
        heading: "B over A".to_owned(),
        note: format!("A: {}, B: {}", args.a.display(), args.b.display()),
        plots: figures
            .chunks(MAX_BARS / 2)
            .map(|part| {
                Plot::Bars(Bars {
                    title: "B / A".to_owned(),
                    unit: String::new(),
                    names: vec![String::new()],
                    bars: part.iter().filter_map(bar).collect(),
                })
            })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_four_digits() {
        let check = |value, expected| assert_eq!(short(value), expected);
        check(0.0, "0");
        check(1362.41, "1362");
        check(4.4567, "4.457");
        check(0.012_345, "0.01235");
        check(123_456.0, "123456");
    }

    #[test]
    fn a_change_is_better_or_worse_by_its_kind() {
        let check = |better, ratio, expected| {
            let figure =
                ComparedFigure { name: "x".into(), a: 1.0, b: ratio, ratio: Some(ratio), better };
            assert_eq!(verdict(&figure), expected);
        };
        check(Some(Better::Lower), 0.9, "better");
        check(Some(Better::Lower), 1.1, "worse");
        check(Some(Better::Higher), 1.1, "better");
        check(Some(Better::Higher), 1.005, "");
        check(None, 2.0, "");
    }
}
