//! Random numbers for ids and unseeded requests.

use std::hash::{BuildHasher, RandomState};

/// A number that nobody can foresee: a fresh key of the standard library's keyed hash.
pub(crate) fn random_u64() -> u64 {
    RandomState::new().hash_one(0_u8)
}

/// `prefix` and 32 random hexadecimal digits, as OpenAI's ids look.
pub(crate) fn random_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:016x}", random_u64(), random_u64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_differ() {
        let ids: std::collections::HashSet<_> = (0..1000).map(|_| random_id("cmpl-")).collect();
        assert_eq!(ids.len(), 1000);
        assert!(ids.iter().all(|id| id.len() == "cmpl-".len() + 32));
    }
}
