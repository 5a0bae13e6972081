//! What of a GPU decides how kernels are compiled and launched.

use crate::KernelError;

/// A machine-code target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Arch(&'static str);

impl Arch {
    /// Ampere and Ada; machine code for 8.0 runs on every 8.x.
    pub const SM_80: Self = Self("sm_80");
    /// Hopper, with the instructions that only Hopper has.
    pub const SM_90A: Self = Self("sm_90a");

    /// The target for a GPU of this compute capability.
    ///
    /// # Errors
    /// [`KernelError::TooOld`] below 8.0: such GPUs lack bf16 and asynchronous copies.
    pub fn from_capability(major: u32, minor: u32) -> Result<Self, KernelError> {
        match (major, minor) {
            (..=7, _) => Err(KernelError::TooOld { major, minor }),
            (8, _) => Ok(Self::SM_80),
            (9, _) => Ok(Self::SM_90A),
            (10, _) => Ok(Self("sm_100")),
            (11, _) => Ok(Self("sm_110")),
            _ => Ok(Self("sm_120")),
        }
    }

    /// Whether blocks form clusters, and a kernel may begin while the one in front of it ends.
    pub fn is_hopper_or_later(self) -> bool {
        self != Self::SM_80
    }

    /// As NVRTC's `--gpu-architecture` has it.
    pub const fn name(self) -> &'static str {
        self.0
    }
}

/// The limits that launches are fitted to, all from the driver's device attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Target of its machine code.
    pub arch: Arch,
    /// `MULTIPROCESSOR_COUNT`.
    pub num_sms: u32,
    /// `MAX_SHARED_MEMORY_PER_BLOCK_OPTIN`, in bytes.
    pub smem_per_block: u32,
    /// `MAX_SHARED_MEMORY_PER_MULTIPROCESSOR`, in bytes.
    pub smem_per_sm: u32,
}

impl Gpu {
    /// One H200 (or H100 SXM).
    pub const H200: Self =
        Self { arch: Arch::SM_90A, num_sms: 132, smem_per_block: 232_448, smem_per_sm: 233_472 };
    /// One A100.
    pub const A100: Self =
        Self { arch: Arch::SM_80, num_sms: 108, smem_per_block: 166_912, smem_per_sm: 167_936 };
    /// One RTX 3090: the least shared memory that is supported.
    pub const RTX_3090: Self =
        Self { arch: Arch::SM_80, num_sms: 82, smem_per_block: 101_376, smem_per_sm: 102_400 };

    /// Blocks of this much dynamic shared memory that fit an SM; the driver keeps 1 KB of each.
    pub fn blocks_per_sm(&self, dynamic_smem: u32) -> u32 {
        self.smem_per_sm / (dynamic_smem + 1024)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_follow_the_compute_capability() {
        let name = |major, minor| Arch::from_capability(major, minor).map(Arch::name);
        for (major, minor, expected) in
            [(8, 0, "sm_80"), (8, 6, "sm_80"), (8, 9, "sm_80"), (9, 0, "sm_90a"), (12, 0, "sm_120")]
        {
            assert_eq!(name(major, minor).unwrap(), expected);
        }
        let error = name(7, 5).unwrap_err().to_string();
        assert!(error.contains("compute capability 7.5"), "{error}");
    }
}
