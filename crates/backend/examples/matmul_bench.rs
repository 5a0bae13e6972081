//! Speed of the CPU backend's matrix products on the shapes of SmolLM2-135M.
//!
//! ```text
//! cargo run --release -p inflight-backend --example matmul_bench \
//!     [THREADS [DTYPE [ROWSxCOLS [LEVEL]]]]
//! ```
//!
//! Every product takes another copy of the weights, until they no longer fit the caches, as in a
//! model. Prints medians: time, bytes of weights and operations a second. LEVEL: instructions to
//! use, `plain`, `avx2`, `avx512` or `amx`, by default the best that there are.

use std::{env, process::ExitCode, time::Instant};

use inflight_backend::{
    Backend, BackendError, CpuBackend, CpuConfig, Dtype, HostTensor, SimdLevel, TensorData,
    ops::Matmul,
};

const DTYPES: [Dtype; 4] = [Dtype::Q4_1, Dtype::Q8_0, Dtype::BF16, Dtype::F32];
const SHAPES: [(usize, usize); 5] =
    [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)];
const NUM_ROWS: [usize; 5] = [1, 8, 32, 128, 512];

/// Bytes of weights to cycle through.
const COLD_BYTES: usize = 96 << 20;

/// Outputs above this size are left out: logits of a whole prompt are never computed.
const MAX_OUT_LEN: usize = 8 << 20;

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("matmul_bench: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Result<(), String> {
    let number = |text: &String| text.parse().map_err(|_| format!("no number of threads: {text}"));
    let threads = arguments.first().map(number).transpose()?;
    let dtypes = match arguments.get(1) {
        Some(name) => vec![dtype(name).ok_or_else(|| format!("no weight type {name}"))?],
        None => DTYPES.to_vec(),
    };
    let shapes = match arguments.get(2) {
        Some(text) => vec![shape(text).ok_or_else(|| format!("no shape ROWSxCOLS: {text}"))?],
        None => SHAPES.to_vec(),
    };
    let simd = match arguments.get(3) {
        Some(name) => level(name).ok_or_else(|| format!("no level {name}"))?,
        None => SimdLevel::detect(),
    };
    for num_threads in threads.map_or(vec![1, 2], |threads| vec![threads]) {
        let config = CpuConfig { num_threads, simd, ..CpuConfig::detect() };
        let backend = CpuBackend::new(config).map_err(|error| error.to_string())?;
        println!("{}", backend.description());
        for dtype in &dtypes {
            for shape in &shapes {
                measure(&backend, *dtype, *shape).map_err(|error| error.to_string())?;
            }
        }
    }
    Ok(())
}

fn dtype(name: &str) -> Option<Dtype> {
    use Dtype::{BF16, F16, F32, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
    let all = [F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4K, Q5K, Q6K];
    all.into_iter().find(|dtype| dtype.name().eq_ignore_ascii_case(name))
}

fn level(name: &str) -> Option<SimdLevel> {
    SimdLevel::ALL.into_iter().find(|level| format!("{level:?}").eq_ignore_ascii_case(name))
}

fn shape(text: &str) -> Option<(usize, usize)> {
    let (rows, cols) = text.split_once('x')?;
    Some((rows.parse().ok()?, cols.parse().ok()?))
}

/// Measures one weight at every number of rows.
fn measure(
    backend: &CpuBackend,
    dtype: Dtype,
    (rows, cols): (usize, usize),
) -> Result<(), BackendError> {
    let tensor = weight(dtype, rows, cols);
    let first = backend.load_matrix(std::slice::from_ref(&tensor))?;
    let bytes = backend.matrix_bytes(&first);
    let mut weights = vec![first];
    while weights.len() * bytes < COLD_BYTES {
        weights.push(backend.load_matrix(std::slice::from_ref(&tensor))?);
    }
    let stream = backend.create_stream("compute")?;
    for num_rows in NUM_ROWS.into_iter().filter(|num_rows| num_rows * rows <= MAX_OUT_LEN) {
        let x = backend.alloc_activations("x", num_rows * cols)?;
        let out = backend.alloc_activations("out", num_rows * rows)?;
        let (done, mut seconds) = (backend.create_event()?, Vec::new());
        let start = Instant::now();
        while seconds.len() < 7 || start.elapsed().as_millis() < 100 {
            // Several at once, so that the hand-over to the stream is hidden as in a real step.
            let launched = Instant::now();
            for i in 0..8 {
                let weight = &weights[(seconds.len() * 8 + i) % weights.len()];
                let (bias, accumulate) = (None, false);
                let args = Matmul { x: &x, weight, bias, out: &out, num_rows, accumulate };
                backend.matmul(args, &stream)?;
            }
            backend.record(&done, &stream)?;
            backend.synchronize(&done)?;
            seconds.push(launched.elapsed().as_secs_f64() / 8.0);
        }
        seconds.sort_by(f64::total_cmp);
        let median = seconds[seconds.len() / 2];
        let (giga_bytes, giga_ops) =
            (bytes as f64 / 1e9, 2e-9 * num_rows as f64 * rows as f64 * cols as f64);
        println!(
            "{dtype:5} {rows:6} x {cols:<5} M = {num_rows:<4} {:9.1} us {:7.1} GB/s {:8.1} GFLOP/s",
            median * 1e6,
            giga_bytes / median,
            giga_ops / median,
        );
    }
    Ok(())
}

/// Weights of pseudorandom bytes; their values do not matter for speed.
fn weight(dtype: Dtype, rows: usize, cols: usize) -> HostTensor {
    let num_bytes = rows * dtype.row_bytes(cols).expect("columns are whole blocks");
    let bytes = (0..num_bytes).map(|i| (i as u32).wrapping_mul(2_654_435_761) as u8 & 0x3b);
    HostTensor {
        name: "weight".to_string(),
        dtype,
        shape: vec![rows, cols],
        data: TensorData::Owned(bytes.collect()),
    }
}
