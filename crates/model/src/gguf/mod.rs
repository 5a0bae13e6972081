//! GGUF files: metadata and tensors in one memory-mapped file.
//!
//! ```text
//! magic "GGUF" | version u32 | num_tensors u64 | num_metadata u64
//! metadata: key, type, value ...
//! table:    name, dimensions (innermost first), type, offset from the start of the data ...
//! padding to the alignment | data
//! ```
//!
//! # Source
//! The GGUF specification, `docs/gguf.md` of the ggml repository.

mod cursor;
mod tensor_table;
mod tokenizer;
mod value;

use std::{collections::HashMap, path::Path, sync::Arc};

use cursor::Cursor;
use inflight_backend::{HostTensor, MappedFile, TensorData};
use tensor_table::TensorInfo;
pub use tokenizer::GgufTokenizer;
pub use value::GgufValue;

use crate::ModelError;

/// An open GGUF file whose header has been checked in full.
#[derive(Clone, Debug)]
pub struct GgufFile {
    file: Arc<MappedFile>,
    header: Arc<Header>,
}

impl GgufFile {
    /// Maps `path` and reads its header.
    ///
    /// # Errors
    /// If the file is truncated, of another format, or anything in its header cannot be true.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let file = Arc::new(MappedFile::open(path)?);
        let header = Header::parse(file.path(), file.bytes())?;
        Ok(Self { file, header: Arc::new(header) })
    }

    /// The path as given, for messages.
    pub fn path(&self) -> &str {
        self.file.path()
    }

    /// The metadata value of `key`.
    pub fn metadata(&self, key: &str) -> Option<&GgufValue> {
        self.header.metadata.get(key)
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.header.by_name.contains_key(name)
    }

    /// Names of all tensors, in the file's order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.header.tensors.iter().map(|info| info.name.as_str())
    }

    /// The tensor `name`, still in the file.
    ///
    /// # Errors
    /// [`ModelError::MissingTensor`].
    pub fn tensor(&self, name: &str) -> Result<HostTensor, ModelError> {
        let place = self.header.by_name.get(name);
        let place = place.ok_or_else(|| ModelError::missing_tensor(self.path(), name))?;
        let info = &self.header.tensors[*place];
        Ok(HostTensor {
            name: info.name.clone(),
            dtype: info.dtype,
            shape: info.shape.clone(),
            data: TensorData::Mapped { file: Arc::clone(&self.file), range: info.range.clone() },
        })
    }

    /// What the file says about the tokenizer.
    ///
    /// # Errors
    /// [`ModelError::BadConfig`] naming a metadata key that is missing or of the wrong type.
    pub fn tokenizer(&self) -> Result<GgufTokenizer, ModelError> {
        GgufTokenizer::read(self)
    }
}

/// Everything before the data.
#[derive(Debug)]
struct Header {
    metadata: HashMap<String, GgufValue>,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
}

const MAGIC: &[u8] = b"GGUF";
const DEFAULT_ALIGNMENT: usize = 32;
/// Fewest bytes of a metadata entry: empty key, type, one byte.
const MIN_METADATA_BYTES: usize = 8 + 4 + 1;

impl Header {
    fn parse(path: &str, bytes: &[u8]) -> Result<Self, ModelError> {
        let cursor = &mut Cursor::new(path, bytes);
        read_version(cursor)?;
        let num_tensors = cursor.count(tensor_table::MIN_ENTRY_BYTES, "the number of tensors")?;
        let num_metadata = cursor.count(MIN_METADATA_BYTES, "the number of metadata entries")?;
        let metadata = read_metadata(cursor, num_metadata)?;
        let alignment = alignment(path, &metadata)?;
        let mut tensors = tensor_table::read_entries(cursor, num_tensors)?;
        let by_name = tensor_table::index(path, &tensors)?;
        // A file may end right after its header if it has no tensors.
        let start = cursor.position().next_multiple_of(alignment).min(bytes.len());
        tensor_table::place(path, &mut tensors, start..bytes.len(), alignment)?;
        Ok(Self { metadata, tensors, by_name })
    }
}

fn read_version(cursor: &mut Cursor<'_>) -> Result<(), ModelError> {
    let magic = cursor.take(4, "the magic number")?;
    if magic != MAGIC {
        return Err(cursor.error(format!("no GGUF file: it starts with {}", magic.escape_ascii())));
    }
    let version = cursor.u32("the version")?;
    match version {
        2 | 3 => Ok(()),
        // A small number with its bytes reversed.
        _ if version & 0xffff == 0 && version != 0 => {
            Err(cursor.error("big-endian GGUF files are not supported"))
        }
        _ => Err(cursor.error(format!("GGUF version {version} is not supported; 2 and 3 are"))),
    }
}

fn read_metadata(
    cursor: &mut Cursor<'_>,
    count: usize,
) -> Result<HashMap<String, GgufValue>, ModelError> {
    let mut metadata = HashMap::new();
    let mut budget = value::Budget::new();
    for _ in 0..count {
        let key = cursor.string("a metadata key")?;
        let value = value::read_value(cursor, key, &mut budget)?;
        if metadata.insert(key.to_owned(), value).is_some() {
            return Err(cursor.error(format!("metadata {key} occurs twice")));
        }
    }
    Ok(metadata)
}

fn alignment(path: &str, metadata: &HashMap<String, GgufValue>) -> Result<usize, ModelError> {
    const KEY: &str = "general.alignment";
    const MAX_ALIGNMENT: usize = 1 << 20;
    let Some(value) = metadata.get(KEY) else { return Ok(DEFAULT_ALIGNMENT) };
    let alignment = value.as_u64().and_then(|value| usize::try_from(value).ok());
    alignment.filter(|n| n.is_power_of_two() && *n <= MAX_ALIGNMENT).ok_or_else(|| {
        let reason = format!("must be a power of two up to {MAX_ALIGNMENT}, is {value:?}");
        ModelError::bad_config(path, KEY, reason)
    })
}
