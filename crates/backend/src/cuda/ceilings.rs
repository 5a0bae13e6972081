//! What this GPU could do at best: copying its memory, and cuBLASLt's product of large matrices.

use std::time::Duration;

use cudarc::driver::sys;

use super::{backend::CudaBackend, check::check, memory::Allocation, stream::CudaStream};
use crate::{
    Backend, BackendError, Ceilings, Dtype, HostTensor, TensorData,
    ops::{Matmul, RmsNorm},
};

/// Bytes that are copied at once, far more than the L2 cache holds.
const COPY_BYTES: usize = 1 << 30;
/// Rows and columns of the matrices.
const SIDE: usize = 8192;
/// Times are of so many in a row; the best of so many counts.
const NUM_IN_A_ROW: usize = 4;
const NUM_REPEATS: usize = 5;

pub(super) fn measure(backend: &CudaBackend) -> Result<Ceilings, BackendError> {
    let stream = backend.create_stream("ceilings")?;
    let copy = copy_time(backend, &stream)?;
    let product = product_time(backend, &stream)?;
    Ok(Ceilings {
        bytes_per_s: 2.0 * COPY_BYTES as f64 / copy.as_secs_f64(),
        operations_per_s: 2.0 * (SIDE as f64).powi(3) / product.as_secs_f64(),
        bytes_by: "copying, bytes read and written together",
        operations_by: "cuBLASLt, 8192 x 8192 x 8192, bf16 and random",
    })
}

fn copy_time(backend: &CudaBackend, stream: &CudaStream) -> Result<Duration, BackendError> {
    let device = backend.device();
    let from = Allocation::new(device, "ceilings", COPY_BYTES)?;
    let to = Allocation::new(device, "ceilings", COPY_BYTES)?;
    let (from, to) = (from.address(), to.address());
    best_time(backend, stream, &|| {
        // SAFETY: both ranges are whole allocations, which live until the stream was waited for.
        let copied = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, COPY_BYTES, stream.raw()) };
        check("cuMemcpyDtoDAsync", copied)
    })
}

/// Both operands are random: constants multiply faster, since fewer bits change.
fn product_time(backend: &CudaBackend, stream: &CudaStream) -> Result<Duration, BackendError> {
    let random = |shape: Vec<usize>, seed| {
        let data = TensorData::Random { seed, std: 1.0 };
        HostTensor { name: "ceilings".into(), dtype: Dtype::F32, shape, data }
    };
    let weight = backend.load_matrix(&[random(vec![SIDE, SIDE], 1)])?;
    let numbers = backend.load_vector(&[random(vec![SIDE * SIDE], 2)])?;
    let ones = backend.load_vector(&[random(vec![SIDE], 3)])?;
    let x = backend.alloc_activations("ceilings", SIDE * SIDE)?;
    let out = backend.alloc_activations("ceilings", SIDE * SIDE)?;
    let norm =
        RmsNorm { x: &numbers, weight: &ones, out: &x, num_rows: SIDE, len: SIDE, eps: 1e-5 };
    backend.rms_norm(norm, stream)?;
    best_time(backend, stream, &|| {
        let (bias, accumulate) = (None, false);
        let args = Matmul { x: &x, weight: &weight, bias, out: &out, num_rows: SIDE, accumulate };
        backend.matmul_by_library(args, stream)
    })
}

/// Of one of several in a row.
fn best_time(
    backend: &CudaBackend,
    stream: &CudaStream,
    enqueue: &dyn Fn() -> Result<(), BackendError>,
) -> Result<Duration, BackendError> {
    let (started, ended) = (backend.create_event()?, backend.create_event()?);
    enqueue()?;
    let mut best = Duration::MAX;
    for _ in 0..NUM_REPEATS {
        backend.record(&started, stream)?;
        (0..NUM_IN_A_ROW).try_for_each(|_| enqueue())?;
        backend.record(&ended, stream)?;
        backend.synchronize(&ended)?;
        best = best.min(backend.elapsed(&started, &ended)?);
    }
    Ok(best.max(Duration::from_nanos(1)) / NUM_IN_A_ROW as u32)
}
