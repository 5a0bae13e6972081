//! API keys: what they open and how much of it.

use std::fmt;
use std::num::NonZeroU32;

use ring::digest::{SHA256, digest};
use subtle::ConstantTimeEq;

/// Longest name of a key.
const MAX_NAME_BYTES: usize = 256;
/// Longest key.
const MAX_SECRET_BYTES: usize = 1024;

/// Why a key cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// It could not be sent in a header.
    #[error("a key has 1 to {MAX_SECRET_BYTES} visible ASCII characters and no spaces")]
    Unsendable,
    /// It is there twice.
    #[error("the same key is there twice")]
    Twice,
    /// Its name cannot be a tenant's.
    #[error("a key's name has 1 to {MAX_NAME_BYTES} bytes and no control characters")]
    Name,
    /// What should be a SHA-256 is none.
    #[error("`sha256:` is followed by 64 hexadecimal digits")]
    Hash,
    /// A word of a line that nobody understands. It is not told, since it may be a key.
    #[error(
        "after a key come only name=, requests_per_minute=, tokens_per_minute=, max_concurrent= \
         and admin"
    )]
    Word,
    /// A limit that is none.
    #[error("{name}={value}: it must be from 1 to {}", u32::MAX)]
    Limit {
        /// Which one.
        name: String,
        /// What was written.
        value: String,
    },
    /// The file is neither lines nor JSON of keys.
    #[error("it is not a list of keys: {0}")]
    Json(String),
    /// Where an error is.
    #[error("{place}: {error}")]
    At {
        /// A line, or a member of a list, counted from 1.
        place: String,
        /// What is wrong there.
        error: Box<KeyError>,
    },
    /// A file of keys that lets nobody in.
    #[error("it has no keys")]
    Empty,
}

/// How much one key may ask for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyLimits {
    /// POST requests in a minute, whether or not they succeed. Default: no limit.
    pub requests_per_minute: Option<NonZeroU32>,
    /// Tokens of prompts and outputs in a minute. What a request costs is known when it has ended,
    /// so one may go over; the next waits until that is made up for. Default: no limit.
    pub tokens_per_minute: Option<NonZeroU32>,
    /// POST requests at once. Default: no limit.
    pub max_concurrent: Option<NonZeroU32>,
}

/// A key, of which only the hash is kept.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey {
    sha256: [u8; 32],
    /// Whose it is: the tenant of all its requests, where tenants are served fairly. Without a name
    /// a request's `user` is.
    pub name: Option<String>,
    /// Whether it opens `/metrics` and `/debug`, which tell about everybody's requests.
    pub is_admin: bool,
    /// How much it may ask for.
    pub limits: KeyLimits,
}

impl ApiKey {
    /// A key without name and limits.
    ///
    /// # Errors
    /// It could not be sent.
    pub fn new(secret: &str) -> Result<Self, KeyError> {
        let is_sendable = secret.bytes().all(|byte| byte.is_ascii_graphic());
        if !is_sendable || !(1..=MAX_SECRET_BYTES).contains(&secret.len()) {
            return Err(KeyError::Unsendable);
        }
        Ok(Self::hashed(sha256(secret.as_bytes())))
    }

    /// A key as files spell it: itself, or `sha256:` and its hash in hexadecimal digits.
    ///
    /// # Errors
    /// It is malformed.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        match text.strip_prefix("sha256:") {
            Some(digits) => from_hex(digits).map(Self::hashed).ok_or(KeyError::Hash),
            None => Self::new(text),
        }
    }

    fn hashed(sha256: [u8; 32]) -> Self {
        Self { sha256, name: None, is_admin: false, limits: KeyLimits::default() }
    }

    /// Sixteen digits that tell it from other keys, and nothing without the salt.
    pub(crate) fn salted(&self, salt: &str) -> String {
        let hash = sha256(&[salt.as_bytes(), &self.sha256].concat());
        hash[..8].iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// With an administrator's rights.
    #[must_use]
    pub fn for_admins(self) -> Self {
        Self { is_admin: true, ..self }
    }

    /// With a name.
    ///
    /// # Errors
    /// It is empty, too long or not to be shown.
    pub fn named(mut self, name: &str) -> Result<Self, KeyError> {
        let is_shown = !name.chars().any(char::is_control);
        if !is_shown || !(1..=MAX_NAME_BYTES).contains(&name.len()) {
            return Err(KeyError::Name);
        }
        self.name = Some(name.to_owned());
        Ok(self)
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the hash: short keys can be found from it.
        f.debug_struct("ApiKey").field("name", &self.name).finish_non_exhaustive()
    }
}

/// All keys that open the server. None: it is open to everybody.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApiKeys(Vec<ApiKey>);

impl ApiKeys {
    /// Adds a key.
    ///
    /// # Errors
    /// It is there already.
    pub fn add(&mut self, key: ApiKey) -> Result<(), KeyError> {
        if self.0.iter().any(|other| other.sha256 == key.sha256) {
            return Err(KeyError::Twice);
        }
        self.0.push(key);
        Ok(())
    }

    /// The keys, in the order in which they were added.
    pub fn all(&self) -> &[ApiKey] {
        &self.0
    }

    /// Where the key is that someone sent. How long this takes depends on nothing but the length
    /// of what was sent and the number of keys.
    pub(crate) fn find(&self, secret: &[u8]) -> Option<usize> {
        let sent = sha256(secret);
        let mut found = None;
        for (index, key) in self.0.iter().enumerate() {
            if bool::from(key.sha256.ct_eq(&sent)) {
                found = Some(index);
            }
        }
        found
    }
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    digest(&SHA256, bytes).as_ref().try_into().expect("SHA-256 has 32 bytes")
}

fn from_hex(digits: &str) -> Option<[u8; 32]> {
    let digits = digits.as_bytes();
    if digits.len() != 64 {
        return None;
    }
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let digit = |at: usize| char::from(pair[at]).to_digit(16);
        *byte = u8::try_from(digit(0)? << 4 | digit(1)?).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of "abc".
    ///
    /// # Source
    /// FIPS 180-2, appendix B.1.
    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn keys_are_found_by_their_hash() {
        let mut keys = ApiKeys::default();
        keys.add(ApiKey::new("first").unwrap()).unwrap();
        keys.add(ApiKey::parse(&format!("sha256:{ABC}")).unwrap()).unwrap();
        assert_eq!(keys.find(b"abc"), Some(1));
        assert_eq!(keys.find(b"first"), Some(0));
        for wrong in ["", "abcd", "ab", "first ", "First", ABC] {
            assert_eq!(keys.find(wrong.as_bytes()), None, "{wrong}");
        }
        assert_eq!(keys.add(ApiKey::new("abc").unwrap()), Err(KeyError::Twice));
        assert!(!format!("{keys:?}").contains("ba78"));
    }

    #[test]
    fn malformed_keys() {
        let check = |text: &str, error| assert_eq!(ApiKey::parse(text), Err(error), "{text}");
        check("", KeyError::Unsendable);
        check("a b", KeyError::Unsendable);
        check("ä", KeyError::Unsendable);
        check(&"a".repeat(1025), KeyError::Unsendable);
        check("sha256:", KeyError::Hash);
        check(&format!("sha256:{}", &ABC[1..]), KeyError::Hash);
        check(&format!("sha256:g{}", &ABC[1..]), KeyError::Hash);
        let key = ApiKey::new("a").unwrap();
        assert_eq!(key.clone().named(""), Err(KeyError::Name));
        assert_eq!(key.clone().named("a\nb"), Err(KeyError::Name));
        assert_eq!(key.named("Ann B.").unwrap().name.as_deref(), Some("Ann B."));
    }
}
