//! Dead files: Rust that no `mod` declaration leads to is never compiled and rots unseen.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use super::files::SourceFile;
use super::mask::Masked;
use super::violation::Violation;
use super::workspace::Workspace;

/// Rust files that cargo never reaches from a target of the workspace.
pub(crate) fn dead_files(files: &[SourceFile], workspace: &Workspace) -> Vec<Violation> {
    let roots = workspace.packages.iter().flat_map(|package| package.roots.clone()).collect();
    let reached = reachable(files, roots);
    let dead = files.iter().filter(|file| file.is_rust() && !reached.contains(&file.path));
    let message = "no `mod` declaration leads to this file".to_owned();
    dead.map(|file| Violation::new(&file.path, 1, "dead-file", message.clone())).collect()
}

fn reachable(files: &[SourceFile], roots: Vec<PathBuf>) -> BTreeSet<PathBuf> {
    let by_path: HashMap<&Path, &SourceFile> = files.iter().map(|f| (&*f.path, f)).collect();
    let is_root: BTreeSet<PathBuf> = roots.iter().cloned().collect();
    let mut reached = BTreeSet::new();
    let mut pending = roots;
    while let Some(path) = pending.pop() {
        let Some(masked) = by_path.get(&*path).and_then(|file| file.masked.as_ref()) else {
            continue; // a candidate that does not exist
        };
        if reached.insert(path.clone()) {
            let source = &by_path[&*path].text;
            let folder = module_folder(&path, is_root.contains(&path));
            for declared in declarations(masked, source) {
                pending.extend(declared.candidates(&path, &folder));
            }
        }
    }
    reached
}

/// Where the children of a module lie: beside a root or `mod.rs`, else in a folder of its name.
fn module_folder(path: &Path, is_root: bool) -> PathBuf {
    if is_root || path.ends_with("mod.rs") {
        path.parent().map(Path::to_owned).unwrap_or_default()
    } else {
        path.with_extension("")
    }
}

/// `mod name;`, the inline modules around it, and what `#[path = "…"]` above it says.
#[derive(Debug, PartialEq)]
struct Declaration {
    inside: Vec<String>,
    name: String,
    path: Option<String>,
}

impl Declaration {
    fn candidates(&self, file: &Path, folder: &Path) -> Vec<PathBuf> {
        if let Some(path) = &self.path {
            return vec![file.with_file_name(path)];
        }
        let folder = self.inside.iter().fold(folder.to_owned(), |path, part| path.join(part));
        let name = folder.join(&self.name);
        vec![name.with_extension("rs"), name.join("mod.rs")]
    }
}

fn declarations(masked: &Masked, source: &str) -> Vec<Declaration> {
    let code = &masked.code;
    let mut inline: Vec<(usize, String)> = Vec::new();
    let mut declared = Vec::new();
    for start in masked.words("mod") {
        inline.retain(|(end, _)| *end > start);
        let after = &code[start + "mod".len()..];
        let Some(end) = after.find([';', '{']) else { continue };
        let name = after[..end].trim();
        if name.is_empty() || !name.chars().all(|c| c.is_alphanumeric() || c == '_') {
            continue; // such as `mod $name` in a macro
        }
        let end_offset = start + "mod".len() + end;
        if code.as_bytes()[end_offset] == b'{' {
            inline.push((masked.closing_brace(end_offset), name.to_owned()));
        } else {
            let inside = inline.iter().map(|(_, name)| name.clone()).collect();
            let path = path_attribute(code, source, start);
            declared.push(Declaration { inside, name: name.to_owned(), path });
        }
    }
    declared
}

/// The text of `#[path = "…"]` among the attributes of the item at `start`.
fn path_attribute(code: &str, source: &str, start: usize) -> Option<String> {
    let item = code[..start].rfind([';', '{', '}']).map_or(0, |offset| offset + 1);
    let attribute = item + code[item..start].find("#[path")?;
    let open = attribute + code[attribute..start].find('"')? + 1;
    let close = open + code[open..start].find('"')?;
    Some(source[open..close].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The inline modules around a declaration, its name, its `#[path]`.
    type Declared<'a> = (&'a str, &'a str, Option<&'a str>);

    #[test]
    fn finds_declarations() {
        let table: [(&str, &[Declared<'_>]); 6] = [
            ("mod a;\npub(crate) mod b;", &[("", "a", None), ("", "b", None)]),
            ("// mod a;\nlet s = \"mod b;\"; modulo c;", &[]),
            ("#[cfg(test)]\nmod a {\n    mod b;\n}\nmod c;", &[("a", "b", None), ("", "c", None)]),
            ("mod a { mod b { mod c; } mod d; }", &[("a/b", "c", None), ("a", "d", None)]),
            ("mod a;\n#[path = \"x/y.rs\"]\nmod b;", &[("", "a", None), ("", "b", Some("x/y.rs"))]),
            ("macro_rules! m { ($n:ident) => { mod $n; } }", &[]),
        ];
        for (source, expected) in table {
            let found = declarations(&Masked::new(source), source);
            let found: Vec<_> =
                found.iter().map(|d| (d.inside.join("/"), &*d.name, d.path.as_deref())).collect();
            let expected: Vec<_> = expected.iter().map(|&(i, n, p)| (i.to_owned(), n, p)).collect();
            assert_eq!(found, expected, "{source}");
        }
    }

    #[test]
    fn follows_declarations() {
        let files = [
            SourceFile::of("a/src/lib.rs", "mod b; mod c; mod inner { mod e; } mod gone;"),
            SourceFile::of("a/src/b.rs", "mod d;"),
            SourceFile::of("a/src/b/d.rs", ""),
            SourceFile::of("a/src/c/mod.rs", "mod f; #[path = \"other.rs\"] mod g;"),
            SourceFile::of("a/src/c/f.rs", ""),
            SourceFile::of("a/src/c/other.rs", ""),
            SourceFile::of("a/src/inner/e.rs", ""),
            SourceFile::of("a/tests/t.rs", "mod common;"),
            SourceFile::of("a/tests/common.rs", ""),
            SourceFile::of("a/src/d.rs", "// no `mod d` beside lib.rs"),
            SourceFile::of("a/src/f.rs", ""),
        ];
        let roots = vec![PathBuf::from("a/src/lib.rs"), PathBuf::from("a/tests/t.rs")];
        let reached = reachable(&files, roots);
        let dead: Vec<_> = files.iter().filter(|file| !reached.contains(&file.path)).collect();
        let dead: Vec<_> = dead.iter().map(|file| file.path.to_str().unwrap()).collect();
        assert_eq!(dead, ["a/src/d.rs", "a/src/f.rs"]);
    }
}
