//! Quantised block formats: their layout, and the exact values they stand for.
//!
//! Every block splits into unsigned codes and, for each group of 32 or 16 of them, a scale and a
//! minimum; an element is `scale * code + min`. Kernels repack weights from that view
//! ([`unpack_groups`]), and [`dequantize_row`] reads values through it:
//!
//! ```text
//! type   codes    group  scale               min
//! Q4_0   0..=15   32     d                   -8 d
//! Q4_1   0..=15   32     d                   m
//! Q5_0   0..=31   32     d                   -16 d
//! Q5_1   0..=31   32     d                   m
//! Q8_0   0..=255  32     d                   -128 d      (the stored signed byte plus 128)
//! Q4_K   0..=15   32     d * scale[g]        -dmin * min[g]
//! Q5_K   0..=31   32     d * scale[g]        -dmin * min[g]
//! Q6_K   0..=63   16     d * scale[g]        -32 d * scale[g]
//! ```
//!
//! Scales are halves times at most seven bits, so `scale * code` and `min` never round in f32: the
//! one rounding is that of the sum, as in ggml's own dequantisation.
//!
//! Invariant: safe code; a row's bytes and values always match its dtype (the loader checks them).

mod blocks;
pub mod fp8;
mod plain;
mod random;
mod super_blocks;

pub use random::random_row;

use crate::Dtype;

/// How the codes of one group become values: `scale * code + min`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[allow(missing_docs)]
pub struct Group {
    pub scale: f32,
    pub min: f32,
}

/// Elements that share a scale and a minimum, or `None` for plain types, which have neither.
pub const fn group_len(dtype: Dtype) -> Option<usize> {
    match dtype {
        Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F8E4M3 => None,
        Dtype::Q6K => Some(16),
        _ => Some(32),
    }
}

/// Splits one or more whole blocks into codes and groups, both in the order of the elements.
///
/// # Shapes
/// `bytes`: `n` blocks; `codes`: `n * block_len`; `groups`: `n * block_len / group_len`.
///
/// # Panics
/// If the lengths disagree, or `dtype` is a plain type.
///
/// # Source
/// Layouts: llama.cpp `ggml/src/ggml-common.h` and `ggml-quants.c`.
pub fn unpack_groups(dtype: Dtype, bytes: &[u8], codes: &mut [u8], groups: &mut [Group]) {
    let group_len = group_len(dtype).expect("plain types have no groups");
    assert_eq!(dtype.row_bytes(codes.len()), Some(bytes.len()), "{dtype}: bytes of a row");
    assert_eq!(groups.len() * group_len, codes.len(), "{dtype}: groups of a row");
    match dtype {
        Dtype::Q4_0 => each_block(bytes, codes, groups, blocks::unpack_q4_0),
        Dtype::Q4_1 => each_block(bytes, codes, groups, blocks::unpack_q4_1),
        Dtype::Q5_0 => each_block(bytes, codes, groups, blocks::unpack_q5_0),
        Dtype::Q5_1 => each_block(bytes, codes, groups, blocks::unpack_q5_1),
        Dtype::Q8_0 => each_block(bytes, codes, groups, blocks::unpack_q8_0),
        Dtype::Q4K => each_block(bytes, codes, groups, super_blocks::unpack_q4_k),
        Dtype::Q5K => each_block(bytes, codes, groups, super_blocks::unpack_q5_k),
        Dtype::Q6K => each_block(bytes, codes, groups, super_blocks::unpack_q6_k),
        Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F8E4M3 => {
            unreachable!("plain types have no groups")
        }
    }
}

/// Calls `unpack` for each block of `BYTES` bytes, `LEN` codes and `GROUPS` groups.
fn each_block<const BYTES: usize, const LEN: usize, const GROUPS: usize>(
    bytes: &[u8],
    codes: &mut [u8],
    groups: &mut [Group],
    unpack: impl Fn(&[u8; BYTES], &mut [u8; LEN]) -> [Group; GROUPS],
) {
    let blocks = bytes.as_chunks::<BYTES>().0.iter();
    let codes = codes.as_chunks_mut::<LEN>().0.iter_mut();
    let groups = groups.as_chunks_mut::<GROUPS>().0.iter_mut();
    for ((block, codes), groups) in blocks.zip(codes).zip(groups) {
        *groups = unpack(block, codes);
    }
}

/// Writes the values that `bytes` stand for into `out`.
///
/// # Panics
/// If `bytes` are not those of a row of `out.len()` elements.
pub fn dequantize_row(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(dtype.row_bytes(out.len()), Some(bytes.len()), "{dtype}: bytes of a row");
    let Some(group_len) = group_len(dtype) else { return plain::read_row(dtype, bytes, out) };
    let mut codes = [0; 256];
    let mut groups = [Group::default(); 16];
    let codes = &mut codes[..dtype.block_len()];
    let groups = &mut groups[..dtype.block_len() / group_len];
    let blocks = bytes.chunks_exact(dtype.block_bytes());
    for (block, out) in blocks.zip(out.chunks_exact_mut(dtype.block_len())) {
        unpack_groups(dtype, block, codes, groups);
        let codes = codes.chunks_exact(group_len);
        let out = out.chunks_exact_mut(group_len);
        for ((group, codes), out) in groups.iter().zip(codes).zip(out) {
            for (value, code) in out.iter_mut().zip(codes) {
                *value = group.scale * f32::from(*code) + group.min;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const FIXTURES: &[(&str, Dtype)] = &[
        ("f16", Dtype::F16),
        ("bf16", Dtype::BF16),
        ("q4_0", Dtype::Q4_0),
        ("q4_1", Dtype::Q4_1),
        ("q5_0", Dtype::Q5_0),
        ("q5_1", Dtype::Q5_1),
        ("q8_0", Dtype::Q8_0),
        ("q4_k", Dtype::Q4K),
        ("q5_k", Dtype::Q5K),
        ("q6_k", Dtype::Q6K),
    ];

    /// See `tests/fixtures/make_quant_fixtures.py` for the files' layout.
    #[test]
    fn values_are_those_of_the_gguf_package() {
        for (name, dtype) in FIXTURES {
            let path = format!("tests/fixtures/quant_blocks/{name}.bin");
            let file = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap();
            let word = |at: usize| u32::from_le_bytes(file[at * 4..][..4].try_into().unwrap());
            let (num_blocks, block_bytes, block_len) =
                (word(0) as usize, word(1) as usize, word(2) as usize);
            assert_eq!((block_bytes, block_len), (dtype.block_bytes(), dtype.block_len()));

            let (blocks, values) = file[12..].split_at(num_blocks * block_bytes);
            let mut expected = vec![0.0; num_blocks * block_len];
            dequantize_row(Dtype::F32, values, &mut expected);
            let mut out = vec![f32::NAN; expected.len()];
            dequantize_row(*dtype, blocks, &mut out);
            for (i, (value, expected)) in out.iter().zip(&expected).enumerate() {
                assert_eq!(value, expected, "{dtype}, element {i}");
            }
        }
    }

    #[test]
    fn groups_of_several_blocks_are_those_of_each_block() {
        let bytes: Vec<u8> = (0..3 * 210).map(|i| (i * 37 % 251) as u8).collect();
        for (_, dtype) in FIXTURES {
            let Some(group_len) = group_len(*dtype) else { continue };
            let (len, bytes_len) = (dtype.block_len(), dtype.block_bytes());
            let unpack = |bytes: &[u8]| {
                let len = bytes.len() / bytes_len * len;
                let (mut codes, mut groups) =
                    (vec![0; len], vec![Group::default(); len / group_len]);
                unpack_groups(*dtype, bytes, &mut codes, &mut groups);
                (codes, groups.iter().map(|g| (g.scale.to_bits(), g.min.to_bits())).collect())
            };
            let whole: (Vec<u8>, Vec<(u32, u32)>) = unpack(&bytes[..3 * bytes_len]);
            let last = unpack(&bytes[2 * bytes_len..3 * bytes_len]);
            assert_eq!(whole.0[2 * len..], last.0);
            assert_eq!(whole.1[2 * len / group_len..], last.1);
        }
    }

    #[test]
    #[should_panic(expected = "bytes of a row")]
    fn a_partial_block_is_refused() {
        dequantize_row(Dtype::Q8_0, &[0; 33], &mut [0.0; 32]);
    }
}
