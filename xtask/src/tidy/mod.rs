//! Rules of the tree that neither rustc nor clippy checks. Every breach is listed, not the first.
//!
//! In reading order: [`files`] are walked once; [`mask`] tells code from comments and strings; each
//! other module holds rules that look at one file ([`lines`], [`functions`]) or at the whole tree
//! ([`modules`], [`rooms`]).

use std::path::Path;

use anyhow::Result;

mod files;
mod functions;
mod lines;
mod mask;
mod modules;
mod rooms;
mod violation;
mod workspace;

use files::{SourceFile, walk};
use violation::Violation;
use workspace::Workspace;

/// The workspace's folder, known from where this crate was built.
pub(crate) fn project_root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace's folder")
}

/// Every breach of every rule under `root`, in the order of the files.
pub(crate) fn check(root: &Path) -> Result<Vec<Violation>> {
    let files = walk(root)?;
    let workspace = Workspace::load(root)?;
    let mut violations: Vec<Violation> = files.iter().flat_map(check_file).collect();
    violations.extend(modules::dead_files(&files, &workspace));
    violations.extend(rooms::arrows(&files, &workspace));
    violations.sort();
    Ok(violations)
}

fn check_file(file: &SourceFile) -> Vec<Violation> {
    let mut violations = files::size(file);
    violations.extend(lines::check(file));
    if file.is_rust() {
        violations.extend(functions::check(file));
        violations.extend(rooms::unsafe_code(file));
    }
    violations
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_is_tidy() {
        let violations = check(project_root()).unwrap();
        let listed: Vec<String> = violations.iter().map(ToString::to_string).collect();
        assert!(listed.is_empty(), "{} to fix:\n{}", listed.len(), listed.join("\n"));
    }
}
