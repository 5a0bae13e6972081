//! Where files lie.

use std::fmt;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::object::{FileKind, FileObject, FileStatus, Purpose};
use super::records::{Record, Records};
use crate::batches::{Batch, Desk};
use crate::error::ApiError;
use crate::random::{random_id, random_u64};
use crate::state::unix_time_s;

/// Most files; further ones are refused.
const MAX_FILES: usize = 10_000;

/// Why files cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// The folder cannot be used.
    #[error("{path}: {error}")]
    Folder {
        /// Which.
        path: String,
        /// Why.
        error: io::Error,
    },
    /// Another server uses it.
    #[error("{path} is another server's, which is running")]
    Busy {
        /// Which.
        path: String,
    },
}

/// A folder of files and batches. Cheap to clone.
#[derive(Clone)]
pub struct FileStore(Arc<Inner>);

struct Inner {
    folder: PathBuf,
    max_bytes: u64,
    /// So that nobody can find a key by its owner's name.
    salt: String,
    files: Records<FileObject>,
    batches: Records<Batch>,
    desk: Desk,
    /// Held as long as the store is used.
    _lock: File,
}

impl fmt::Debug for FileStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileStore").field("folder", &self.0.folder).finish_non_exhaustive()
    }
}

impl PartialEq for FileStore {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for FileStore {}

impl FileStore {
    /// Uses a folder, which is made if it is not there. `max_bytes`: most bytes of all files
    /// together.
    ///
    /// # Errors
    /// It cannot be made, read or written, or another server uses it.
    pub fn open(folder: &Path, max_bytes: u64) -> Result<Self, FilesError> {
        let path = folder.display().to_string();
        let failed = |error| FilesError::Folder { path: path.clone(), error };
        fs::create_dir_all(folder.join("data")).map_err(failed)?;
        let lock = File::create(folder.join("lock")).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(FilesError::Busy { path }),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        // What an earlier process did not receive whole.
        let parts = folder.join("parts");
        let cleared = match fs::remove_dir_all(&parts) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => fs::create_dir(parts),
        };
        cleared.map_err(failed)?;
        Ok(Self(Arc::new(Inner {
            folder: folder.to_owned(),
            max_bytes,
            salt: salt(&folder.join("salt")).map_err(failed)?,
            files: Records::open(folder.join("files")).map_err(failed)?,
            batches: Records::open(folder.join("batches")).map_err(failed)?,
            desk: Desk::default(),
            _lock: lock,
        })))
    }

    pub(crate) fn files(&self) -> &Records<FileObject> {
        &self.0.files
    }

    pub(crate) fn batches(&self) -> &Records<Batch> {
        &self.0.batches
    }

    /// Where batches wait for their turn.
    pub(crate) fn desk(&self) -> &Desk {
        &self.0.desk
    }

    pub(crate) fn salt(&self) -> &str {
        &self.0.salt
    }

    /// What a file, or a batch's answers, holds.
    pub(crate) fn data_path(&self, id: &str) -> PathBuf {
        self.0.folder.join("data").join(id)
    }

    /// Where something is written until it is whole.
    pub(crate) fn part_path(&self, id: &str) -> PathBuf {
        self.0.folder.join("parts").join(id)
    }

    /// Most bytes that one more file may have.
    ///
    /// # Errors
    /// There is room for none.
    pub(crate) fn room(&self) -> Result<u64, ApiError> {
        let (num_files, used) = self.0.files.sum(|file| file.bytes);
        let room = self.0.max_bytes.saturating_sub(used);
        if num_files >= MAX_FILES || room == 0 {
            return Err(self.full());
        }
        Ok(room)
    }

    pub(crate) fn full(&self) -> ApiError {
        ApiError::FilesFull { max_bytes: self.0.max_bytes, max_files: MAX_FILES }
    }

    /// Keeps a file that has been written whole.
    ///
    /// # Errors
    /// It cannot be moved to its place.
    pub(crate) fn keep(
        &self,
        part: &Path,
        id: String,
        purpose: Purpose,
        filename: String,
        owner: Option<String>,
    ) -> io::Result<Record<FileObject>> {
        let bytes = fs::metadata(part)?.len();
        fs::rename(part, self.data_path(&id))?;
        let object = FileObject {
            id: id.clone(),
            object: FileKind::File,
            bytes,
            created_at: unix_time_s(),
            filename,
            purpose,
            status: FileStatus::Processed,
        };
        self.0.files.put(&id, owner, object)
    }

    /// Forgets a file.
    ///
    /// # Errors
    /// It cannot be removed.
    pub(crate) fn delete(&self, id: &str) -> io::Result<()> {
        self.0.files.remove(id)?;
        match fs::remove_file(self.data_path(id)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

/// A random text that stays the same.
fn salt(path: &Path) -> io::Result<String> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let salt = random_id(&format!("{:016x}", random_u64()));
            fs::write(path, &salt)?;
            Ok(salt)
        }
        read => read,
    }
}
