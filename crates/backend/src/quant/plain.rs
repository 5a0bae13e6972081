//! Types that store every element on its own: F32, F16, BF16, F8_E4M3, little endian.

use half::{bf16, f16};

use crate::{Dtype, e4m3};

/// Reads a row of a plain type.
pub(super) fn read_row(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        Dtype::F32 => read_each(bytes, out, f32::from_le_bytes),
        Dtype::F16 => read_each(bytes, out, |bytes| f16::from_le_bytes(bytes).to_f32()),
        Dtype::BF16 => read_each(bytes, out, |bytes| bf16::from_le_bytes(bytes).to_f32()),
        Dtype::F8E4M3 => read_each(bytes, out, |[code]| e4m3::to_f32(code)),
        _ => unreachable!("{dtype} has groups"),
    }
}

fn read_each<const BYTES: usize>(bytes: &[u8], out: &mut [f32], read: impl Fn([u8; BYTES]) -> f32) {
    for (value, bytes) in out.iter_mut().zip(bytes.as_chunks::<BYTES>().0) {
        *value = read(*bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_of_plain_types() {
        let mut out = [0.0; 2];
        read_row(Dtype::F32, &[0, 0, 0x80, 0x3f, 0, 0, 0x20, 0xc0], &mut out);
        assert_eq!(out, [1.0, -2.5]);
        read_row(Dtype::F16, &[0x00, 0x3c, 0xff, 0x7b], &mut out);
        assert_eq!(out, [1.0, 65504.0]);
        read_row(Dtype::BF16, &[0x80, 0x3f, 0x49, 0xc0], &mut out);
        assert_eq!(out, [1.0, -3.140_625]);
    }
}
