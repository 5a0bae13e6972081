//! Looking for a GPU without ever panicking: a clear line says what is missing.

use std::path::PathBuf;

use cudarc::{cublaslt, driver, driver::sys, nvrtc};

use super::{check::describe, libraries};
use crate::BackendError;

/// What was found besides the GPUs themselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaProbe {
    /// GPUs that the driver shows.
    pub num_devices: usize,
    /// Newest CUDA version that the driver knows: 13000 is 13.0.
    pub driver_version: u32,
    /// NVRTC's version: 13000 is 13.0.
    pub nvrtc_version: u32,
    /// cuBLASLt's version as it counts.
    pub cublaslt_version: usize,
}

/// Oldest driver whose functions are called, and which runs what NVRTC 13 compiles: CUDA 13.0.
const MIN_DRIVER_VERSION: u32 = 13000;
/// Oldest compute capability that the kernels are written for: bf16 and asynchronous copies.
const MIN_COMPUTE_CAPABILITY: (u32, u32) = (8, 0);

/// Looks for driver, GPUs, NVRTC and cuBLASLt; libraries also in `folders`.
///
/// # Errors
/// [`BackendError::Unsupported`] with one line that says what is missing.
pub fn probe(folders: &[PathBuf]) -> Result<CudaProbe, BackendError> {
    // SAFETY: asks the loader for the library; that runs its initialisers.
    if !unsafe { sys::is_culib_present() } {
        return Err(unsupported("no NVIDIA driver: libcuda.so is not installed"));
    }
    driver::result::init().map_err(|error| {
        unsupported(&format!("the NVIDIA driver does not start: {}", describe(error.0)))
    })?;
    let num_devices = driver::result::device::get_count().map_err(|error| {
        unsupported(&format!("the NVIDIA driver lists no GPUs: {}", describe(error.0)))
    })?;
    let num_devices = usize::try_from(num_devices).unwrap_or(0);
    if num_devices == 0 {
        return Err(unsupported("the NVIDIA driver shows no GPU"));
    }
    let driver_version = driver_version()?;
    if driver_version < MIN_DRIVER_VERSION {
        let (has, needs) = (version(driver_version), version(MIN_DRIVER_VERSION));
        let reason = format!("the NVIDIA driver is of CUDA {has}, {needs} or newer is needed");
        return Err(unsupported(&reason));
    }
    let nvrtc_version = nvrtc_version(folders)?;
    let cublaslt_version = cublaslt_version(folders)?;
    Ok(CudaProbe { num_devices, driver_version, nvrtc_version, cublaslt_version })
}

/// Whether kernels run on a GPU of this kind.
pub(super) fn check_capability(name: &str, capability: (u32, u32)) -> Result<(), BackendError> {
    if capability >= MIN_COMPUTE_CAPABILITY {
        return Ok(());
    }
    let ((major, minor), (needs, point)) = (capability, MIN_COMPUTE_CAPABILITY);
    let reason =
        format!("{name} has compute capability {major}.{minor}, {needs}.{point} is needed");
    Err(unsupported(&reason))
}

fn driver_version() -> Result<u32, BackendError> {
    let mut version = 0;
    // SAFETY: `version` is a valid place for the result.
    match unsafe { sys::cuDriverGetVersion(&raw mut version) } {
        sys::CUresult::CUDA_SUCCESS => Ok(u32::try_from(version).unwrap_or(0)),
        failed => Err(unsupported(&format!("no driver version: {}", describe(failed)))),
    }
}

fn nvrtc_version(folders: &[PathBuf]) -> Result<u32, BackendError> {
    // SAFETY: asks the loader for the library; that runs its initialisers.
    let present = || unsafe { nvrtc::sys::is_culib_present() };
    if !(present() || libraries::preload_nvrtc(folders) && present()) {
        return Err(unsupported("NVRTC (libnvrtc.so.13) is not installed"));
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both are valid places for the results; the library is present.
    let result = unsafe { nvrtc::sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    match result {
        nvrtc::sys::nvrtcResult::NVRTC_SUCCESS => {
            Ok(u32::try_from(major * 1000 + minor * 10).unwrap_or(0))
        }
        failed => Err(unsupported(&format!("NVRTC does not work: {failed:?}"))),
    }
}

fn cublaslt_version(folders: &[PathBuf]) -> Result<usize, BackendError> {
    // SAFETY: asks the loader for the library; that runs its initialisers.
    let present = || unsafe { cublaslt::sys::is_culib_present() };
    if !(present() || libraries::preload_cublaslt(folders) && present()) {
        return Err(unsupported("cuBLASLt (libcublasLt.so.13) is not installed"));
    }
    // SAFETY: the library is present; the function takes and needs nothing.
    Ok(unsafe { cublaslt::sys::cublasLtGetVersion() })
}

/// `13000` as `13.0`.
pub(super) fn version(number: u32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

fn unsupported(reason: &str) -> BackendError {
    BackendError::Unsupported(format!("no CUDA device: {reason}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On a machine with a GPU the probe finds it; on any other it says in one line what is
    /// missing.
    #[test]
    fn a_probe_gives_a_gpu_or_one_clear_line() {
        match probe(&[]) {
            Ok(found) => assert!(found.num_devices > 0 && found.driver_version >= 11000),
            Err(BackendError::Unsupported(line)) => {
                assert!(line.starts_with("no CUDA device: "), "{line}");
                assert!(!line.contains('\n') && line.len() < 200, "{line}");
            }
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn old_gpus_are_refused_by_name() {
        assert!(check_capability("H200", (9, 0)).is_ok());
        assert!(check_capability("A100", (8, 0)).is_ok());
        let error = check_capability("Tesla T4", (7, 5)).unwrap_err().to_string();
        assert_eq!(error, "no CUDA device: Tesla T4 has compute capability 7.5, 8.0 is needed");
    }

    #[test]
    fn versions_read_as_people_write_them() {
        assert_eq!((version(13000), version(12080)), ("13.0".into(), "12.8".into()));
    }
}
