//! The files of the tree: found, read, and weighed.

use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result};

use super::mask::Masked;
use super::violation::Violation;

/// More than this does not belong into a repository.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Files of weights, which are committed only as small fixtures.
const WEIGHT_EXTENSIONS: [&str; 7] = ["gguf", "safetensors", "pt", "pth", "onnx", "npz", "ckpt"];
/// Folders that hold nothing of ours; those with a leading dot are passed over too, but for two.
const FOREIGN_FOLDERS: [&str; 3] = ["target", "node_modules", "__pycache__"];
const OWN_HIDDEN_FOLDERS: [&str; 2] = [".ci", ".cargo"];

/// A file and, if it is text, what it says.
pub(crate) struct SourceFile {
    /// Relative to the project's root.
    pub(crate) path: PathBuf,
    pub(crate) num_bytes: u64,
    /// Empty for files that are not UTF-8 or too large to be anything but data.
    pub(crate) text: String,
    /// `Some` for Rust alone.
    pub(crate) masked: Option<Masked>,
}

impl SourceFile {
    pub(crate) fn new(path: PathBuf, num_bytes: u64, text: String) -> Self {
        let is_rust = path.extension().is_some_and(|extension| extension == "rs");
        let masked = is_rust.then(|| Masked::new(&text));
        Self { path, num_bytes, text, masked }
    }

    pub(crate) fn is_rust(&self) -> bool {
        self.masked.is_some()
    }

    pub(crate) fn extension(&self) -> &str {
        self.path.extension().and_then(|extension| extension.to_str()).unwrap_or_default()
    }

    /// The file's first folder, or an empty string for a file of the root.
    pub(crate) fn top_folder(&self) -> &str {
        let mut components = self.path.components();
        match (components.next(), components.next()) {
            (Some(Component::Normal(first)), Some(_)) => first.to_str().unwrap_or_default(),
            _ => "",
        }
    }

    pub(crate) fn has_folder(&self, name: &str) -> bool {
        self.path.parent().is_some_and(|folder| folder.iter().any(|part| part == name))
    }

    #[cfg(test)]
    pub(crate) fn of(path: &str, text: &str) -> Self {
        Self::new(PathBuf::from(path), text.len() as u64, text.to_owned())
    }
}

/// All files under `root` in the order of their paths, foreign folders left out.
pub(crate) fn walk(root: &Path) -> Result<Vec<SourceFile>> {
    let mut files = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).with_context(|| format!("{}", folder.display()))?;
        for entry in entries {
            let entry = entry.with_context(|| format!("{}", folder.display()))?;
            let kind = entry.file_type().with_context(|| format!("{}", entry.path().display()))?;
            let name = entry.file_name();
            if kind.is_dir() && !is_foreign(&name.to_string_lossy()) {
                folders.push(entry.path());
            } else if kind.is_file() {
                files.push(read(root, &entry.path())?);
            }
        }
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

fn is_foreign(folder: &str) -> bool {
    let is_hidden = folder.starts_with('.') && !OWN_HIDDEN_FOLDERS.contains(&folder);
    // `target-*` is ignored by git as well: people keep a second build folder there.
    is_hidden || FOREIGN_FOLDERS.contains(&folder) || folder.starts_with("target-")
}

fn read(root: &Path, path: &Path) -> Result<SourceFile> {
    let context = || format!("{}", path.display());
    let num_bytes = fs::metadata(path).with_context(context)?.len();
    let bytes = if num_bytes > MAX_FILE_BYTES {
        Vec::new()
    } else {
        fs::read(path).with_context(context)?
    };
    let relative = path.strip_prefix(root).expect("the walk started at the root").to_owned();
    Ok(SourceFile::new(relative, num_bytes, String::from_utf8(bytes).unwrap_or_default()))
}

/// No large file, and no weights but small fixtures.
pub(crate) fn size(file: &SourceFile) -> Vec<Violation> {
    let mut violations = Vec::new();
    if file.num_bytes > MAX_FILE_BYTES {
        let message = format!("{} bytes, at most {MAX_FILE_BYTES}", file.num_bytes);
        violations.push(Violation::new(&file.path, 1, "large-file", message));
    }
    if WEIGHT_EXTENSIONS.contains(&file.extension()) && !file.has_folder("fixtures") {
        let message = "weights are fetched, or small and in a `fixtures` folder".to_owned();
        violations.push(Violation::new(&file.path, 1, "weights", message));
    }
    violations
}

#[cfg(test)]
mod tests {
    use super::super::violation::{Breaches, lines_and_rules};
    use super::*;

    #[test]
    fn sizes() {
        let table: [(&str, u64, Breaches<'_>); 5] = [
            ("docs/a.png", MAX_FILE_BYTES, &[]),
            ("docs/a.png", MAX_FILE_BYTES + 1, &[(1, "large-file")]),
            ("crates/model/tests/fixtures/a/model.gguf", 1000, &[]),
            ("models/model.gguf", 1000, &[(1, "weights")]),
            ("model.safetensors", 2 << 20, &[(1, "large-file"), (1, "weights")]),
        ];
        for (path, num_bytes, expected) in table {
            let file = SourceFile::new(PathBuf::from(path), num_bytes, String::new());
            assert_eq!(lines_and_rules(&size(&file)), expected, "{path}");
        }
    }

    #[test]
    fn folders() {
        for (folder, expected) in [
            ("src", false),
            (".ci", false),
            (".git", true),
            ("target", true),
            ("target-b", true),
            ("targets", false),
        ] {
            assert_eq!(is_foreign(folder), expected, "{folder}");
        }
        assert_eq!(SourceFile::of("README.md", "").top_folder(), "");
        assert_eq!(SourceFile::of("crates/a/b.rs", "").top_folder(), "crates");
    }
}
