//! The CPU as a device: real streams and events, and operators that use all cores.
//!
//! [`buffer`]: memory that checks who uses it. [`stream`], [`event`]: ordered queues and the points
//! in them. [`pool`]: the cores. [`matmul`], [`kernels`]: the operators. [`backend`] joins them.
//!
//! Invariant: a row's arithmetic never depends on the other rows of its batch, so that a sequence's
//! tokens do not depend on its neighbours, on chunking or on preemption.

mod attention_ops;
mod backend;
mod block_checks;
mod block_moves;
mod buffer;
mod event;
mod kernels;
mod matmul;
mod pool;
mod simd;
mod stream;

pub use backend::{CpuBackend, CpuConfig, CpuHostBuffer};
pub use buffer::CpuBuffer;
pub use event::CpuEvent;
pub use matmul::{PackedMatrix, WeightPrecision};
pub use simd::SimdLevel;
pub use stream::CpuStream;
