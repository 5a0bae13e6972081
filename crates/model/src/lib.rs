//! Configurations, weight files and decoder architectures.
//!
//! Reading order: [`ModelFiles`] (what a path holds), [`ModelConfig`] (what a model is) with one
//! small file per architecture, [`Weights`] ([`GgufFile`], [`SafetensorsFolder`],
//! [`DummyWeights`]), [`LayerGroups`] (which layers share blocks of the KV cache), [`Decoder`] (one
//! description of operators for all architectures), [`eval`] (one sequence through a decoder,
//! without an engine).
//!
//! Invariant: no device code: all work is done by operators of a [`inflight_backend::Backend`].
//! Invariant: no request, sequence or scheduler policy is known here.
//! Invariant: files are hostile until proven otherwise: whatever they hold, reading them gives a
//! value or an error that names file, tensor or field, and allocates no more than they hold.

mod architecture;
mod config;
mod decoder;
mod dummy;
mod error;
pub mod eval;
mod files;
mod gguf;
mod kv;
mod layer_groups;
mod names;
mod rotary;
mod safetensors;
mod text_file;
mod weights;

pub use architecture::Architecture;
pub use config::{Fp8Weights, LayerStyle, ModelConfig, RopeConfig, RopeScaling};
pub use decoder::{Decoder, ForwardInputs, LoadProgress, Scratch, scratch_bytes};
pub use dummy::DummyWeights;
pub use error::ModelError;
pub use files::ModelFiles;
pub use gguf::{GgufFile, GgufTokenizer, GgufValue};
pub use kv::{kv_bytes_per_block, kv_layers};
pub use layer_groups::{LayerGroups, LayerPlace};
pub use names::Naming;
pub use rotary::rotary_table;
pub use safetensors::SafetensorsFolder;
pub use weights::Weights;
