//! Files made up for tests.

#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]
#![allow(dead_code, unreachable_pub, reason = "each test file is a crate and uses a part")]

pub mod gemma3_gguf;
pub mod plain_backend;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
};

/// A folder that goes away with its owner.
pub struct TempFolder(PathBuf);

impl TempFolder {
    pub fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("inflight-model-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Type codes of GGUF metadata.
pub mod code {
    pub const U8: u32 = 0;
    pub const I8: u32 = 1;
    pub const U16: u32 = 2;
    pub const I16: u32 = 3;
    pub const U32: u32 = 4;
    pub const I32: u32 = 5;
    pub const F32: u32 = 6;
    pub const BOOL: u32 = 7;
    pub const STRING: u32 = 8;
    pub const ARRAY: u32 = 9;
    pub const U64: u32 = 10;
    pub const I64: u32 = 11;
    pub const F64: u32 = 12;
}

/// The bytes of a GGUF string.
pub fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// The bytes of a GGUF array.
pub fn array(kind: u32, items: &[Vec<u8>]) -> Vec<u8> {
    let head = [&kind.to_le_bytes()[..], &(items.len() as u64).to_le_bytes()].concat();
    [head, items.concat()].concat()
}

/// A GGUF file in the making. Nothing is checked, so that it may be as wrong as a test wants.
#[derive(Clone)]
pub struct GgufBytes {
    pub magic: [u8; 4],
    pub version: u32,
    pub num_tensors: Option<u64>,
    pub num_metadata: Option<u64>,
    pub metadata: Vec<Vec<u8>>,
    pub tensors: Vec<Vec<u8>>,
    pub alignment: usize,
    pub data: Vec<u8>,
}

impl GgufBytes {
    pub fn new() -> Self {
        Self {
            magic: *b"GGUF",
            version: 3,
            num_tensors: None,
            num_metadata: None,
            metadata: Vec::new(),
            tensors: Vec::new(),
            alignment: 32,
            data: Vec::new(),
        }
    }

    pub fn meta(mut self, key: &str, kind: u32, value: impl AsRef<[u8]>) -> Self {
        self.metadata.push([&string(key), &kind.to_le_bytes()[..], value.as_ref()].concat());
        self
    }

    pub fn u32(self, key: &str, value: u32) -> Self {
        self.meta(key, code::U32, value.to_le_bytes())
    }

    pub fn f32(self, key: &str, value: f32) -> Self {
        self.meta(key, code::F32, value.to_le_bytes())
    }

    pub fn text(self, key: &str, value: &str) -> Self {
        self.meta(key, code::STRING, string(value))
    }

    /// A table entry; `dims` are innermost first, as in the file.
    pub fn entry(mut self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Self {
        let dims_bytes: Vec<u8> = dims.iter().flat_map(|dim| dim.to_le_bytes()).collect();
        let num_dims = dims.len() as u32;
        let parts = [
            &string(name)[..],
            &num_dims.to_le_bytes(),
            &dims_bytes,
            &kind.to_le_bytes(),
            &offset.to_le_bytes(),
        ];
        self.tensors.push(parts.concat());
        self
    }

    /// An F32 tensor of zeros with its data.
    pub fn zeros(mut self, name: &str, dims: &[u64]) -> Self {
        let offset = self.data.len().next_multiple_of(self.alignment);
        self.data.resize(offset + 4 * dims.iter().product::<u64>() as usize, 0);
        self.entry(name, dims, 0, offset as u64)
    }

    /// An F32 tensor with its values; `dims` are innermost first.
    pub fn f32s(mut self, name: &str, dims: &[u64], values: &[f32]) -> Self {
        assert_eq!(dims.iter().product::<u64>(), values.len() as u64, "{name}");
        let offset = self.data.len().next_multiple_of(self.alignment);
        self.data.resize(offset, 0);
        self.data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        self.entry(name, dims, 0, offset as u64)
    }

    pub fn build(&self) -> Vec<u8> {
        let num_tensors = self.num_tensors.unwrap_or(self.tensors.len() as u64);
        let num_metadata = self.num_metadata.unwrap_or(self.metadata.len() as u64);
        let mut bytes = self.magic.to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(num_tensors.to_le_bytes());
        bytes.extend(num_metadata.to_le_bytes());
        bytes.extend(self.metadata.concat());
        bytes.extend(self.tensors.concat());
        bytes.resize(bytes.len().next_multiple_of(self.alignment), 0);
        bytes.extend(&self.data);
        bytes
    }
}

/// The error's whole text.
pub fn message<T>(result: Result<T, inflight_model::ModelError>) -> String {
    match result {
        Ok(_) => panic!("an error was expected"),
        Err(error) => error.to_string(),
    }
}

/// Asserts that `text` holds each of `parts`.
pub fn assert_holds(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}
