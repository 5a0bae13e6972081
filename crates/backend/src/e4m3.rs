//! Numbers of eight bits: sign, four of exponent, three of mantissa, no infinities.
//!
//! # Source
//! Micikevicius et al.: "FP8 formats for deep learning", 2022, table 1.

/// The greatest number.
pub(crate) const GREATEST: f32 = 448.0;

/// The nearest code, ties to even; beyond the greatest number, that one.
pub(crate) fn from_f32(x: f32) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    if x.is_nan() {
        return sign | 0x7f;
    }
    let magnitude = x.abs().min(GREATEST);
    // Below 2^-6 the steps stay as wide as there: eighths of it.
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(-6);
    let step = f32::from_bits(((exponent - 3 + 127) as u32) << 23);
    let steps = (magnitude / step).round_ties_even() as i32;
    // 8 to 15 steps; 16 are the next exponent's 8, and at the lowest exponent fewer are subnormal.
    sign | ((exponent + 6) * 8 + steps) as u8
}

/// What a code stands for.
pub(crate) fn to_f32(code: u8) -> f32 {
    if code & 0x7f == 0x7f {
        return f32::NAN;
    }
    widen(code)
}

/// 2^120, between the exponents of f32 and of e4m3: what a code's magnitude must be multiplied by
/// once it lies where f32 has exponent and mantissa.
pub(crate) const WIDEN_FACTOR: f32 = f32::from_bits((120 + 127) << 23);

/// As [`to_f32`], for codes that are numbers: without branches.
#[inline(always)]
pub(crate) fn widen(code: u8) -> f32 {
    let magnitude = f32::from_bits(u32::from(code & 0x7f) << 20) * WIDEN_FACTOR;
    f32::from_bits(magnitude.to_bits() | u32::from(code & 0x80) << 24)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn f32s(bytes: &[u8]) -> Vec<f32> {
        bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    /// See `tests/fixtures/make_fp8_fixtures.py` for the file's layout.
    #[test]
    fn codes_are_those_of_ml_dtypes() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/fp8/e4m3.bin");
        let file = std::fs::read(path).unwrap();
        let (values, rest) = file.split_at(256 * 4);
        for (code, value) in f32s(values).into_iter().enumerate() {
            let ours = to_f32(code as u8);
            assert!(ours.to_bits() == value.to_bits() || ours.is_nan() && value.is_nan(), "{code}");
        }
        let num = u32::from_le_bytes(rest[..4].try_into().unwrap()) as usize;
        let (numbers, codes) = rest[4..].split_at(num * 4);
        assert_eq!(codes.len(), num);
        for (number, code) in f32s(numbers).into_iter().zip(codes) {
            assert_eq!(from_f32(number), *code, "{number}");
        }
    }

    #[test]
    fn codes_stand_for_what_the_paper_says() {
        for (code, expected) in [
            (0x00, 0.0),
            (0x01, 2f32.powi(-9)),
            (0x07, 0.875 * 2f32.powi(-6)),
            (0x08, 2f32.powi(-6)),
            (0x38, 1.0),
            (0x3c, 1.5),
            (0x7e, 448.0),
            (0xb8, -1.0),
        ] {
            assert_eq!(to_f32(code), expected, "{code:#x}");
        }
        assert!(to_f32(0x7f).is_nan() && to_f32(0xff).is_nan());
        assert_eq!(to_f32(0x80).to_bits(), (-0.0f32).to_bits());
    }

    #[test]
    fn every_number_finds_its_nearest_code() {
        let numbers = (0..=0x7e).map(to_f32);
        for (code, x) in numbers.clone().enumerate() {
            assert_eq!(usize::from(from_f32(x)), code);
            assert_eq!(usize::from(from_f32(-x)), code | 0x80);
        }
        for (code, (a, b)) in numbers.clone().zip(numbers.skip(1)).enumerate() {
            // The middle goes to the even code, what is beside it to the nearer one.
            let middle = f32::midpoint(a, b);
            let even = code + code % 2;
            assert_eq!(usize::from(from_f32(middle)), even, "{middle}");
            assert_eq!(usize::from(from_f32(middle.next_down())), code, "below {middle}");
            assert_eq!(usize::from(from_f32(middle.next_up())), code + 1, "above {middle}");
        }
        assert_eq!(from_f32(1e9), 0x7e);
        assert_eq!(from_f32(f32::NEG_INFINITY), 0xfe);
        assert_eq!(from_f32(f32::NAN), 0x7f);
    }
}
