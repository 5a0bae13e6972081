//! Memory for weights: zeroed, aligned to pages, huge ones where the system gives them.

use memmap2::MmapMut;

use crate::BackendError;

/// An anonymous mapping that holds panels.
pub(super) struct PanelMemory {
    map: MmapMut,
    len: usize,
}

impl PanelMemory {
    /// `len` bytes of zeros.
    pub(super) fn zeroed(len: usize) -> Result<Self, BackendError> {
        let fail = |_| BackendError::OutOfMemory {
            device: "cpu",
            what: "weights".to_string(),
            bytes: len,
        };
        let map = MmapMut::map_anon(len.max(1)).map_err(fail)?;
        #[cfg(target_os = "linux")]
        {
            // Fewer misses of the address cache; a system that has no huge pages goes without.
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        Ok(Self { map, len })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.map[..self.len]
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.map[..self.len]
    }
}
