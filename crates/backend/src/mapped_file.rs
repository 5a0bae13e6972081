//! Read-only memory-mapped files.

use std::{fs::File, path::Path};

use crate::BackendError;

/// A whole file, mapped read-only.
#[derive(Debug)]
pub struct MappedFile {
    map: memmap2::Mmap,
    path: String,
}

impl MappedFile {
    /// Maps `path`.
    ///
    /// # Errors
    /// [`BackendError::File`] if it cannot be opened or mapped.
    pub fn open(path: &Path) -> Result<Self, BackendError> {
        let name = path.display().to_string();
        let fail = |source| BackendError::File { path: name.clone(), source };
        let file = File::open(path).map_err(fail)?;
        // SAFETY: the mapping is private and read-only. A weight file that someone truncates while
        // it is served is outside what any loader that maps files can defend against.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(fail)?;
        Ok(Self { map, path: name })
    }

    /// The file's bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// The path as given, for messages.
    pub fn path(&self) -> &str {
        &self.path
    }
}
