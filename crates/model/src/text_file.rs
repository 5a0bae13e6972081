//! Reading small text files that may be anything.

use std::{fs::File, io::Read, path::Path};

use crate::ModelError;

/// An index of a model with a million tensors is smaller.
const MAX_BYTES: u64 = 64 << 20;

/// The text of `path`, if it is not larger than any configuration could be.
pub(crate) fn read(path: &Path) -> Result<String, ModelError> {
    let io = |source| ModelError::io(path, source);
    let mut text = String::new();
    let file = File::open(path).map_err(io)?;
    file.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(io)?;
    if text.len() as u64 > MAX_BYTES {
        let reason = format!("larger than {MAX_BYTES} bytes");
        return Err(ModelError::bad_file(&path.display().to_string(), reason));
    }
    Ok(text)
}
