//! Reading little-endian numbers and strings without ever leaving the file.

use crate::ModelError;

/// A place in a file's bytes.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    position: usize,
    path: &'a str,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(path: &'a str, bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0, path }
    }

    pub(super) fn path(&self) -> &'a str {
        self.path
    }

    pub(super) fn position(&self) -> usize {
        self.position
    }

    pub(super) fn remaining(&self) -> usize {
        self.bytes.len() - self.position
    }

    /// The next `len` bytes; `what` names them should the file end before.
    pub(super) fn take(&mut self, len: usize, what: &str) -> Result<&'a [u8], ModelError> {
        let rest = &self.bytes[self.position..];
        let Some(taken) = rest.get(..len) else {
            return Err(self.error(format!(
                "the file ends in {what}: {len} bytes needed at offset {}, {} left",
                self.position,
                rest.len()
            )));
        };
        self.position += len;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], ModelError> {
        Ok(self.take(N, what)?.try_into().expect("take gives as many bytes as asked"))
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, ModelError> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, ModelError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count of things of at least `min_bytes` each, which the rest of the file must have room
    /// for: so that nothing is ever allocated for a count that cannot be true.
    pub(super) fn count(&mut self, min_bytes: usize, what: &str) -> Result<usize, ModelError> {
        let count = self.u64(what)?;
        match usize::try_from(count) {
            Ok(fits) if fits <= self.remaining() / min_bytes => Ok(fits),
            _ => Err(self.error(format!(
                "{what}: {count} cannot be true, only {} bytes are left",
                self.remaining()
            ))),
        }
    }

    /// A string of UTF-8 with its length before it.
    pub(super) fn string(&mut self, what: &str) -> Result<&'a str, ModelError> {
        let len = self.count(1, what)?;
        let bytes = self.take(len, what)?;
        str::from_utf8(bytes).map_err(|_| self.error(format!("{what}: not UTF-8")))
    }

    pub(super) fn error(&self, reason: impl Into<String>) -> ModelError {
        ModelError::bad_file(self.path, reason)
    }
}
