//! Streams.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys;
use inflight_kernels::ops::{
    fp8_split::{Fp8Split, SplitRows},
    hopper_gemm::HopperGemm,
};

use super::{check::check, device::Device, memory::Allocation};
use crate::BackendError;

/// Working memory of cuBLASLt, as NVIDIA advises for Hopper.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;

/// An ordered queue of operations; never the default stream, nor ordered with it.
pub struct CudaStream {
    device: Arc<Device>,
    raw: sys::CUstream,
    /// Made for the first matrix product: streams that only copy need none.
    workspace: OnceLock<Allocation>,
    /// Room for operands in another type, apart from each other; all stay, since captured graphs
    /// use them.
    scratch: [Mutex<Vec<Allocation>>; 2],
    /// What the kernel that was enqueued last left.
    left: Mutex<Option<LeftCodes>>,
}

/// Rooms of a stream that one kernel may read and write at once.
#[derive(Clone, Copy, Debug)]
pub(super) enum Scratch {
    /// For operands of a product, and for what SiLU makes of one.
    First,
    /// For what norms make, and for operands of products that SiLU is made of.
    Second,
}

/// Activations that a kernel left as codes besides, for the product behind it.
#[derive(Clone, Copy, Debug)]
pub(super) struct LeftCodes {
    /// The activations, `[num_rows, len]`.
    pub(super) x: sys::CUdeviceptr,
    pub(super) len: usize,
    pub(super) codes: SplitRows,
}

// SAFETY: the driver locks streams itself; any thread may enqueue.
unsafe impl Send for CudaStream {}
// SAFETY: as above.
unsafe impl Sync for CudaStream {}

impl CudaStream {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, BackendError> {
        device.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `raw` is a valid place for the result.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut raw, flags) })?;
        let (workspace, scratch, left) = <_>::default();
        Ok(Self { device: Arc::clone(device), raw, workspace, scratch, left })
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// This stream's working memory. The first call allocates, so it must not happen while a graph
    /// is being captured.
    pub(super) fn workspace(&self) -> Result<&Allocation, BackendError> {
        if let Some(workspace) = self.workspace.get() {
            return Ok(workspace);
        }
        let workspace = Allocation::new(&self.device, "cuBLASLt workspace", WORKSPACE_BYTES)?;
        Ok(self.workspace.get_or_init(|| workspace))
    }

    /// Memory of `bytes` for one product at a time. If there was never as much, this allocates, so
    /// it must not happen first while a graph is being captured.
    pub(super) fn scratch(
        &self,
        which: Scratch,
        bytes: usize,
    ) -> Result<sys::CUdeviceptr, BackendError> {
        let mut scratch =
            self.scratch[which as usize].lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(enough) = scratch.iter().find(|allocation| allocation.bytes() >= bytes) {
            return Ok(enough.address());
        }
        let bytes = bytes.next_power_of_two();
        scratch.push(Allocation::new(&self.device, "operands of products", bytes)?);
        Ok(scratch.last().expect("was just pushed").address())
    }

    /// Where activations, `[num_rows, len]`, go as codes; allocates as [`scratch`](Self::scratch).
    pub(super) fn split_rows(
        &self,
        (num_rows, len): (usize, usize),
        which: Scratch,
    ) -> Result<SplitRows, BackendError> {
        let rows = u32::try_from(num_rows).expect("rows of a step fit 32 bits");
        let padded_rows = HopperGemm::padded_rows(rows);
        let codes_bytes = Fp8Split::codes_bytes(num_rows, len);
        let bytes = codes_bytes + Fp8Split::scales_bytes(padded_rows as usize, len);
        let codes = self.scratch(which, bytes)?;
        let scales = codes + codes_bytes as u64;
        Ok(SplitRows { codes, scales, num_rows: rows, padded_rows })
    }

    /// Tells what the kernel just enqueued left, or that something was enqueued that left nothing:
    /// every launch does. So codes are never older than what they are of.
    pub(super) fn set_left(&self, left: Option<LeftCodes>) {
        *self.left.lock().unwrap_or_else(PoisonError::into_inner) = left;
    }

    /// The codes that the kernel enqueued last left.
    pub(super) fn left(&self) -> Option<LeftCodes> {
        *self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until everything enqueued has finished. For loading and tuning, never in the loop.
    pub(super) fn finish(&self) -> Result<(), BackendError> {
        self.device.bind()?;
        // SAFETY: the stream lives.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw) })
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        // What is enqueued still uses the workspace and buffers: let it end before they go.
        // SAFETY: created in `new` and destroyed once.
        self.device
            .release("cuStreamSynchronize", || unsafe { sys::cuStreamSynchronize(self.raw) });
        // SAFETY: as above.
        self.device.release("cuStreamDestroy", || unsafe { sys::cuStreamDestroy_v2(self.raw) });
    }
}
