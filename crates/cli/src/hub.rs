//! Models of the Hugging Face hub.
//!
//! The hub's own environment holds here too: `HF_TOKEN`, `HF_HOME`, `HF_ENDPOINT`.

use std::env;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use hf_hub::api::sync::{ApiBuilder, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};

/// Small files that say what a model is; a repository need not have them all.
const DESCRIPTIONS: [&str; 8] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
];
const CONFIG: &str = "config.json";

/// A model on the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HubModel {
    /// `org/name`.
    pub(crate) name: String,
    /// A branch, tag or commit; `None`: the main branch.
    pub(crate) revision: Option<String>,
    /// A GGUF file of the repository; `None`: its safetensors, or its only GGUF file.
    pub(crate) file: Option<String>,
}

impl HubModel {
    /// Reads `org/name`, `org/name:revision` or `org/name:file.gguf`.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let (name, detail) = match text.split_once(':') {
            Some((name, detail)) => (name, Some(detail.to_owned())),
            None => (text, None),
        };
        let is_part = |part: &str| {
            !part.is_empty()
                && !part.starts_with('.')
                && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        };
        let is_name = name.split_once('/').is_some_and(|(org, name)| is_part(org) && is_part(name));
        ensure!(is_name, "{name:?} is not a hub name");
        ensure!(detail.as_deref() != Some(""), "nothing follows the colon");
        let is_file = detail.as_ref().is_some_and(|detail| detail.ends_with(".gguf"));
        let (revision, file) = if is_file { (None, detail) } else { (detail, None) };
        Ok(Self { name: name.to_owned(), revision, file })
    }

    fn repo(&self) -> Repo {
        let revision = self.revision.clone().unwrap_or_else(|| "main".to_owned());
        Repo::with_revision(self.name.clone(), RepoType::Model, revision)
    }
}

/// Downloads what is missing and gives the model's path: a folder, or a GGUF file.
pub(crate) fn fetch(model: &HubModel, show_progress: bool) -> Result<PathBuf> {
    let mut builder = ApiBuilder::from_env().with_progress(show_progress).with_retries(3);
    if let Ok(token) = env::var("HF_TOKEN") {
        builder = builder.with_token(Some(token));
    }
    let repo = builder.build().context("the hub's client did not start")?.repo(model.repo());
    let names = match repo.info() {
        Ok(info) => info.siblings.into_iter().map(|file| file.rfilename).collect::<Vec<_>>(),
        Err(error) => {
            return from_cache(model).with_context(|| {
                format!(
                    "{} cannot be read from the hub ({error}) and is not in its cache",
                    model.name
                )
            });
        }
    };
    let files = choose(&names, model.file.as_deref())
        .with_context(|| format!("{} on the hub", model.name))?;
    download(&repo, &files)
}

/// What an earlier run has left here, for when the hub cannot be reached.
fn from_cache(model: &HubModel) -> Result<PathBuf> {
    let cache = Cache::from_env().repo(model.repo());
    let path = match &model.file {
        Some(file) => cache.get(file),
        None => cache.get(CONFIG).and_then(|config| Some(config.parent()?.to_owned())),
    };
    let path = path.context("no earlier download")?;
    tracing::warn!(path = %path.display(), "the hub cannot be reached: using what is here");
    Ok(path)
}

/// Which of a repository's files to download; the last one is the model or lies in its folder.
fn choose(names: &[String], wanted: Option<&str>) -> Result<Vec<String>> {
    let ending = |ending: &str| -> Vec<String> {
        names.iter().filter(|name| name.ends_with(ending)).cloned().collect()
    };
    let ggufs = ending(".gguf");
    if let Some(wanted) = wanted {
        ensure!(names.iter().any(|name| name == wanted), "has no file {wanted}{}", list(&ggufs));
        return Ok(vec![wanted.to_owned()]);
    }
    // Some repositories keep copies in other forms in folders.
    let weights: Vec<_> =
        ending(".safetensors").into_iter().filter(|name| !name.contains('/')).collect();
    if names.iter().any(|name| name == CONFIG) && !weights.is_empty() {
        let has = |name: &&str| names.iter().any(|other| other == name);
        let described = DESCRIPTIONS.iter().copied().filter(|name| *name != CONFIG);
        let mut files: Vec<_> = described.filter(has).map(str::to_owned).collect();
        files.extend(weights);
        files.push(CONFIG.to_owned());
        return Ok(files);
    }
    match &ggufs[..] {
        [only] => Ok(vec![only.clone()]),
        [] => bail!("has neither {CONFIG} with safetensors nor a GGUF file"),
        _ => bail!("has several GGUF files; write one after a colon{}", list(&ggufs)),
    }
}

fn list(names: &[String]) -> String {
    if names.is_empty() { String::new() } else { format!(": {}", names.join(", ")) }
}

fn download(repo: &ApiRepo, files: &[String]) -> Result<PathBuf> {
    let mut path = PathBuf::new();
    for file in files {
        tracing::info!(file, "fetching from the hub, unless it is here already");
        path = repo.get(file).with_context(|| format!("{file} cannot be downloaded"))?;
    }
    if path.file_name().is_some_and(|name| name == CONFIG) {
        path.pop();
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(names: &[&str], wanted: Option<&str>) -> Result<Vec<String>, String> {
        let names: Vec<_> = names.iter().map(ToString::to_string).collect();
        choose(&names, wanted).map_err(|error| error.to_string())
    }

    #[test]
    fn files_of_a_repository() {
        let repository = [
            "README.md",
            "config.json",
            "tokenizer.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "original/model.safetensors",
        ];
        let expected = [
            "tokenizer.json",
            "model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "config.json",
        ];
        assert_eq!(choice(&repository, None).unwrap(), expected);
        assert_eq!(choice(&["a.gguf", "README.md"], None).unwrap(), ["a.gguf"]);
        assert_eq!(choice(&["a.gguf", "b.gguf"], Some("b.gguf")).unwrap(), ["b.gguf"]);
    }

    #[test]
    fn what_a_repository_lacks_is_named() {
        let error = choice(&["a.gguf", "b.gguf"], None).unwrap_err();
        assert!(
            error.contains("several GGUF files") && error.contains("a.gguf, b.gguf"),
            "{error}"
        );
        let error = choice(&["a.gguf"], Some("c.gguf")).unwrap_err();
        assert_eq!(error, "has no file c.gguf: a.gguf");
        let error = choice(&["config.json", "pytorch_model.bin"], None).unwrap_err();
        assert!(error.contains("neither config.json with safetensors nor a GGUF file"), "{error}");
    }
}
