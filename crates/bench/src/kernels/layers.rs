//! Weights of a few layers: so many that none is in a cache when its turn comes again.

use anyhow::{Context as _, Result};
use inflight_backend::{Backend, Dtype, HostTensor, TensorData};
use inflight_model::ModelConfig;

/// Bytes that the smallest matrices of all layers have together, unless the model has fewer.
const COLD_BYTES: usize = 256 << 20;

/// The matrices of a model of these sizes.
pub(super) struct Layers<B: Backend> {
    pub(super) layers: Vec<Layer<B>>,
    pub(super) logits: Weight<B>,
}

/// The matrices of one layer.
pub(super) struct Layer<B: Backend> {
    pub(super) qkv: Weight<B>,
    pub(super) out: Weight<B>,
    pub(super) gate_up: Weight<B>,
    pub(super) down: Weight<B>,
}

/// A matrix `[rows, cols]`.
pub(super) struct Weight<B: Backend> {
    pub(super) matrix: B::Matrix,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl<B: Backend> Layers<B> {
    pub(super) fn new(backend: &B, config: &ModelConfig, dtype: Dtype) -> Result<Self> {
        let (hidden, ffn) = (config.hidden_size, config.ffn_size);
        let weight = |rows, cols, seed| Weight::new(backend, dtype, [rows, cols], seed);
        let layer = |i: u64| {
            Ok::<_, anyhow::Error>(Layer {
                qkv: weight(config.qkv_len(), hidden, 8 * i)?,
                out: weight(hidden, config.q_len(), 8 * i + 1)?,
                gate_up: weight(2 * ffn, hidden, 8 * i + 2)?,
                down: weight(hidden, ffn, 8 * i + 3)?,
            })
        };
        let first = layer(0)?;
        let smallest = backend.matrix_bytes(&first.out.matrix).max(1);
        let num_layers = COLD_BYTES.div_ceil(smallest).clamp(1, config.num_layers.max(1));
        let mut layers = vec![first];
        for i in 1..num_layers {
            layers.push(layer(i as u64)?);
        }
        Ok(Self { layers, logits: weight(config.vocab_size, hidden, 5)? })
    }
}

impl<B: Backend> Weight<B> {
    fn new(backend: &B, dtype: Dtype, [rows, cols]: [usize; 2], seed: u64) -> Result<Self> {
        // Devices that compute in bf16 draw their own; others store what they are given.
        let made_there = backend.activation_dtype() == Dtype::BF16 || dtype == Dtype::F32;
        let (dtype, data) = if made_there {
            (Dtype::F32, TensorData::Random { seed, std: 0.02 })
        } else {
            let name = dtype.name();
            let row_bytes = dtype.row_bytes(cols).with_context(|| {
                format!("rows of {cols} weights are not made of whole blocks of {name}")
            })?;
            (dtype, TensorData::Owned(bytes(rows * row_bytes)))
        };
        let tensor = HostTensor { name: "bench".into(), dtype, shape: vec![rows, cols], data };
        Ok(Self { matrix: backend.load_matrix(&[tensor])?, rows, cols })
    }
}

/// Pseudorandom bytes that are finite numbers in every type.
fn bytes(len: usize) -> std::sync::Arc<[u8]> {
    (0..len).map(|i| (i as u32).wrapping_mul(2_654_435_761) as u8 & 0x3b).collect()
}
