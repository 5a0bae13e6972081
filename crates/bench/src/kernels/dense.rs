//! Operators that know of rows only: matrix products, norms, activations.

use anyhow::Result;
use inflight_backend::{
    Backend, BackendError, Dtype, HostTensor, TensorData,
    ops::{GateAndMul, Matmul, RmsNorm},
};

use super::{
    KernelWorkload, OperatorTiming, Peer,
    layers::{Layer, Layers, Weight},
    report::Work,
    stopwatch::Stopwatch,
};

/// Most rows of which logits are computed: those that are sampled.
const MAX_LOGIT_ROWS: usize = 256;

pub(super) struct Dense<'a, B: Backend> {
    pub(super) workload: &'a KernelWorkload,
    pub(super) stopwatch: &'a Stopwatch<'a, B>,
    pub(super) layers: &'a Layers<B>,
}

/// Operands for the most rows.
struct Operands<B: Backend> {
    /// The state between layers: random, f32.
    state: B::Buffer,
    norm: B::Buffer,
    /// What products take: random, of activations.
    narrow: B::Buffer,
    /// What products give.
    wide: B::Buffer,
    logits: B::Buffer,
}

/// One product of the model.
struct Product<'a, B: Backend> {
    name: &'static str,
    weight: fn(&Layer<B>) -> &Weight<B>,
    out: &'a B::Buffer,
    /// Adds to the state between layers; otherwise activations are written.
    accumulate: bool,
}

impl<B: Backend> Dense<'_, B> {
    pub(super) fn measure(&self, note: &mut dyn FnMut(OperatorTiming)) -> Result<()> {
        let Some(most) = self.workload.num_rows.iter().copied().max() else { return Ok(()) };
        let operands = self.operands(most)?;
        for &num_rows in &self.workload.num_rows {
            for product in products(&operands) {
                note(self.product(&product, &operands, num_rows)?);
            }
            if num_rows <= MAX_LOGIT_ROWS {
                note(self.logits(&operands, num_rows)?);
            }
            note(self.rms_norm(&operands, num_rows)?);
            note(self.silu_and_mul(&operands, num_rows)?);
        }
        Ok(())
    }

    fn operands(&self, most: usize) -> Result<Operands<B>> {
        let (backend, config) = (self.stopwatch.backend, &self.workload.config);
        let (hidden, ffn) = (config.hidden_size, config.ffn_size);
        let widest = hidden.max(ffn).max(config.q_len());
        let vector = |len: usize, data| {
            let (name, dtype) = ("bench".to_owned(), Dtype::F32);
            backend.load_vector(&[HostTensor { name, dtype, shape: vec![len], data }])
        };
        let random = |seed| TensorData::Random { seed, std: 1.0 };
        let ones = TensorData::Owned(1_f32.to_le_bytes().repeat(widest).into());
        let operands = Operands {
            state: vector(most * widest, random(1))?,
            norm: vector(widest, ones)?,
            narrow: backend.alloc_activations("bench", most * widest)?,
            wide: backend.alloc_activations("bench", most * (2 * ffn).max(config.qkv_len()))?,
            logits: backend.alloc_f32("bench", most.min(MAX_LOGIT_ROWS) * config.vocab_size)?,
        };
        // Products of constants would be faster than those of real numbers.
        self.norm(&operands, &operands.narrow, most, widest)?;
        self.stopwatch.finish()?;
        Ok(operands)
    }

    fn product(
        &self,
        product: &Product<'_, B>,
        operands: &Operands<B>,
        num_rows: usize,
    ) -> Result<OperatorTiming> {
        let layers = &self.layers.layers;
        let weight = |i: usize| (product.weight)(&layers[i % layers.len()]);
        let args = |i| Matmul {
            x: &operands.narrow,
            weight: &weight(i).matrix,
            bias: None,
            out: product.out,
            num_rows,
            accumulate: product.accumulate,
        };
        let out_bytes = if product.accumulate { 8 } else { self.activation_bytes() };
        let work = self.product_work(weight(0), num_rows, out_bytes);
        self.with_peer(product.name, num_rows, work, &args)
    }

    fn logits(&self, operands: &Operands<B>, num_rows: usize) -> Result<OperatorTiming> {
        let weight = &self.layers.logits;
        let args = |_| Matmul {
            x: &operands.narrow,
            weight: &weight.matrix,
            bias: None,
            out: &operands.logits,
            num_rows,
            accumulate: false,
        };
        self.with_peer("logits", num_rows, self.product_work(weight, num_rows, 4), &args)
    }

    /// A product, and the same by the maker's library where there is one.
    fn with_peer<'b>(
        &self,
        name: &str,
        num_rows: usize,
        work: Work,
        args: &dyn Fn(usize) -> Matmul<'b, B>,
    ) -> Result<OperatorTiming>
    where
        B: 'b,
    {
        let Stopwatch { backend, stream, .. } = self.stopwatch;
        let seconds = self.stopwatch.seconds(&|i| backend.matmul(args(i), stream))?;
        let peer = match backend.matmul_by_library(args(0), stream) {
            Ok(()) => {
                let enqueue = |i| backend.matmul_by_library(args(i), stream);
                Some(Peer::new("library", self.stopwatch.seconds(&enqueue)?))
            }
            Err(BackendError::Unsupported(_)) => None,
            Err(error) => return Err(error.into()),
        };
        Ok(OperatorTiming { peer, ..OperatorTiming::new(name, num_rows, work, seconds) })
    }

    fn product_work(&self, weight: &Weight<B>, num_rows: usize, out_bytes: usize) -> Work {
        let Weight { matrix, rows, cols } = weight;
        let moved = num_rows * (cols * self.activation_bytes() + rows * out_bytes);
        Work {
            bytes: self.stopwatch.backend.matrix_bytes(matrix) + moved,
            operations: 2.0 * num_rows as f64 * *rows as f64 * *cols as f64,
        }
    }

    fn rms_norm(&self, operands: &Operands<B>, num_rows: usize) -> Result<OperatorTiming> {
        let len = self.workload.config.hidden_size;
        let bytes = num_rows * len * (4 + self.activation_bytes());
        let seconds =
            self.stopwatch.seconds(&|_| self.norm(operands, &operands.wide, num_rows, len))?;
        let work = Work { bytes, operations: (3 * num_rows * len) as f64 };
        Ok(OperatorTiming::new("rms_norm", num_rows, work, seconds))
    }

    fn norm(
        &self,
        operands: &Operands<B>,
        out: &B::Buffer,
        num_rows: usize,
        len: usize,
    ) -> Result<(), BackendError> {
        let (x, weight, eps) = (&operands.state, &operands.norm, 1e-5);
        let args = RmsNorm { x, weight, out, num_rows, len, eps };
        self.stopwatch.backend.rms_norm(args, &self.stopwatch.stream)
    }

    fn silu_and_mul(&self, operands: &Operands<B>, num_rows: usize) -> Result<OperatorTiming> {
        let len = self.workload.config.ffn_size;
        let Stopwatch { backend, stream, .. } = self.stopwatch;
        let seconds = self.stopwatch.seconds(&|_| {
            let (gate_up, out) = (&operands.wide, &operands.narrow);
            let activation = self.workload.config.style.activation;
            backend.gate_and_mul(GateAndMul { gate_up, out, num_rows, len, activation }, stream)
        })?;
        let bytes = 3 * num_rows * len * self.activation_bytes();
        let work = Work { bytes, operations: (5 * num_rows * len) as f64 };
        Ok(OperatorTiming::new("silu_and_mul", num_rows, work, seconds))
    }

    fn activation_bytes(&self) -> usize {
        if self.stopwatch.backend.activation_dtype() == Dtype::F32 { 4 } else { 2 }
    }
}

fn products<B: Backend>(operands: &Operands<B>) -> [Product<'_, B>; 4] {
    let Operands { state, wide, .. } = operands;
    [
        Product { name: "qkv", weight: |l| &l.qkv, out: wide, accumulate: false },
        Product { name: "attention output", weight: |l| &l.out, out: state, accumulate: true },
        Product { name: "gate and up", weight: |l| &l.gate_up, out: wide, accumulate: false },
        Product { name: "down", weight: |l| &l.down, out: state, accumulate: true },
    ]
}
