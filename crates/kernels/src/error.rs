//! What can go wrong between a kernel's source and its machine code.

/// An error of this crate. None of them is a request's fault.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The compiler library is not on this machine.
    #[error(
        "NVRTC was not found ({searched}): install CUDA's libnvrtc, or `pip install {PACKAGE}`"
    )]
    NoNvrtc {
        /// Where it was looked for.
        searched: String,
    },
    /// The compiler library is there but refuses to work.
    #[error("NVRTC: {call}: {reason}")]
    Nvrtc {
        /// The function that failed.
        call: &'static str,
        /// What the library says.
        reason: String,
    },
    /// A kernel does not compile.
    #[error("{kernel} does not compile for {arch}:\n{log}")]
    Compilation {
        /// File and defines.
        kernel: String,
        /// Architecture as NVRTC calls it.
        arch: &'static str,
        /// What the compiler says.
        log: String,
    },
    /// The GPU is too old.
    #[error("compute capability {major}.{minor} is not supported: 8.0 (Ampere) is the least")]
    TooOld {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// No specialisation of a kernel fits.
    #[error("{kernel}: {reason}")]
    Unsupported {
        /// Which kernel.
        kernel: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// Machine code that is not as expected.
    #[error("compiled kernel: {0}")]
    BadCubin(&'static str),
}

/// The package that carries the compiler we test with.
const PACKAGE: &str = "nvidia-cuda-nvrtc==13.0.88";
