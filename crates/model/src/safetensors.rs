//! Safetensors folders, as Hugging Face lays them out: one file, or shards with an index.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
    path::{Component, Path},
    sync::Arc,
};

use inflight_backend::{Dtype, HostTensor, MappedFile, TensorData};
use safetensors::SafeTensors;
use serde::Deserialize;

use crate::{ModelError, text_file};

/// The safetensors files of a folder, memory-mapped, their headers checked.
#[derive(Clone, Debug)]
pub struct SafetensorsFolder {
    path: String,
    tensors: BTreeMap<String, Entry>,
}

#[derive(Clone, Debug)]
struct Entry {
    file: Arc<MappedFile>,
    dtype: safetensors::Dtype,
    shape: Vec<usize>,
    range: Range<usize>,
}

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";

/// The index of a sharded folder; its other fields do not matter.
#[derive(Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
}

impl SafetensorsFolder {
    /// Opens `model.safetensors`, or else the shards of `model.safetensors.index.json`.
    ///
    /// # Errors
    /// If there is neither, or a header cannot be true, or a shard lacks what the index promises.
    pub fn open(folder: &Path) -> Result<Self, ModelError> {
        let path = folder.display().to_string();
        let tensors = if folder.join(SINGLE_FILE).exists() {
            read_file(&folder.join(SINGLE_FILE))?.into_iter().collect()
        } else if folder.join(INDEX_FILE).exists() {
            read_shards(folder)?
        } else {
            let reason = format!("there is neither {SINGLE_FILE} nor {INDEX_FILE}");
            return Err(ModelError::bad_file(&path, reason));
        };
        Ok(Self { path, tensors })
    }

    /// The folder as given, for messages.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The file that holds the tensor `name`, or the folder if none does; for messages.
    pub fn path_of(&self, name: &str) -> &str {
        self.tensors.get(name).map_or(&self.path, |entry| entry.file.path())
    }

    /// The tensor `name`, still in its file; one in fp8 with its scales.
    ///
    /// # Errors
    /// [`ModelError::MissingTensor`], or [`ModelError::BadTensor`] if it is not F32, F16, BF16 or
    /// F8_E4M3, or its scales do not fit.
    pub fn tensor(&self, name: &str) -> Result<HostTensor, ModelError> {
        let tensor = self.stored(name)?;
        if tensor.dtype != Dtype::F8E4M3 {
            return Ok(tensor);
        }
        // Both are multiplied with, whatever the second one's name says.
        let names = ["_scale", "_scale_inv"].map(|suffix| format!("{name}{suffix}"));
        let scales = names.iter().find(|name| self.has(name)).unwrap_or(&names[0]);
        let mut scales = self.stored(scales)?;
        if scales.dtype == Dtype::F8E4M3 {
            let reason = "scales of type F8_E4M3 are not supported";
            return Err(ModelError::bad_tensor(self.path_of(&scales.name), &scales.name, reason));
        }
        if scales.shape.is_empty() {
            scales.shape.push(1);
        }
        Ok(tensor.with_scales(&scales)?)
    }

    fn stored(&self, name: &str) -> Result<HostTensor, ModelError> {
        let entry = self.tensors.get(name);
        let entry = entry.ok_or_else(|| ModelError::missing_tensor(&self.path, name))?;
        let dtype = match entry.dtype {
            safetensors::Dtype::F32 => Dtype::F32,
            safetensors::Dtype::F16 => Dtype::F16,
            safetensors::Dtype::BF16 => Dtype::BF16,
            safetensors::Dtype::F8_E4M3 => Dtype::F8E4M3,
            other => {
                let reason =
                    format!("type {other:?} is not supported; F32, F16, BF16 and F8_E4M3 are");
                return Err(ModelError::bad_tensor(entry.file.path(), name, reason));
            }
        };
        Ok(HostTensor {
            name: name.to_owned(),
            dtype,
            shape: entry.shape.clone(),
            data: TensorData::Mapped { file: Arc::clone(&entry.file), range: entry.range.clone() },
        })
    }
}

fn read_file(path: &Path) -> Result<HashMap<String, Entry>, ModelError> {
    let file = Arc::new(MappedFile::open(path)?);
    let (header_len, metadata) = SafeTensors::read_metadata(file.bytes())
        .map_err(|error| ModelError::bad_file(file.path(), error.to_string()))?;
    // Eight bytes of length, the header, then the data, which `metadata` counts from its start.
    let data_start = 8 + header_len;
    let entries = metadata.tensors().into_iter().map(|(name, info)| {
        let (start, end) = info.data_offsets;
        let range = data_start + start..data_start + end;
        let (file, shape) = (Arc::clone(&file), info.shape.clone());
        (name, Entry { file, dtype: info.dtype, shape, range })
    });
    Ok(entries.collect())
}

fn read_shards(folder: &Path) -> Result<BTreeMap<String, Entry>, ModelError> {
    let index_path = folder.join(INDEX_FILE);
    let index_name = index_path.display().to_string();
    let index: Index = serde_json::from_str(&text_file::read(&index_path)?)
        .map_err(|error| ModelError::bad_file(&index_name, error.to_string()))?;
    let mut shards: HashMap<&str, HashMap<String, Entry>> = HashMap::new();
    let mut tensors = BTreeMap::new();
    for (name, shard) in &index.weight_map {
        if !is_plain_file_name(shard) {
            let reason = format!("shard {shard} is not the name of a file in the folder");
            return Err(ModelError::bad_tensor(&index_name, name, reason));
        }
        let path = folder.join(shard);
        if !shards.contains_key(shard.as_str()) {
            shards.insert(shard, read_file(&path)?);
        }
        let entry = shards.get_mut(shard.as_str()).and_then(|entries| entries.remove(name));
        let shard_path = || path.display().to_string();
        let entry = entry.ok_or_else(|| ModelError::missing_tensor(&shard_path(), name))?;
        tensors.insert(name.clone(), entry);
    }
    Ok(tensors)
}

/// Whether joining `name` to a folder stays in that folder.
fn is_plain_file_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(_)), None))
        && !name.contains(['/', '\\'])
}
