//! Events: points in a stream.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use cudarc::driver::sys;

use super::{check::check, device::Device, stream::CudaStream};
use crate::BackendError;

/// A point in a stream that others can wait for.
pub struct CudaEvent {
    raw: RawEvent,
    device: Arc<Device>,
    /// Where times since this event are measured from, if they are long.
    anchor: Mutex<Option<Anchor>>,
}

/// A later point to measure from instead: the driver gives times as f32 milliseconds, which are no
/// finer than 4 microseconds a minute after the event.
struct Anchor {
    event: RawEvent,
    /// From the event to this point.
    offset: Duration,
}

/// How far a point may be from where it is measured: times are as fine as the driver's clock then,
/// half a microsecond.
const MAX_DISTANCE: Duration = Duration::from_secs(4);

/// The driver's event, destroyed when dropped.
struct RawEvent {
    device: Arc<Device>,
    raw: sys::CUevent,
}

// SAFETY: the driver locks events itself; any thread may record or wait.
unsafe impl Send for RawEvent {}
// SAFETY: as above.
unsafe impl Sync for RawEvent {}

impl CudaEvent {
    /// An event with a time. With `blocking`, whoever waits for it sleeps instead of spinning.
    pub(super) fn new(device: &Arc<Device>, blocking: bool) -> Result<Self, BackendError> {
        let flags = match blocking {
            true => sys::CUevent_flags_enum::CU_EVENT_BLOCKING_SYNC,
            false => sys::CUevent_flags_enum::CU_EVENT_DEFAULT,
        };
        let raw = RawEvent::new(device, flags)?;
        Ok(Self { raw, device: Arc::clone(device), anchor: Mutex::new(None) })
    }

    pub(super) fn record(&self, stream: &CudaStream) -> Result<(), BackendError> {
        *self.anchor.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.raw.record(stream)
    }

    pub(super) fn hold(&self, stream: &CudaStream) -> Result<(), BackendError> {
        self.device.bind()?;
        // SAFETY: event and stream live; the driver keeps an event that is destroyed early.
        let held = unsafe { sys::cuStreamWaitEvent(stream.raw(), self.raw.raw, 0) };
        check("cuStreamWaitEvent", held)
    }

    /// Blocks until the event, as last recorded, happened.
    pub(super) fn synchronize(&self) -> Result<(), BackendError> {
        self.raw.synchronize()?;
        self.device.check_fault()
    }

    /// Time from this event to `later`; zero if either has not happened or they are out of order.
    ///
    /// From time to time an anchor is recorded on `clock`, a stream that is otherwise idle.
    pub(super) fn elapsed_to(
        &self,
        later: &Self,
        clock: &CudaStream,
    ) -> Result<Duration, BackendError> {
        let mut anchor = self.anchor.lock().unwrap_or_else(PoisonError::into_inner);
        let (from, offset) = match &*anchor {
            Some(anchor) => (&anchor.event, anchor.offset),
            None => (&self.raw, Duration::ZERO),
        };
        let distance = from.signed_ms_to(&later.raw)?;
        let ms = offset.as_secs_f64() * 1e3 + f64::from(distance);
        if Duration::from_secs_f64(f64::from(distance.max(0.0)) / 1e3) > MAX_DISTANCE {
            let event = RawEvent::new(&self.device, sys::CUevent_flags_enum::CU_EVENT_DEFAULT)?;
            event.record(clock)?;
            event.synchronize()?;
            let step = f64::from(from.signed_ms_to(&event)?.max(0.0)) / 1e3;
            *anchor = Some(Anchor { event, offset: offset + Duration::from_secs_f64(step) });
        }
        Ok(Duration::from_secs_f64(ms.max(0.0) / 1e3))
    }
}

impl RawEvent {
    fn new(device: &Arc<Device>, flags: sys::CUevent_flags_enum) -> Result<Self, BackendError> {
        device.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a valid place for the result.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut raw, flags as u32) })?;
        Ok(Self { device: Arc::clone(device), raw })
    }

    fn record(&self, stream: &CudaStream) -> Result<(), BackendError> {
        self.device.bind()?;
        // SAFETY: event and stream live; the driver keeps an event that is destroyed early.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.raw, stream.raw()) })
    }

    fn synchronize(&self) -> Result<(), BackendError> {
        self.device.bind()?;
        // SAFETY: the event lives.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw) })
    }

    /// Milliseconds from this event to `later`, negative if out of order; zero if either has not
    /// happened.
    fn signed_ms_to(&self, later: &Self) -> Result<f32, BackendError> {
        use sys::CUresult::{CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_NOT_READY};
        self.device.bind()?;
        let mut ms = 0.0;
        // SAFETY: both events live; `ms` is a valid place for the result.
        match unsafe { sys::cuEventElapsedTime_v2(&raw mut ms, self.raw, later.raw) } {
            CUDA_ERROR_INVALID_HANDLE | CUDA_ERROR_NOT_READY => Ok(0.0),
            result => check("cuEventElapsedTime", result).map(|()| ms),
        }
    }
}

impl Drop for RawEvent {
    fn drop(&mut self) {
        // SAFETY: created in `new` and destroyed once.
        self.device.release("cuEventDestroy", || unsafe { sys::cuEventDestroy_v2(self.raw) });
    }
}
