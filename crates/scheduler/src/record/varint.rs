//! Numbers as few bytes: seven bits each, the lowest first, the eighth says that more follow.

/// Appends `value`.
pub(super) fn write(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

/// Takes a number from the front of `bytes`; `None` if there is no whole one.
pub(super) fn read(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        let bits = u64::from(byte & 0x7f);
        value |= bits.checked_shl(shift).filter(|shifted| shifted >> shift == bits)?;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back() {
        let numbers = [0, 1, 127, 128, 300, 1 << 35, u64::MAX];
        let mut bytes = Vec::new();
        numbers.iter().for_each(|&number| write(&mut bytes, number));
        assert_eq!(bytes[3..5], [0x80, 0x01]);
        let mut rest = &bytes[..];
        assert_eq!(numbers.map(|_| read(&mut rest)), numbers.map(Some));
        assert_eq!(read(&mut rest), None);
        assert_eq!(read(&mut &[0xff; 11][..]), None, "it does not fit 64 bits");
        assert_eq!(read(&mut &[0x80][..]), None, "it is cut off");
    }
}
