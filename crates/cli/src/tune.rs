//! `inflight tune`: by which kernels matrix products are computed.

use std::num::NonZeroUsize;

use anyhow::{Result, bail, ensure};
use inflight_backend::cuda::{CudaMatrix, Tuned, TunedKind, TunedProduct};
use inflight_backend::{Backend, Ceilings, CudaBackend, Dtype, HostTensor, TensorData};
use inflight_model::ModelConfig;

use crate::args::TuneArgs;
use crate::device::{Chosen, GpuUse, choose};
use crate::progress::is_watched;
use crate::start::sizes_of;

/// Bytes that matrices of one shape have together at least: more than an L2 cache holds.
const COLD_BYTES: usize = 256 << 20;
/// Most rows of activations: more are several batches.
const MOST_ROWS: usize = 8192;
/// Most rows of logits: only sampled tokens have some.
const MOST_LOGIT_ROWS: usize = 256;

/// One matrix of a layer, or the one of logits.
struct Shape {
    name: &'static str,
    rows: usize,
    cols: usize,
    bias: bool,
    kind: TunedKind,
}

pub(crate) fn tune(args: &TuneArgs) -> Result<()> {
    let rows: Vec<usize> = args.rows.iter().copied().map(NonZeroUsize::get).collect();
    let over = rows.iter().find(|rows| **rows > MOST_ROWS);
    ensure!(over.is_none(), "--rows: {MOST_ROWS} is the most");
    let Chosen::Cuda(backend) = choose(args.device, GpuUse::default())? else {
        bail!("--device: only GPUs have kernels to choose from");
    };
    let shapes = shapes(&sizes_of(args.config, &args.model, args.no_progress)?);
    let ceilings = backend.ceilings(Dtype::BF16)?;
    println!("{}\n", backend.description());
    println!(
        "{:20} {:>5}  {:18} {:>9}  rates, of what was measured",
        "product", "rows", "by", "us"
    );
    for shape in &shapes {
        let _weights = weights(&backend, shape)?;
        let most = if shape.kind == TunedKind::Logits { MOST_LOGIT_ROWS } else { MOST_ROWS };
        for &num_rows in rows.iter().filter(|rows| **rows <= most) {
            if is_watched(args.no_progress) {
                eprint!("\r\x1b[K{}, {num_rows} rows", shape.name);
            }
            let tuned = backend.tune(&shape.product(num_rows), args.again)?;
            if is_watched(args.no_progress) {
                eprint!("\r\x1b[K");
            }
            println!("{}", line(shape, num_rows, &tuned, &ceilings));
        }
    }
    Ok(())
}

/// One line of the table.
fn line(shape: &Shape, num_rows: usize, tuned: &Tuned, ceilings: &Ceilings) -> String {
    let (seconds, elements) = (tuned.time.as_secs_f64(), (shape.rows * shape.cols) as f64);
    let bytes_per_s = 2.0 * elements / seconds;
    let operations_per_s = 2.0 * elements * num_rows as f64 / seconds;
    format!(
        "{:20} {num_rows:>5}  {:18} {:>9.1}  {:>6.0} GB/s {:>5.1} %  {:>6.1} TFLOP/s {:>5.1} %",
        shape.name,
        tuned.method,
        1e6 * seconds,
        bytes_per_s / 1e9,
        100.0 * bytes_per_s / ceilings.bytes_per_s,
        operations_per_s / 1e12,
        100.0 * operations_per_s / ceilings.operations_per_s,
    )
}

impl Shape {
    fn product(&self, num_rows: usize) -> TunedProduct {
        let Self { rows, cols, bias, kind, .. } = *self;
        TunedProduct { num_rows, rows, cols, bias, kind }
    }
}

/// The matrices of a model.
fn shapes(config: &ModelConfig) -> Vec<Shape> {
    let (hidden, ffn) = (config.hidden_size, config.ffn_size);
    let shape = |name, rows, cols, bias, kind| Shape { name, rows, cols, bias, kind };
    let (added, out_bias) = (TunedKind::Added, config.attention_output_bias);
    vec![
        shape("qkv", config.qkv_len(), hidden, config.qkv_bias, TunedKind::Rotated),
        shape("attention output", hidden, config.q_len(), out_bias, added),
        shape("gate and up", 2 * ffn, hidden, config.ffn_bias, TunedKind::Gated),
        shape("down", hidden, ffn, config.ffn_bias, added),
        shape("logits", config.vocab_size, hidden, false, TunedKind::Logits),
    ]
}

/// Random matrices of a shape, enough that no cache holds them.
fn weights(backend: &CudaBackend, shape: &Shape) -> Result<Vec<CudaMatrix>> {
    let bytes = 2 * shape.rows * shape.cols;
    let weight = |seed| {
        let data = TensorData::Random { seed, std: 0.02 };
        let (name, dtype, shape) = ("tune".into(), Dtype::F32, vec![shape.rows, shape.cols]);
        Ok(backend.load_matrix(&[HostTensor { name, dtype, shape, data }])?)
    };
    (0..COLD_BYTES.div_ceil(bytes.max(1)) as u64).map(weight).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn parse(arguments: &[&str]) -> TuneArgs {
        let arguments = ["inflight", "tune"].iter().chain(arguments);
        let Command::Tune(args) = Cli::try_parse_from(arguments).unwrap().command else {
            panic!("tune")
        };
        args
    }

    #[test]
    fn what_cannot_be_tuned_is_refused() {
        for (arguments, reason) in [
            (&["--config", "tiny", "--device", "cpu"][..], "--device: only GPUs"),
            (&["--config", "tiny", "--device", "cuda:1000000"], "--device cuda: no CUDA device"),
            (&["--config", "tiny", "--rows", "9000"], "--rows: 8192"),
        ] {
            let error = format!("{:#}", tune(&parse(arguments)).unwrap_err());
            assert!(error.starts_with(reason), "{error}");
        }
    }

    #[test]
    fn an_8b_model_has_five_matrices() {
        let args = parse(&["--config", "llama-3.1-8b"]);
        let config = sizes_of(args.config, &args.model, args.no_progress).unwrap();
        let sides: Vec<_> = shapes(&config).iter().map(|s| (s.rows, s.cols)).collect();
        let expected = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128_256, 4096)];
        assert_eq!(sides, expected);
    }

    #[test]
    fn rates_are_of_the_weights_and_of_the_operations() {
        let shape =
            Shape { name: "down", rows: 1000, cols: 1000, bias: false, kind: TunedKind::Added };
        let tuned = Tuned { method: "hopper".into(), time: Duration::from_micros(1) };
        let ceilings =
            Ceilings { bytes_per_s: 4e12, operations_per_s: 1e15, bytes_by: "", operations_by: "" };
        // Two million bytes and 20 million operations in a microsecond.
        let line = line(&shape, 10, &tuned, &ceilings);
        assert!(
            line.contains("2000 GB/s  50.0 %") && line.contains("20.0 TFLOP/s   2.0 %"),
            "{line}"
        );
    }
}
