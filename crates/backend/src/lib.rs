//! What a device must be able to do, and the devices that can: the CPU and NVIDIA's GPUs.
//!
//! Reading order: [`dtype`] and [`tensor`] (what weights look like on the host), [`step`] (what one
//! step's inputs and outputs look like, word by word), [`late`] (inputs that come after the forward
//! pass began), [`ops`] (the [`Backend`] trait: memory,
//! streams, events and about a dozen operators), [`cpu`] and [`cuda`] (its implementations).
//!
//! Invariant: operators are enqueued on a stream and return at once; only
//! [`Backend::synchronize`] waits for the device.
//! Invariant: no request, sequence or scheduler policy is known here.
//! Invariant: this is the last room where `unsafe` is allowed.

mod attention_shape;
mod block_checks;
mod ceilings;
mod clock;
pub mod cpu;
pub mod cuda;
mod device_batch;
mod dtype;
mod e4m3;
mod error;
mod graph;
mod history;
mod kv_blocks;
mod kv_layout;
pub mod late;
mod mapped_file;
pub mod ops;
pub mod philox;
pub mod quant;
mod sampling_row;
pub mod self_check;
mod shared_prefixes;
pub mod step;
mod sync;
mod tensor;

pub use attention_shape::AttentionShape;
pub use block_checks::{BlockCheck, BlockSum, BlockSums, CheckBlocks, SumCheck};
pub use ceilings::Ceilings;
pub use clock::Clock;
pub use cpu::{CpuBackend, CpuConfig, SimdLevel, WeightPrecision};
pub use cuda::{CudaBackend, CudaConfig};
pub use device_batch::{DeviceBatch, GroupPlaces};
pub use dtype::Dtype;
pub use error::BackendError;
pub use graph::Graph;
pub use history::{HistoryInputs, HistoryLayout, HistoryShape};
pub use kv_blocks::{
    BlockPair, BlockTurn, CutPrompts, KvBlocks, KvLayer, MoveBlocks, MoveWay, PromptCut, TurnBlocks,
};
pub use kv_layout::{KvDtype, KvLayout};
pub use late::{LateRow, LateWriter};
pub use mapped_file::MappedFile;
pub use ops::{Activation, Backend};
pub use quant::fp8::{Fp8Matrix, Fp8Scales};
pub use sampling_row::SamplingRow;
pub use shared_prefixes::{PrefixRule, RowTables, SharedPrefix, SharedPrefixes};
pub use step::{
    GroupInputs, MAX_LAYER_GROUPS, OutputLayout, RowState, StepCapacity, StepInputs, StepShape,
};
pub use tensor::{HostTensor, TensorData};
