//! Weights by name, wherever they come from.

use inflight_backend::HostTensor;

use crate::{DummyWeights, GgufFile, ModelError, Naming, SafetensorsFolder};

/// Where a model's weights come from.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum Weights {
    Gguf(GgufFile),
    Safetensors(SafetensorsFolder),
    Dummy(DummyWeights),
}

impl Weights {
    /// How these weights name their tensors.
    pub fn naming(&self) -> Naming {
        match self {
            Self::Gguf(_) => Naming::Gguf,
            Self::Safetensors(_) | Self::Dummy(_) => Naming::HuggingFace,
        }
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        match self {
            Self::Gguf(file) => file.has(name),
            Self::Safetensors(folder) => folder.has(name),
            Self::Dummy(_) => true,
        }
    }

    /// Names of all tensors that are stored; dummy weights make up any that is asked for.
    pub fn names(&self) -> Vec<&str> {
        match self {
            Self::Gguf(file) => file.names().collect(),
            Self::Safetensors(folder) => folder.names().collect(),
            Self::Dummy(_) => Vec::new(),
        }
    }

    /// The tensor `name`, which must have this shape.
    ///
    /// # Shapes
    /// `[rows, cols]` or `[len]`.
    ///
    /// # Errors
    /// If it is missing, of another shape, or of a type that cannot be read.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<HostTensor, ModelError> {
        let (path, tensor) = match self {
            Self::Gguf(file) => (file.path(), file.tensor(name)?),
            Self::Safetensors(folder) => (folder.path_of(name), folder.tensor(name)?),
            Self::Dummy(dummy) => return Ok(dummy.tensor(name, shape)),
        };
        if tensor.shape != shape {
            let reason =
                format!("has shape {:?}, the configuration asks for {shape:?}", tensor.shape);
            return Err(ModelError::bad_tensor(path, name, reason));
        }
        Ok(tensor)
    }
}
