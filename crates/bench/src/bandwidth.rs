//! What the memory can do: copies to and from the device, and an operator that only moves values.

use anyhow::Result;
use inflight_backend::{Activation, Backend, Dtype, ops::GateAndMul};

/// Words of a copy: 64 MiB, larger than caches.
const COPY_WORDS: usize = 16 << 20;
/// Bytes of the operator's input.
const OPERATOR_BYTES: usize = 256 << 20;
/// Row length of the operator.
const ROW_LEN: usize = 4096;
/// The best of so many counts, since others' work only slows.
const NUM_REPEATS: usize = 5;

/// How fast something moves.
#[derive(Clone, Debug, PartialEq)]
pub struct Bandwidth {
    /// What, for people.
    pub what: &'static str,
    /// 10^9 bytes a second, read and written ones together where both are on the device.
    pub gb_per_s: f64,
}

/// Measures `backend`, by events on a stream.
///
/// # Errors
/// Too little memory, or a lost device.
pub fn measure_bandwidths<B: Backend>(backend: &B) -> Result<Vec<Bandwidth>> {
    let stopwatch = Stopwatch::new(backend)?;
    let stream = &stopwatch.stream;
    let mut host = backend.alloc_host("bandwidth", COPY_WORDS)?;
    backend.write_host(&mut host, |words| words.fill(1));
    let buffer = backend.alloc_words("bandwidth", COPY_WORDS)?;
    let copy_bytes = 4 * COPY_WORDS;
    let to_device = stopwatch
        .gb_per_s(copy_bytes, || Ok(backend.copy_to_device(&host, &buffer, COPY_WORDS, stream)?))?;
    let to_host = stopwatch
        .gb_per_s(copy_bytes, || Ok(backend.copy_to_host(&buffer, &host, COPY_WORDS, stream)?))?;
    drop((host, buffer));

    let bytes_per_element = if backend.activation_dtype() == Dtype::F32 { 4 } else { 2 };
    let num_rows = OPERATOR_BYTES / (2 * ROW_LEN * bytes_per_element);
    let gate_up = backend.alloc_activations("bandwidth", num_rows * 2 * ROW_LEN)?;
    let out = backend.alloc_activations("bandwidth", num_rows * ROW_LEN)?;
    let moved = OPERATOR_BYTES + OPERATOR_BYTES / 2;
    let operator = stopwatch.gb_per_s(moved, || {
        let (gate_up, out, len) = (&gate_up, &out, ROW_LEN);
        let activation = Activation::Silu;
        Ok(backend.gate_and_mul(GateAndMul { gate_up, out, num_rows, len, activation }, stream)?)
    })?;
    Ok(vec![
        Bandwidth { what: "copy, host to device", gb_per_s: to_device },
        Bandwidth { what: "copy, device to host", gb_per_s: to_host },
        Bandwidth { what: "device memory, by silu_and_mul", gb_per_s: operator },
    ])
}

struct Stopwatch<'a, B: Backend> {
    backend: &'a B,
    stream: B::Stream,
    events: [B::Event; 2],
}

impl<'a, B: Backend> Stopwatch<'a, B> {
    fn new(backend: &'a B) -> Result<Self> {
        let events = [backend.create_event()?, backend.create_event()?];
        Ok(Self { backend, stream: backend.create_stream("bandwidth")?, events })
    }

    /// The best of some repeats of `enqueue`, which moves so many bytes.
    fn gb_per_s(&self, num_bytes: usize, enqueue: impl Fn() -> Result<()>) -> Result<f64> {
        let [started, done] = &self.events;
        let mut best = f64::INFINITY;
        enqueue()?; // the first time is never the fastest
        for _ in 0..NUM_REPEATS {
            self.backend.record(started, &self.stream)?;
            enqueue()?;
            self.backend.record(done, &self.stream)?;
            self.backend.synchronize(done)?;
            best = best.min(self.backend.elapsed(started, done)?.as_secs_f64());
        }
        Ok(num_bytes as f64 / best.max(1e-9) / 1e9)
    }
}
