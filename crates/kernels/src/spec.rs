//! A source file, everything that specialises it, and how the result is launched.

use std::fmt;

/// An address on the device; 0 where an optional one is absent.
pub type DevicePtr = u64;

/// A file of `csrc/`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// Its name.
    pub file: &'static str,
    /// Its text.
    pub text: &'static str,
}

/// A tensor in device memory and the boxes that the copy engine takes of it, as the driver encodes
/// both (`CUtensorMap`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct TensorMap(pub [u64; 16]);

/// What every source may include.
pub(crate) const HEADERS: [Source; 8] = [
    Source { file: "common.cuh", text: include_str!("../csrc/common.cuh") },
    Source { file: "fp8_split.cuh", text: include_str!("../csrc/fp8_split.cuh") },
    Source { file: "hopper.cuh", text: include_str!("../csrc/hopper.cuh") },
    Source { file: "kv_cache.cuh", text: include_str!("../csrc/kv_cache.cuh") },
    Source { file: "kv_heads.cuh", text: include_str!("../csrc/kv_heads.cuh") },
    Source { file: "logits.cuh", text: include_str!("../csrc/logits.cuh") },
    Source { file: "prefix_plan.cuh", text: include_str!("../csrc/prefix_plan.cuh") },
    Source { file: "query_tiles.cuh", text: include_str!("../csrc/query_tiles.cuh") },
];

/// Element types that kernels are specialised for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Element {
    F32,
    Bf16,
}

impl Element {
    /// Bytes of one element.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }

    /// The macro `IS_BF16`-like value that sources expect.
    pub(crate) const fn is_bf16(self) -> u32 {
        matches!(self, Self::Bf16) as u32
    }
}

/// The most that a kernel may use; checked by a test for every specialisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Budget {
    /// Registers of a thread.
    pub registers: u32,
    /// Shared memory declared in the source, in bytes.
    pub static_smem: u32,
}

/// One kernel in one specialisation: all that decides its machine code.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KernelSpec {
    /// The file.
    pub source: Source,
    /// The name of the `extern "C"` function.
    pub entry: &'static str,
    /// Macros.
    pub defines: Vec<(&'static str, u32)>,
    /// Bytes of dynamic shared memory at every launch.
    pub dynamic_smem: u32,
    /// Bytes of the parameters.
    pub params_bytes: usize,
    /// What it may use.
    pub budget: Budget,
}

impl fmt::Display for KernelSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.entry)?;
        for (i, (name, value)) in self.defines.iter().enumerate() {
            write!(f, "{}{name}={value}", if i == 0 { " " } else { "," })?;
        }
        Ok(())
    }
}

/// Grid and block of one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks along x, y, z. Nothing is to be launched if any is 0.
    pub grid: [u32; 3],
    /// Threads along x, y, z.
    pub block: [u32; 3],
}

impl Launch {
    /// Many blocks of many threads.
    pub(crate) const fn linear(blocks: u32, threads: u32) -> Self {
        Self { grid: [blocks, 1, 1], block: [threads, 1, 1] }
    }

    /// Whether there is nothing to do. The driver refuses such launches.
    pub fn is_empty(&self) -> bool {
        self.grid.contains(&0)
    }
}

/// A specialisation of a kernel.
pub trait Kernel {
    /// The only argument, passed by value; `#[repr(C)]`, as the source declares it.
    type Params: Copy;

    /// What to compile.
    fn spec(&self) -> KernelSpec;

    /// How to launch it with these parameters.
    fn launch(&self, params: &Self::Params) -> Launch;
}
