//! The workspace as `cargo metadata` tells it: packages, their targets, whom they depend on.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// What the rules need to know of the workspace.
pub(crate) struct Workspace {
    pub(crate) packages: Vec<Package>,
}

/// One member of the workspace.
pub(crate) struct Package {
    pub(crate) name: String,
    /// Relative to the project's root.
    pub(crate) manifest: PathBuf,
    /// The files that cargo compiles by itself: libraries, binaries, tests, examples.
    pub(crate) roots: Vec<PathBuf>,
    pub(crate) dependencies: Vec<Dependency>,
}

/// A package that another names in its manifest.
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// From `[dev-dependencies]`: seen by tests alone.
    pub(crate) is_dev: bool,
}

impl Workspace {
    /// Asks cargo, which needs neither network nor lock file for it.
    pub(crate) fn load(root: &Path) -> Result<Self> {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let output = Command::new(cargo)
            .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
            .current_dir(root)
            .output()
            .context("cannot run `cargo metadata`")?;
        if !output.status.success() {
            bail!("`cargo metadata` failed: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        let metadata: Value = serde_json::from_slice(&output.stdout)?;
        let packages = array(&metadata, "packages")?;
        let packages = packages.iter().map(|package| Package::parse(root, package));
        Ok(Self { packages: packages.collect::<Result<_>>()? })
    }
}

impl Package {
    fn parse(root: &Path, package: &Value) -> Result<Self> {
        let relative = |path: &str| Path::new(path).strip_prefix(root).map(Path::to_owned);
        let targets = array(package, "targets")?.iter();
        let roots = targets.map(|target| Ok(relative(text(target, "src_path")?)?));
        let dependencies = array(package, "dependencies")?.iter().map(|dependency| {
            let is_dev = dependency["kind"].as_str() == Some("dev");
            Ok(Dependency { name: text(dependency, "name")?.to_owned(), is_dev })
        });
        Ok(Self {
            name: text(package, "name")?.to_owned(),
            manifest: relative(text(package, "manifest_path")?)?,
            roots: roots.collect::<Result<_>>()?,
            dependencies: dependencies.collect::<Result<_>>()?,
        })
    }
}

fn array<'a>(value: &'a Value, field: &'static str) -> Result<&'a Vec<Value>> {
    value[field].as_array().with_context(|| format!("`cargo metadata` gave no list `{field}`"))
}

fn text<'a>(value: &'a Value, field: &'static str) -> Result<&'a str> {
    value[field].as_str().with_context(|| format!("`cargo metadata` gave no text `{field}`"))
}
