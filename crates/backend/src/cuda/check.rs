//! Results of the driver and of cuBLASLt as errors that name the operation.

use std::ffi::CStr;

use cudarc::{cublaslt::sys::cublasStatus_t, driver::sys};

use crate::BackendError;

/// Turns a driver result into a lost device that names `operation`.
pub(super) fn check(operation: &str, result: sys::CUresult) -> Result<(), BackendError> {
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        failed => Err(lost(operation, &describe(failed))),
    }
}

/// Turns a cuBLASLt result into a lost device that names `operation`.
pub(super) fn check_blas(operation: &str, status: cublasStatus_t) -> Result<(), BackendError> {
    match status {
        cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        failed => Err(lost(operation, &format!("{failed:?}"))),
    }
}

/// A lost device.
pub(super) fn lost(operation: &str, reason: &str) -> BackendError {
    BackendError::DeviceLost(format!("{operation}: {reason}"))
}

/// The driver's own words for `result`.
pub(super) fn describe(result: sys::CUresult) -> String {
    let text = |get: unsafe fn(sys::CUresult, *mut *const std::ffi::c_char) -> sys::CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: `text` is a valid place for a pointer; the driver's strings are static and end
        // with a zero byte, and `text` stays null if it knows none.
        unsafe {
            let _ = get(result, &raw mut text);
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        }
    };
    match (text(sys::cuGetErrorName), text(sys::cuGetErrorString)) {
        (Some(name), Some(words)) => format!("{name}, {words}"),
        _ => format!("{result:?}"),
    }
}
