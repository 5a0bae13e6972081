//! The CPU as a device (being written by the lead; see `cpu/kernels` for the operators).

/// Placeholder while the module is being written.
#[derive(Clone)]
pub struct CpuBackend;
/// Placeholder while the module is being written.
pub struct CpuConfig;
