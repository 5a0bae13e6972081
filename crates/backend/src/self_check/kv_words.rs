//! KV caches as words: what operators should find in a cache, and what they left there.

use half::{bf16, f16};

use crate::{KvDtype, KvLayout, e4m3};

/// A cache with these numbers, `[num_blocks, num_kv_heads, block_size, head_dim]`; NaN makes a
/// scale NaN where there is one.
pub(super) fn encode(layout: &KvLayout, numbers: &[f32]) -> Vec<u32> {
    let strips = numbers.chunks_exact(layout.block_size * layout.head_dim);
    let bytes: Vec<u8> = strips.flat_map(|strip| encode_strip(layout, strip)).collect();
    bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
}

/// The numbers of a cache.
pub(super) fn decode(layout: &KvLayout, words: &[u32]) -> Vec<f32> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let strips = bytes.chunks_exact(layout.strip_bytes());
    strips.flat_map(|strip| decode_strip(layout, strip)).collect()
}

fn encode_strip(layout: &KvLayout, numbers: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(layout.strip_bytes());
    let mut scales = Vec::new();
    for head in numbers.chunks_exact(layout.head_dim) {
        if layout.dtype == KvDtype::Int4 {
            encode_groups(head, &mut bytes, &mut scales);
            continue;
        }
        let greatest = head.iter().fold(0.0f32, |greatest, x| greatest.max(x.abs()));
        let greatest_code = layout.dtype.greatest_code().unwrap_or(greatest);
        let inverse = if greatest > 0.0 { greatest_code / greatest } else { 0.0 };
        let is_number = head.iter().all(|x| !x.is_nan());
        let scale = if is_number { greatest / greatest_code } else { f32::NAN };
        scales.extend(scale.to_le_bytes());
        for x in head {
            match layout.dtype {
                KvDtype::F32 => bytes.extend(x.to_le_bytes()),
                KvDtype::F16 => bytes.extend(f16::from_f32(*x).to_le_bytes()),
                KvDtype::Bf16 => bytes.extend(bf16::from_f32(*x).to_le_bytes()),
                KvDtype::Fp8 => bytes.push(e4m3::from_f32(x * inverse)),
                KvDtype::Int8 => bytes.push(((x * inverse).round_ties_even() as i8) as u8),
                KvDtype::Int4 => unreachable!("it has groups"),
            }
        }
    }
    if layout.scale_bytes() > 0 {
        bytes.extend(scales);
    }
    bytes.resize(layout.strip_bytes(), 0);
    bytes
}

/// Numbers of four bits: a factor and the least number for every group.
fn encode_groups(head: &[f32], bytes: &mut Vec<u8>, scales: &mut Vec<u8>) {
    for group in head.chunks(KvDtype::GROUP) {
        let least = group.iter().fold(f32::INFINITY, |least, x| least.min(*x));
        let greatest = group.iter().fold(f32::NEG_INFINITY, |greatest, x| greatest.max(*x));
        let is_number = group.iter().all(|x| !x.is_nan());
        let (factor, least) = (f16::from_f32((greatest - least) / 15.0), f16::from_f32(least));
        scales.extend(factor.to_le_bytes());
        scales.extend(if is_number { least } else { f16::NAN }.to_le_bytes());
        let inverse = if factor > f16::ZERO { 1.0 / factor.to_f32() } else { 0.0 };
        let code = |i: usize| {
            let x =
                group.get(i).map_or(0.0, |x| ((x - least.to_f32()) * inverse).round_ties_even());
            x.clamp(0.0, 15.0) as u8
        };
        let half = KvDtype::GROUP / 2;
        bytes.extend((0..half).map(|i| code(i) | code(i + half) << 4));
    }
}

fn decode_groups(layout: &KvLayout, strip: &[u8]) -> Vec<f32> {
    let (codes, scales) = strip.split_at(layout.codes_bytes());
    let half = KvDtype::GROUP / 2;
    let mut numbers = Vec::new();
    for token in 0..layout.block_size {
        let codes = &codes[token * layout.head_bytes()..][..layout.head_bytes()];
        let scales = &scales[token * layout.scale_bytes()..][..layout.scale_bytes()];
        let number = |i: usize| {
            let (group, at) = (i / KvDtype::GROUP, i % KvDtype::GROUP);
            let float = |at: usize| {
                f16::from_le_bytes([scales[4 * group + at], scales[4 * group + at + 1]]).to_f32()
            };
            let byte = codes[group * half + at % half];
            let code = if at < half { byte & 15 } else { byte >> 4 };
            f32::from(code) * float(0) + float(2)
        };
        numbers.extend((0..layout.head_dim).map(number));
    }
    numbers
}

fn decode_strip(layout: &KvLayout, strip: &[u8]) -> Vec<f32> {
    if layout.dtype == KvDtype::Int4 {
        return decode_groups(layout, strip);
    }
    let (codes, scales) = strip.split_at(layout.codes_bytes());
    let scale = |token: usize| match layout.dtype.greatest_code() {
        Some(_) => f32::from_le_bytes(scales.as_chunks().0[token]),
        None => 1.0,
    };
    let number = |(i, code): (usize, &[u8])| {
        let x = match layout.dtype {
            KvDtype::F32 => f32::from_le_bytes([code[0], code[1], code[2], code[3]]),
            KvDtype::F16 => f16::from_le_bytes([code[0], code[1]]).to_f32(),
            KvDtype::Bf16 => bf16::from_le_bytes([code[0], code[1]]).to_f32(),
            KvDtype::Fp8 => e4m3::to_f32(code[0]),
            KvDtype::Int8 => f32::from(code[0].cast_signed()),
            KvDtype::Int4 => unreachable!("it has groups"),
        };
        x * scale(i / layout.head_dim)
    };
    codes.chunks_exact(layout.dtype.head_bytes(1)).enumerate().map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_as_exactly_as_their_type_allows() {
        let numbers: Vec<f32> = (0..2 * 3 * 4 * 16).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
        for (dtype, step) in [
            (KvDtype::F32, 0.0),
            (KvDtype::F16, 3.0 / 2048.0),
            (KvDtype::Bf16, 3.0 / 256.0),
            (KvDtype::Fp8, 3.0 / 16.0),
            (KvDtype::Int8, 3.0 / 254.0),
            (KvDtype::Int4, 6.0 / 30.0 + 1e-2),
        ] {
            let layout = KvLayout { dtype, num_kv_heads: 3, block_size: 4, head_dim: 16 };
            let words = encode(&layout, &numbers);
            assert_eq!(words.len() * 4, 2 * layout.block_bytes());
            for (x, expected) in decode(&layout, &words).iter().zip(&numbers) {
                assert!((x - expected).abs() <= step, "{dtype}: {x} for {expected}");
            }
        }
    }
}
