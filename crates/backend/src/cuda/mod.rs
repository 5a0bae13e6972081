//! NVIDIA GPUs as devices, found at run time: building needs nothing of CUDA.
//!
//! [`probe`], [`libraries`]: what there is. [`device`], [`memory`], [`stream`]: one GPU, its memory,
//! its queues. [`gemm`]: matrix products. [`graph`]: a step recorded once and launched as one.
//!
//! Invariant: nothing here panics for want of a GPU, a driver or a library.
//! Invariant: no operator allocates, waits or uses the default stream, so that each can be captured.

mod check;
mod device;
mod gemm;
mod graph;
mod libraries;
mod memory;
mod probe;
mod stream;

pub use device::DeviceInfo;
pub use libraries::usual_library_folders;
pub use memory::{CudaBuffer, CudaHostBuffer};
pub use probe::{CudaProbe, probe};
pub use stream::{CudaEvent, CudaStream};
