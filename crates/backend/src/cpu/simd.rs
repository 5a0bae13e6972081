//! Which vector instructions operators use: found at run time, or chosen by a test.

/// A set of vector instructions. Each level includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SimdLevel {
    /// Nothing beyond what the target guarantees.
    Plain,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AMX's tiles of bytes and of bf16, and AVX-512 with VNNI and bf16.
    Amx,
}

impl SimdLevel {
    /// All levels, lowest first.
    pub const ALL: [Self; 4] = [Self::Plain, Self::Avx2, Self::Avx512, Self::Amx];

    /// The highest level that this processor has.
    pub fn detect() -> Self {
        let available = |level: &Self| level.is_available();
        Self::ALL.into_iter().rfind(available).unwrap_or(Self::Plain)
    }

    /// Whether this processor has the level's instructions.
    #[cfg(target_arch = "x86_64")]
    pub fn is_available(self) -> bool {
        let avx2 = || {
            is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
        };
        let avx512 = || {
            is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
        };
        match self {
            Self::Plain => true,
            Self::Avx2 => avx2(),
            Self::Avx512 => avx2() && avx512(),
            Self::Amx => avx2() && avx512() && *AMX,
        }
    }

    /// Whether this processor has the level's instructions.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn is_available(self) -> bool {
        self == Self::Plain
    }

    /// Every level that this processor has: what tests compare.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|level| level.is_available())
    }
}

/// Whether the processor has AMX and the system lets this process use it.
#[cfg(target_arch = "x86_64")]
static AMX: std::sync::LazyLock<bool> = std::sync::LazyLock::new(|| {
    is_x86_feature_detected!("avx512vnni")
        && is_x86_feature_detected!("avx512bf16")
        && has_amx_instructions()
        && may_use_tiles()
});

/// Tiles, and their products of bf16 and of bytes.
///
/// # Source
/// Intel's manual: bits 22, 24 and 25 of EDX of CPUID leaf 7.
#[cfg(target_arch = "x86_64")]
fn has_amx_instructions() -> bool {
    const BF16_TILE_INT8: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    let is_leaf_there = std::arch::x86_64::__cpuid(0).eax >= 7;
    let features = || std::arch::x86_64::__cpuid_count(7, 0).edx;
    is_leaf_there && features() & BF16_TILE_INT8 == BF16_TILE_INT8
}

/// Asks Linux for the right to use tiles, which threads made later inherit.
///
/// # Source
/// Linux, `Documentation/arch/x86/xstate.rst`.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn may_use_tiles() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 }
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn may_use_tiles() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_is_always_there_and_levels_include_those_before() {
        assert!(SimdLevel::Plain.is_available());
        let available: Vec<_> = SimdLevel::available().collect();
        assert_eq!(available, SimdLevel::ALL[..available.len()]);
        assert_eq!(available.last(), Some(&SimdLevel::detect()));
    }
}
