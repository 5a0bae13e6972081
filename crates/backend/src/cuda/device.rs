//! One GPU: its context, what it is, and the first thing that went wrong on it.

use std::{
    cell::Cell,
    ffi::{c_char, c_int},
    sync::{Arc, Mutex, PoisonError, atomic::AtomicU64},
};

use cudarc::driver::sys;

use super::check::{check, describe};
use crate::BackendError;

/// A GPU's primary context and its properties.
///
/// Buffers, streams and events keep it alive. Every call that needs a current context makes this
/// one current first ([`Device::bind`]).
pub(super) struct Device {
    context: sys::CUcontext,
    handle: sys::CUdevice,
    pub(super) info: DeviceInfo,
    /// Allocations of device memory so far.
    pub(super) num_allocations: AtomicU64,
    /// What a destructor could not report.
    fault: Mutex<Option<String>>,
}

/// What a GPU is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// As the driver names it.
    pub name: String,
    /// Major and minor compute capability.
    pub compute_capability: (u32, u32),
    /// Multiprocessors.
    pub num_sms: usize,
    /// Shared memory that one thread block may have, in bytes.
    pub max_shared_bytes: usize,
    /// Shared memory of a multiprocessor, in bytes.
    pub shared_bytes_per_sm: usize,
    /// Bytes of the L2 cache.
    pub l2_bytes: usize,
    /// Bytes of device memory.
    pub memory_bytes: usize,
    /// Newest CUDA version that the driver knows: 13000 is 13.0.
    pub driver_version: u32,
}

// SAFETY: a context may be made current on any thread, and the driver locks it itself.
unsafe impl Send for Device {}
// SAFETY: as above; `fault` has a lock.
unsafe impl Sync for Device {}

thread_local! {
    /// The context that this thread made current last; the driver's own look-up is slower.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

impl Device {
    /// Opens GPU number `ordinal`. The driver must be initialised.
    pub(super) fn open(ordinal: usize, driver_version: u32) -> Result<Arc<Self>, BackendError> {
        let ordinal = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        let mut handle = 0;
        // SAFETY: `handle` is a valid place for the result.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut handle, ordinal) })?;
        let info = DeviceInfo::read(handle, driver_version)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the device handle came from the driver; released in `drop`.
        let retained = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, handle) };
        check("cuDevicePrimaryCtxRetain", retained)?;
        let num_allocations = AtomicU64::new(0);
        let device = Self { context, handle, info, num_allocations, fault: Mutex::new(None) };
        device.bind()?;
        Ok(Arc::new(device))
    }

    /// Makes the context current on this thread.
    pub(super) fn bind(&self) -> Result<(), BackendError> {
        if CURRENT.get() == self.context as usize {
            return Ok(());
        }
        // SAFETY: the context is retained while `self` lives.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })?;
        CURRENT.set(self.context as usize);
        Ok(())
    }

    /// Waits until all fills and copies of the default stream have finished. For loading and
    /// tuning, never in the loop.
    ///
    /// Nothing here waits for the whole context: that is an error, and spoils the capture, while
    /// another thread captures a graph.
    pub(super) fn finish(&self) -> Result<(), BackendError> {
        self.bind()?;
        let default = std::ptr::null_mut();
        // SAFETY: a context is current, and it has a default stream.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(default) })
    }

    /// Free and total bytes of device memory.
    pub(super) fn memory(&self) -> Result<(usize, usize), BackendError> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are valid places for the results.
        let result = unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) };
        check("cuMemGetInfo", result)?;
        Ok((free, total))
    }

    /// Runs a destructor's driver call, whose failure [`Device::check_fault`] reports later.
    pub(super) fn release(&self, operation: &str, call: impl FnOnce() -> sys::CUresult) {
        if self.bind().is_err() {
            return; // the context is gone, and with it all it held
        }
        let result = call();
        if result != sys::CUresult::CUDA_SUCCESS {
            let message = format!("{operation}: {}", describe(result));
            let mut fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
            fault.get_or_insert(message);
        }
    }

    /// What destructors could not report.
    pub(super) fn check_fault(&self) -> Result<(), BackendError> {
        let fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        match &*fault {
            Some(message) => Err(BackendError::DeviceLost(message.clone())),
            None => Ok(()),
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        CURRENT.set(0);
        // SAFETY: retained in `open`; whatever lived in the context kept `self` alive.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.handle) };
    }
}

impl DeviceInfo {
    fn read(handle: sys::CUdevice, driver_version: u32) -> Result<Self, BackendError> {
        use sys::CUdevice_attribute_enum as Attribute;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: `value` is a valid place for the result.
            let result = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, handle) };
            check("cuDeviceGetAttribute", result)?;
            Ok::<_, BackendError>(u32::try_from(value).unwrap_or(0))
        };
        let mut memory_bytes = 0;
        // SAFETY: `memory_bytes` is a valid place for the result.
        let total = unsafe { sys::cuDeviceTotalMem_v2(&raw mut memory_bytes, handle) };
        check("cuDeviceTotalMem", total)?;
        let size = |value: u32| value as usize;
        Ok(Self {
            name: read_name(handle)?,
            compute_capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            num_sms: size(attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?),
            max_shared_bytes: size(attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?),
            shared_bytes_per_sm: size(attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
            )?),
            l2_bytes: size(attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?),
            memory_bytes,
            driver_version,
        })
    }
}

fn read_name(handle: sys::CUdevice) -> Result<String, BackendError> {
    let mut name: [c_char; 128] = [0; 128];
    // SAFETY: the length given is the array's, less one byte that stays zero.
    let result = unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 127, handle) };
    check("cuDeviceGetName", result)?;
    let bytes = name.iter().take_while(|c| **c != 0).map(|c| c.cast_unsigned());
    Ok(String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned())
}
