//! Streams and events.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use cudarc::driver::sys;

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
        Ok(Self { device: Arc::clone(device), raw, workspace: OnceLock::new() })
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

/// A point in a stream that others can wait for.
pub struct CudaEvent {
    device: Arc<Device>,
    raw: sys::CUevent,
}

// SAFETY: the driver locks events itself; any thread may record or wait.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// An event with a time. With `blocking`, whoever waits for it sleeps instead of spinning.
    pub(super) fn new(device: &Arc<Device>, blocking: bool) -> Result<Self, BackendError> {
        device.bind()?;
        let flags = match blocking {
            true => sys::CUevent_flags_enum::CU_EVENT_BLOCKING_SYNC as u32,
            false => sys::CUevent_flags_enum::CU_EVENT_DEFAULT as u32,
        };
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a valid place for the result.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut raw, flags) })?;
        Ok(Self { device: Arc::clone(device), raw })
    }

    pub(super) fn record(&self, stream: &CudaStream) -> Result<(), BackendError> {
        self.device.bind()?;
        // SAFETY: event and stream live; the driver keeps an event that is destroyed early.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.raw, stream.raw()) })
    }

    pub(super) fn hold(&self, stream: &CudaStream) -> Result<(), BackendError> {
        self.device.bind()?;
        // SAFETY: as in `record`.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream.raw(), self.raw, 0) })
    }

    /// Blocks until the event, as last recorded, happened.
    pub(super) fn synchronize(&self) -> Result<(), BackendError> {
        self.device.bind()?;
        // SAFETY: the event lives.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw) })?;
        self.device.check_fault()
    }

    /// Time from this event to `later`; zero if either has not happened or they are out of order.
    pub(super) fn elapsed_to(&self, later: &Self) -> Result<Duration, BackendError> {
        use sys::CUresult::{CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_NOT_READY};
        self.device.bind()?;
        let mut ms = 0.0;
        // SAFETY: both events live; `ms` is a valid place for the result.
        match unsafe { sys::cuEventElapsedTime_v2(&raw mut ms, self.raw, later.raw) } {
            CUDA_ERROR_INVALID_HANDLE | CUDA_ERROR_NOT_READY => Ok(Duration::ZERO),
            result => {
                check("cuEventElapsedTime", result)?;
                Ok(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
            }
        }
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // SAFETY: created in `new` and destroyed once.
        self.device.release("cuEventDestroy", || unsafe { sys::cuEventDestroy_v2(self.raw) });
    }
}
