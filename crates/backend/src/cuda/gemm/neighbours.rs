//! The small kernels beside products, which trials run as the loop does.

use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use inflight_kernels::ops::{
    gate_and_mul::{GateAndMul, GateAndMulParams},
    rms_norm::{RmsNorm, RmsNormParams},
};

use super::{Norm, word};
use crate::{
    BackendError,
    cuda::{
        by_key::ByKey,
        loaded::{KernelLoader, Loaded},
        stream::CudaStream,
    },
};

pub(super) struct Neighbours {
    loader: Arc<KernelLoader>,
    norm: ByKey<(), Loaded<RmsNorm>>,
    silu: ByKey<(), Loaded<GateAndMul>>,
}

impl Neighbours {
    pub(super) fn new(loader: &Arc<KernelLoader>) -> Self {
        Self { loader: Arc::clone(loader), norm: ByKey::default(), silu: ByKey::default() }
    }

    /// Loads both, which launching them may not.
    pub(super) fn load(&self) -> Result<(), BackendError> {
        self.norm_kernel()?;
        self.silu_kernel().map(drop)
    }

    /// `norm` of `x`, `[num_rows, len]`, f32.
    pub(super) fn norm(
        &self,
        (x, num_rows, len): (CUdeviceptr, usize, usize),
        norm: Norm,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let params = RmsNormParams {
            x,
            weight: norm.weight,
            out: norm.out,
            num_rows: word(num_rows),
            len: word(len),
            eps: norm.eps,
            reserved: 0,
        };
        self.norm_kernel()?.launch(&params, stream)
    }

    /// `out = silu(a) * b` of the halves of `gate_up`, `[num_rows, 2 * len]`.
    pub(super) fn silu(
        &self,
        (gate_up, num_rows, len): (CUdeviceptr, usize, usize),
        out: CUdeviceptr,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let params = GateAndMulParams { gate_up, out, num_rows: word(num_rows), len: word(len) };
        self.silu_kernel()?.launch(&params, stream)
    }

    fn norm_kernel(&self) -> Result<Arc<Loaded<RmsNorm>>, BackendError> {
        self.norm.get((), || self.loader.load(RmsNorm::of_state()))
    }

    fn silu_kernel(&self) -> Result<Arc<Loaded<GateAndMul>>, BackendError> {
        self.silu.get((), || self.loader.load(GateAndMul { gelu: false }))
    }
}
