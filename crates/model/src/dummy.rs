//! Weights made up from a seed, so that a configuration alone is enough to measure speed.

use inflight_backend::{Dtype, HostTensor, TensorData};

/// Random weights of any name and shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DummyWeights {
    /// Other seeds give other weights.
    pub seed: u64,
}

/// As most trained models began: activations neither vanish nor explode.
const STD: f32 = 0.02;

impl DummyWeights {
    /// The tensor `name` of this shape: ones for norms, else normally distributed.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> HostTensor {
        let data = if name.ends_with("norm.weight") {
            TensorData::Owned(1f32.to_le_bytes().repeat(shape.iter().product()).into())
        } else {
            TensorData::Random { seed: self.seed ^ hash(name), std: STD }
        };
        HostTensor { name: name.to_owned(), dtype: Dtype::F32, shape: shape.to_vec(), data }
    }
}

/// FNV-1a: the standard library's hashes may change between its versions.
fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_is_fnv_1a() {
        // Test vectors of the reference implementation.
        assert_eq!(hash(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(hash("foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn tensors_depend_on_name_and_seed_and_norms_are_one() {
        let weights = DummyWeights { seed: 1 };
        let values = |weights: DummyWeights, name| weights.tensor(name, &[2, 3]).to_f32();
        assert_eq!(values(weights, "a.weight"), values(weights, "a.weight"));
        assert_ne!(values(weights, "a.weight"), values(weights, "b.weight"));
        assert_ne!(values(weights, "a.weight"), values(DummyWeights { seed: 2 }, "a.weight"));
        assert!(values(weights, "a.weight").iter().all(|v| *v != 0.0 && v.abs() < 0.2));
        assert_eq!(weights.tensor("model.norm.weight", &[3]).to_f32(), [1.0; 3]);
    }
}
