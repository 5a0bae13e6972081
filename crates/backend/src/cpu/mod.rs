//! The CPU as a device: real streams and events, and operators that use all cores.
//!
//! [`buffer`]: memory that checks who uses it. [`stream`], [`event`]: ordered queues and the points
//! in them. [`pool`]: the cores. [`matmul`], [`kernels`]: the operators. [`backend`] joins them.
//!
//! Invariant: a row's arithmetic never depends on the other rows of its batch, so that a sequence's
//! tokens do not depend on its neighbours, on chunking or on preemption.

mod buffer;
mod event;
mod stream;

pub use buffer::CpuBuffer;
pub use event::CpuEvent;
pub use stream::CpuStream;

/// Placeholder while the module is being written.
#[derive(Clone)]
pub struct CpuBackend;
/// Placeholder while the module is being written.
pub struct CpuConfig;
