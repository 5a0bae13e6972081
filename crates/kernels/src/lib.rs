//! CUDA C++ kernels, compiled at run time by NVRTC for the GPU at hand, and how each is launched.
//!
//! Reading order: [`gpu`] (what of a GPU matters here), [`spec`] (a source file with everything
//! that specialises it), [`compiler`] (NVRTC, in front of it a cache on disk), [`cubin`] (what a
//! compiled kernel needs), [`ops`] (for every operator its parameters and its launch). The kernels
//! themselves are in `csrc/`, one operator a file; `common.cuh` is what they share and
//! `hopper.cuh` what only Hopper has.
//!
//! A backend uses it like this, for the kernels it loads with the driver:
//!
//! ```text
//! let kernel = RmsNorm { x: Element::F32, out: Element::Bf16 };      a specialisation
//! let cubin  = compiler.compile(&kernel.spec(), gpu.arch)?;          once, or from the cache
//! let params = RmsNormParams { x, weight, out, num_rows, len, eps }; pointers and numbers
//! let launch = kernel.launch(&params);                               grid and block
//! cuLaunchKernel(function, launch.., &mut [&params as *mut c_void])  the only argument
//! ```
//!
//! The dynamic shared memory of a specialisation is [`KernelSpec::dynamic_smem`], the same at every
//! launch: set `MAX_DYNAMIC_SHARED_SIZE_BYTES` to it once when the kernel is loaded.
//!
//! # Precision
//! Weights, queries, keys, values, the KV cache and what goes into matrix products are bf16. The
//! state between layers (`hidden`, `sampled`) is f32 or bf16 as the backend chooses; f32 costs
//! nothing where weights or the cache bound a step. Norm weights, biases, rotary tables and logits
//! are f32. All sums are f32 or wider.
//!
//! Invariant: building this crate needs nothing of CUDA; running it never panics for lack of it.
//! Invariant: kernels include no header but our own.
//! Invariant: no grid depends on anything but the (padded) shape of a step and the GPU, so that
//! every launch can be captured in a graph.
//! Invariant: every kernel calls `wait_for_earlier_kernels` before it reads what an earlier one may
//! have written and before it writes, so that all may be launched to overlap
//! ([`Arch::is_hopper_or_later`]).
//! Invariant: no kernel allocates, waits for the host, or leaves results that depend on the order
//! in which its blocks run.

mod cache;
pub mod compiler;
pub mod cubin;
mod error;
mod gpu;
mod hash;
mod kv_numbers;
mod nvrtc;
pub mod ops;
mod spec;

pub use compiler::{Compiler, CompilerConfig};
pub use cubin::{Cubin, Resources};
pub use error::KernelError;
pub use gpu::{Arch, Gpu};
pub use kv_numbers::{KvNumbers, KvShape};
pub use spec::{Budget, DevicePtr, Element, Kernel, KernelSpec, Launch, Source, TensorMap};
