//! What a path holds: a GGUF file, or a folder as Hugging Face lays it out.

use std::path::{Path, PathBuf};

use crate::{
    DummyWeights, Fp8Weights, GgufFile, ModelConfig, ModelError, SafetensorsFolder, Weights,
    config::generation_eos_token_ids, text_file,
};

/// A model on disk: its configuration and weights.
#[derive(Clone, Debug)]
pub struct ModelFiles {
    /// What the model is.
    pub config: ModelConfig,
    /// Its weights, still in their files.
    pub weights: Weights,
    /// The folder of a Hugging Face model, where `tokenizer.json` lies; `None` for GGUF files.
    pub folder: Option<PathBuf>,
}

const CONFIG: &str = "config.json";
const GENERATION_CONFIG: &str = "generation_config.json";

impl ModelFiles {
    /// Opens a `.gguf` file, a folder with `config.json` and safetensors, or a folder that holds
    /// just one `.gguf` file.
    ///
    /// # Errors
    /// [`ModelError`] naming what is missing or damaged.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let metadata = path.metadata().map_err(|source| ModelError::io(path, source))?;
        if !metadata.is_dir() {
            return Self::open_gguf(path);
        }
        if path.join(CONFIG).exists() {
            let weights = Weights::Safetensors(SafetensorsFolder::open(path)?);
            return Ok(Self { config: read_config(path)?, weights, folder: Some(path.into()) });
        }
        Self::open_gguf(&only_gguf_of(path)?)
    }

    /// Opens a folder with `config.json`, or that file, and makes up weights from `seed`.
    ///
    /// # Errors
    /// [`ModelError`] naming what is wrong with the configuration.
    pub fn dummy(path: &Path, seed: u64) -> Result<Self, ModelError> {
        let folder = match path.is_dir() {
            true => path,
            false => path.parent().unwrap_or(Path::new(".")),
        };
        let mut config = match path.is_dir() {
            true => read_config(path)?,
            false => read_json(path)?,
        };
        config.fp8_weights = config.fp8_weights.map(|_| Fp8Weights::AtLoad);
        let weights = Weights::Dummy(DummyWeights { seed });
        Ok(Self { config, weights, folder: Some(folder.into()) })
    }

    /// Has the linear layers' weights rounded to fp8 when they are loaded, unless the files hold
    /// them so; or those of `all` products, the output matrix's too, that are not stored so.
    pub fn round_to_fp8(&mut self, all: bool) {
        let fp8_weights = &mut self.config.fp8_weights;
        if all {
            *fp8_weights = Some(Fp8Weights::AllAtLoad);
        } else {
            fp8_weights.get_or_insert(Fp8Weights::AtLoad);
        }
    }

    /// The GGUF file, if it is one: its metadata describes the tokenizer.
    pub fn gguf(&self) -> Option<&GgufFile> {
        if let Weights::Gguf(file) = &self.weights { Some(file) } else { None }
    }

    fn open_gguf(path: &Path) -> Result<Self, ModelError> {
        let file = GgufFile::open(path)?;
        let config = ModelConfig::from_gguf(&file)?;
        Ok(Self { config, weights: Weights::Gguf(file), folder: None })
    }
}

fn read_json(path: &Path) -> Result<ModelConfig, ModelError> {
    ModelConfig::from_json(&path.display().to_string(), &text_file::read(path)?)
}

/// `config.json`, with the end tokens of `generation_config.json`, which knows of more.
fn read_config(folder: &Path) -> Result<ModelConfig, ModelError> {
    let mut config = read_json(&folder.join(CONFIG))?;
    let path = folder.join(GENERATION_CONFIG);
    if path.exists() {
        let name = path.display().to_string();
        for id in generation_eos_token_ids(&name, &text_file::read(&path)?)? {
            if !config.eos_token_ids.contains(&id) {
                config.eos_token_ids.push(id);
            }
        }
    }
    Ok(config)
}

fn only_gguf_of(folder: &Path) -> Result<PathBuf, ModelError> {
    let io = |source| ModelError::io(folder, source);
    let mut found = Vec::new();
    for entry in folder.read_dir().map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf")) {
            found.push(path);
        }
    }
    let error = |reason| Err(ModelError::bad_file(&folder.display().to_string(), reason));
    match found.len() {
        1 => Ok(found.remove(0)),
        0 => error(format!("holds neither {CONFIG} nor a .gguf file")),
        n => error(format!("holds {n} .gguf files; name the one to open")),
    }
}
