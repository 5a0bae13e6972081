//! What was measured, as a table and as JSON.

use std::fmt;

use inflight_backend::Ceilings;
use serde::Serialize;

/// What an operator cannot do without: every input read and every output written once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Work {
    pub(super) bytes: usize,
    /// Multiplications and additions.
    pub(super) operations: f64,
}

/// One operator at one size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OperatorTiming {
    /// Its name.
    pub operator: String,
    /// Rows of a product, tokens, or sequences.
    pub num_rows: usize,
    /// Tokens of each sequence, if that matters.
    pub context: Option<usize>,
    /// Microseconds of a call, the median.
    pub us: f64,
    /// Bytes that must move.
    pub bytes: usize,
    /// Multiplications and additions.
    pub operations: f64,
    /// 10^9 of those bytes a second.
    pub gb_per_s: f64,
    /// 10^12 of those operations a second.
    pub tera_operations_per_s: f64,
    /// Another way to compute the same.
    pub peer: Option<Peer>,
}

/// What an operator is compared with.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Peer {
    /// Its name.
    pub name: &'static str,
    /// Microseconds of a call, the median.
    pub us: f64,
}

/// All operators, and what the device could do at best.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KernelReport {
    /// Which device.
    pub device: String,
    /// 10^9 bytes a second, measured.
    pub ceiling_gb_per_s: f64,
    /// How.
    pub ceiling_bytes_by: &'static str,
    /// 10^12 multiplications and additions a second, measured.
    pub ceiling_tera_operations_per_s: f64,
    /// How.
    pub ceiling_operations_by: &'static str,
    /// In the order measured, each with its share of what the ceilings allow.
    pub operators: Vec<Judged>,
}

/// An operator and how near to the ceilings it is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Judged {
    /// What was measured.
    #[serde(flatten)]
    pub timing: OperatorTiming,
    /// Microseconds that the ceilings allow: for the bytes or the operations, whichever take
    /// longer.
    pub roofline_us: f64,
    /// That time over the measured one.
    pub roofline_fraction: f64,
}

impl OperatorTiming {
    pub(super) fn new(operator: &str, num_rows: usize, work: Work, seconds: f64) -> Self {
        let Work { bytes, operations } = work;
        let seconds = seconds.max(1e-9);
        Self {
            operator: operator.to_owned(),
            num_rows,
            context: None,
            us: seconds * 1e6,
            bytes,
            operations,
            gb_per_s: bytes as f64 / seconds / 1e9,
            tera_operations_per_s: operations / seconds / 1e12,
            peer: None,
        }
    }
}

impl Peer {
    pub(super) fn new(name: &'static str, seconds: f64) -> Self {
        Self { name, us: seconds * 1e6 }
    }
}

impl KernelReport {
    pub(super) fn new(device: String, ceilings: Ceilings, timings: Vec<OperatorTiming>) -> Self {
        let Ceilings { bytes_per_s, operations_per_s, .. } = ceilings;
        let judge = |timing: OperatorTiming| {
            let memory_us = timing.bytes as f64 / bytes_per_s * 1e6;
            let roofline_us = memory_us.max(timing.operations / operations_per_s * 1e6);
            Judged { roofline_us, roofline_fraction: roofline_us / timing.us, timing }
        };
        Self {
            device,
            ceiling_gb_per_s: bytes_per_s / 1e9,
            ceiling_bytes_by: ceilings.bytes_by,
            ceiling_tera_operations_per_s: operations_per_s / 1e12,
            ceiling_operations_by: ceilings.operations_by,
            operators: timings.into_iter().map(judge).collect(),
        }
    }
}

/// Operations a second in the unit that suits the device.
fn operations(tera: f64, ceiling: f64) -> f64 {
    if ceiling < 10.0 { tera * 1e3 } else { tera }
}

impl fmt::Display for KernelReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ceiling = self.ceiling_tera_operations_per_s;
        let unit = if ceiling < 10.0 { "GFLOP/s" } else { "TFLOP/s" };
        writeln!(f, "{}", self.device)?;
        writeln!(f, "memory  {:8.1} GB/s, {}", self.ceiling_gb_per_s, self.ceiling_bytes_by)?;
        let best = operations(ceiling, ceiling);
        writeln!(f, "matrix  {best:8.1} {unit}, {}\n", self.ceiling_operations_by)?;
        write!(f, "{:18} {:>6} {:>8} {:>10} {:>9}", "operator", "rows", "context", "us", "GB/s")?;
        writeln!(f, " {unit:>9} {:>9}  beside", "roofline")?;
        for Judged { timing, roofline_fraction, .. } in &self.operators {
            let OperatorTiming { operator, num_rows, us, gb_per_s, .. } = timing;
            let context = timing.context.map_or(String::new(), |len| len.to_string());
            let rate = operations(timing.tera_operations_per_s, ceiling);
            let share = roofline_fraction * 100.0;
            write!(f, "{operator:18} {num_rows:6} {context:>8} {us:10.2} {gb_per_s:9.1}")?;
            write!(f, " {rate:9.1} {share:7.1} %")?;
            match &timing.peer {
                Some(Peer { name, us }) => writeln!(f, "  {name} {us:.2} us")?,
                None => writeln!(f)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(timings: Vec<OperatorTiming>) -> KernelReport {
        let ceilings = Ceilings {
            bytes_per_s: 4e12,
            operations_per_s: 800e12,
            bytes_by: "copying",
            operations_by: "products",
        };
        KernelReport::new("a GPU".into(), ceilings, timings)
    }

    /// 4 MB take 1 us of memory, 1.6 GFLOP take 2 us of the matrix units.
    #[test]
    fn the_slower_of_memory_and_arithmetic_is_the_roofline() {
        let product = Work { bytes: 4_000_000, operations: 1.6e9 };
        let norm = Work { bytes: 8_000_000, operations: 1.6e6 };
        let report = report(vec![
            OperatorTiming::new("product", 64, product, 4e-6),
            OperatorTiming::new("norm", 64, norm, 2.5e-6),
        ]);
        let [product, norm] = &report.operators[..] else { panic!("two operators") };
        assert!((product.roofline_us - 2.0).abs() < 1e-9);
        assert!((product.roofline_fraction - 0.5).abs() < 1e-9);
        assert!((product.timing.tera_operations_per_s - 400.0).abs() < 1e-6);
        assert!((norm.roofline_us - 2.0).abs() < 1e-9);
        assert!((norm.roofline_fraction - 0.8).abs() < 1e-9);
        assert!((norm.timing.gb_per_s - 3200.0).abs() < 1e-6);
    }

    #[test]
    fn the_table_names_what_stands_beside() {
        let work = Work { bytes: 4_000_000, operations: 1.6e9 };
        let peer = Some(Peer::new("library", 5e-6));
        let timing = OperatorTiming { peer, ..OperatorTiming::new("qkv", 64, work, 4e-6) };
        let table = report(vec![timing]).to_string();
        assert!(table.contains("4000.0 GB/s, copying"), "{table}");
        assert!(table.contains("800.0 TFLOP/s, products"), "{table}");
        let row = table.lines().last().expect("a row");
        let fields: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(
            fields,
            ["qkv", "64", "4.00", "1000.0", "400.0", "50.0", "%", "library", "5.00", "us"]
        );
    }
}
