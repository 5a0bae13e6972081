//! Which device computes, found or asked for.

use std::env;
use std::path::PathBuf;

use anyhow::{Context, Result};
use inflight_backend::{
    BackendError, CudaBackend, CudaConfig,
    cuda::{Numerics, usual_library_folders},
};

use crate::args::DeviceChoice;
use crate::models::cache_folder;

/// A device that was chosen. GPUs are open already: only that tells whether they can be used.
pub(crate) enum Chosen {
    /// The CPU, and why no GPU if one might have been.
    Cpu {
        no_gpu: Option<String>,
    },
    Cuda(CudaBackend),
}

/// How a GPU is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GpuUse {
    pub(crate) graphs: bool,
    pub(crate) blocking_waits: bool,
    pub(crate) numerics: Numerics,
    /// See [`CudaConfig::keeps_fastest`].
    pub(crate) keeps_fastest: bool,
}

impl Default for GpuUse {
    fn default() -> Self {
        let numerics = Numerics::default();
        Self { graphs: true, blocking_waits: true, numerics, keeps_fastest: true }
    }
}

/// Finds the device that `choice` means.
///
/// # Errors
/// A GPU was asked for and cannot be used; `auto` means the CPU then.
pub(crate) fn choose(choice: DeviceChoice, gpu_use: GpuUse) -> Result<Chosen> {
    match choice {
        DeviceChoice::Cpu => Ok(Chosen::Cpu { no_gpu: None }),
        DeviceChoice::Cuda(ordinal) => {
            let opened = open_gpu(ordinal, gpu_use);
            opened.map(Chosen::Cuda).context("--device cuda")
        }
        DeviceChoice::Auto => match open_gpu(0, gpu_use) {
            Ok(backend) => Ok(Chosen::Cuda(backend)),
            Err(BackendError::Unsupported(reason)) => {
                tracing::info!("computing on the CPU, {reason}");
                Ok(Chosen::Cpu { no_gpu: Some(reason) })
            }
            Err(error) => {
                tracing::warn!("computing on the CPU, since the GPU cannot be used: {error}");
                Ok(Chosen::Cpu { no_gpu: Some(error.to_string()) })
            }
        },
    }
}

fn open_gpu(ordinal: usize, gpu_use: GpuUse) -> Result<CudaBackend, BackendError> {
    CudaBackend::new(CudaConfig {
        ordinal,
        library_folders: usual_library_folders(|name| env::var_os(name)),
        cache: kernel_cache(),
        keeps_fastest: gpu_use.keeps_fastest,
        graphs: gpu_use.graphs,
        blocking_waits: gpu_use.blocking_waits,
        numerics: gpu_use.numerics,
    })
}

/// Where compiled kernels and the fastest matrix products are kept between runs; without such a
/// place they are found anew.
fn kernel_cache() -> Option<PathBuf> {
    Some(cache_folder(|name| env::var_os(name)).ok()?.join("kernels"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether or not the machine has a GPU, `auto` finds something and nothing panics.
    #[test]
    fn auto_always_finds_a_device_and_a_number_too_high_is_refused() {
        match choose(DeviceChoice::Auto, GpuUse::default()).unwrap() {
            Chosen::Cuda(_) => {}
            Chosen::Cpu { no_gpu } => assert!(no_gpu.unwrap().starts_with("no CUDA device: ")),
        }
        let chosen = choose(DeviceChoice::Cpu, GpuUse::default()).unwrap();
        assert!(matches!(chosen, Chosen::Cpu { no_gpu: None }));
        let Err(error) = choose(DeviceChoice::Cuda(1 << 20), GpuUse::default()) else {
            panic!("no machine has a million GPUs")
        };
        assert!(format!("{error:#}").starts_with("--device cuda: no CUDA device"), "{error:#}");
    }
}
