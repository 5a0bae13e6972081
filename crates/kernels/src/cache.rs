//! Compiled kernels on disk.
//!
//! A file is `magic, checksum of the rest, machine code`, and its name the hash of all that went
//! into it, so a file never goes stale. Whatever is wrong with the cache, a kernel is compiled.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use crate::hash::Hash;

const MAGIC: &[u8; 8] = b"inflcub1";
const HEADER_LEN: usize = 8 + 16;

/// A folder of compiled kernels, if the machine has a place for one.
#[derive(Debug)]
pub(crate) struct Cache {
    folder: Option<PathBuf>,
}

impl Cache {
    pub(crate) fn new(folder: Option<PathBuf>) -> Self {
        Self { folder }
    }

    /// `${XDG_CACHE_HOME:-~/.cache}/inflight/kernels`.
    pub(crate) fn default_folder() -> Option<PathBuf> {
        let absolute = |name| {
            let path = PathBuf::from(std::env::var_os(name)?);
            path.is_absolute().then_some(path)
        };
        let base = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
        Some(base.join("inflight").join("kernels"))
    }

    fn path(&self, key: Hash) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join(format!("{:032x}.cubin", key.value())))
    }

    /// The machine code stored under `key`; `None` if there is none or it is damaged.
    pub(crate) fn read(&self, key: Hash) -> Option<Vec<u8>> {
        let mut bytes = fs::read(self.path(key)?).ok()?;
        let header = bytes.get(..HEADER_LEN)?;
        let checksum = Hash::new().bytes(&bytes[HEADER_LEN..]).value().to_le_bytes();
        if header[..8] != *MAGIC || header[8..] != checksum {
            return None;
        }
        bytes.drain(..HEADER_LEN);
        Some(bytes)
    }

    /// Stores machine code, so that no reader ever sees a part of it. Failing to is no error: a
    /// read-only home only means that the next start compiles again.
    pub(crate) fn write(&self, key: Hash, cubin: &[u8]) {
        if let Some(path) = self.path(key) {
            let _ = write_by_rename(&path, cubin);
        }
    }
}

fn write_by_rename(path: &Path, cubin: &[u8]) -> std::io::Result<()> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let number = COUNTER.fetch_add(1, Ordering::Relaxed);
    let temporary = path.with_extension(format!("tmp-{}-{number}", std::process::id()));
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let write = || {
        let mut file = fs::File::create(&temporary)?;
        file.write_all(MAGIC)?;
        file.write_all(&Hash::new().bytes(cubin).value().to_le_bytes())?;
        file.write_all(cubin)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    };
    write().inspect_err(|_| drop(fs::remove_file(&temporary)))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let name = format!("inflight-kernels-{name}-{}", std::process::id());
            Self(std::env::temp_dir().join(name))
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn what_was_written_is_read_and_damage_is_noticed() {
        let folder = Folder::new("damage");
        let cache = Cache::new(Some(folder.0.clone()));
        let (key, other) = (Hash::new().text("a"), Hash::new().text("b"));
        assert_eq!(cache.read(key), None);
        cache.write(key, b"machine code");
        assert_eq!(cache.read(key).unwrap(), b"machine code");
        assert_eq!(cache.read(other), None);
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 1, "a temporary file was left");

        let path = cache.path(key).unwrap();
        let whole = fs::read(&path).unwrap();
        for len in [0, 5, HEADER_LEN, whole.len() - 1] {
            fs::write(&path, &whole[..len]).unwrap();
            assert_eq!(cache.read(key), None, "cut to {len} bytes");
        }
        for i in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[i] ^= 1;
            fs::write(&path, flipped).unwrap();
            assert_eq!(cache.read(key), None, "bit of byte {i} flipped");
        }
        cache.write(key, b"machine code");
        assert_eq!(cache.read(key).unwrap(), b"machine code");
    }

    /// Threads here; processes have names of their own for what they have not finished.
    #[test]
    fn of_several_writers_one_is_read_whole() {
        let folder = Folder::new("writers");
        let cache = Cache::new(Some(folder.0.clone()));
        let key = Hash::new().text("a");
        cache.write(key, &[0; 1000]);
        std::thread::scope(|scope| {
            for writer in 1..=4 {
                let cache = &cache;
                scope.spawn(move || {
                    for _ in 0..10 {
                        cache.write(key, &vec![writer; 1000 * usize::from(writer)]);
                        let read = cache.read(key).expect("there is always a whole file");
                        assert_eq!(read, vec![read[0]; 1000 * usize::from(read[0])]);
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 1, "a temporary file was left");
    }

    #[test]
    fn no_folder_or_one_that_cannot_be_is_no_error() {
        let key = Hash::new();
        for folder in [None, Some("/dev/null/kernels".into())] {
            let cache = Cache::new(folder);
            cache.write(key, b"code");
            assert_eq!(cache.read(key), None);
        }
    }
}
