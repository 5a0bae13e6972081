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
}

impl SimdLevel {
    /// All levels, lowest first.
    pub const ALL: [Self; 3] = [Self::Plain, Self::Avx2, Self::Avx512];

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
