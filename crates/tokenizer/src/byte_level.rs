//! The byte alphabet of GPT-2: every byte as one printable character.
//!
//! Vocabularies of the `gpt2` family spell tokens in this alphabet, so that no token contains a
//! space or a control character.
//!
//! # Source
//! Radford et al. 2019, the released encoder: printable Latin-1 bytes stand for themselves, the
//! other 68 get the code points from U+0100 on, in order.

/// One past the highest code point that the alphabet uses.
const ALPHABET_END: usize = 256 + 68;

/// Characters by byte.
static CHARS: [char; 256] = byte_chars();

/// Bytes by code point; `None` where the alphabet has no such character.
static BYTES: [Option<u8>; ALPHABET_END] = char_bytes();

const fn is_printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

const fn byte_chars() -> [char; 256] {
    let mut chars = ['\0'; 256];
    let mut next = 256;
    let mut byte = 0;
    while byte < 256 {
        let code = if is_printable(byte as u8) { byte as u32 } else { next };
        if code >= 256 {
            next += 1;
        }
        chars[byte] = match char::from_u32(code) {
            Some(c) => c,
            None => unreachable!(),
        };
        byte += 1;
    }
    chars
}

const fn char_bytes() -> [Option<u8>; ALPHABET_END] {
    let mut bytes = [None; ALPHABET_END];
    let mut byte = 0;
    while byte < 256 {
        bytes[CHARS[byte] as usize] = Some(byte as u8);
        byte += 1;
    }
    bytes
}

/// Spells `bytes` in the alphabet, appending to `out`.
pub(crate) fn spell(bytes: &[u8], out: &mut String) {
    out.extend(bytes.iter().map(|&byte| CHARS[usize::from(byte)]));
}

/// Reads a token back into bytes; `None` when a character lies outside the alphabet.
pub(crate) fn read(token: &str) -> Option<Vec<u8>> {
    token.chars().map(|c| BYTES.get(c as usize).copied().flatten()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_letters_of_the_alphabet() {
        let mut spelled = String::new();
        spell(b" \n\t!a\x7f\xad\xff", &mut spelled);
        assert_eq!(spelled, "ĠĊĉ!aġŃÿ");
    }

    #[test]
    fn every_byte_survives() {
        let all: Vec<u8> = (0..=255).collect();
        let mut spelled = String::new();
        spell(&all, &mut spelled);
        assert_eq!(read(&spelled), Some(all));
        assert_eq!(read("a b"), None, "a space is spelled otherwise");
        assert_eq!(read("\u{2581}"), None);
    }
}
