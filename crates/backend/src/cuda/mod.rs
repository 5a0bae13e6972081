//! NVIDIA GPUs as devices, found at run time: building needs nothing of CUDA.
//!
//! [`probe`], [`libraries`]: what there is. [`device`], [`memory`], [`stream`], [`event`]: one GPU,
//! its memory, its queues. [`weights`]: loading. [`loaded`]: kernels. [`gemm`]: matrix products.
//! [`operators`], [`tensor_map`]: all else. [`graph`], [`rehearsal`]: a step recorded once and
//! launched as one. [`memory_plan`]: how much of the memory is whose. [`ceilings`]: what the
//! hardware can do. [`backend`] joins them.
//!
//! Weights, keys, values and what goes into matrix products are bf16; the state between layers,
//! logits and every sum are f32.
//!
//! Invariant: nothing here panics for want of a GPU, a driver or a library. Invariant: no operator
//! allocates, waits or uses the default stream, so that each can be captured; what one needs for
//! that is prepared when it is first used, outside of any capture.

mod backend;
mod by_key;
mod ceilings;
mod check;
mod device;
mod event;
mod fixed_gemm;
mod gemm;
mod graph;
mod libraries;
mod loaded;
mod memory;
mod memory_plan;
mod numerics;
mod operators;
mod probe;
mod rehearsal;
mod stream;
mod tensor_map;
mod weights;

pub use backend::{CudaBackend, CudaConfig};
pub use device::DeviceInfo;
pub use event::CudaEvent;
pub use gemm::{Tuned, TunedKind, TunedProduct};
pub use libraries::usual_library_folders;
pub use memory::{CudaBuffer, CudaHostBuffer};
pub use memory_plan::MemoryPlan;
pub use numerics::{Numerics, Softmax};
pub use probe::{CudaProbe, probe};
pub use stream::CudaStream;
pub use weights::{CudaEmbedding, CudaMatrix};
