//! Rules of single lines: length, white space, leftovers, registries named by automation.

use super::files::SourceFile;
use super::mask::{Masked, line_of, words};
use super::violation::Violation;

const MAX_LINE_CHARS: usize = 100;
/// What people write in an editor; data (JSON, CSV, lock files) is left alone.
const TEXT_EXTENSIONS: [&str; 17] = [
    "rs", "py", "sh", "c", "h", "cpp", "hpp", "cu", "cuh", "js", "css", "html", "md", "toml",
    "yml", "yaml", "jinja",
];
/// Prose and tables of versions do not wrap well; code does.
const UNWRAPPED_EXTENSIONS: [&str; 5] = ["md", "toml", "html", "yml", "yaml"];
const LEFTOVER_WORDS: [&str; 3] = ["TODO", "FIXME", "XXX"];
const LEFTOVER_MACROS: [&str; 3] = ["dbg", "todo", "unimplemented"];
const MERGE_MARKERS: [&str; 3] = ["<<<<<<< ", ">>>>>>> ", "||||||| "];
/// Style rule 9: a struct named for its role instead.
const SILENCED_LINT: &str = "too_many_arguments";
/// Where packages come from is the machine's business: automation uses the ordinary clients.
const REGISTRY_HOSTS: [&str; 10] = [
    "crates.io",
    "rust-lang.org",
    "rustup.rs",
    "pypi.org",
    "pythonhosted.org",
    "npmjs.",
    "deb.debian.org",
    "huggingface.co",
    "docker.io",
    "ghcr.io",
];

/// All rules of lines that concern this kind of file.
pub(crate) fn check(file: &SourceFile) -> Vec<Violation> {
    if !is_text(file) {
        return Vec::new();
    }
    let mut violations = Vec::new();
    for (index, line) in file.text.lines().enumerate() {
        for (rule, message) in line_breaches(file, line) {
            violations.push(Violation::new(&file.path, index + 1, rule, message));
        }
    }
    match &file.masked {
        Some(masked) => violations.extend(rust_leftovers(file, masked)),
        None => violations.extend(leftover_words(file, &file.text)),
    }
    violations
}

/// Automation without an extension (`Makefile`, `.ci/run`) is text as well.
fn is_text(file: &SourceFile) -> bool {
    TEXT_EXTENSIONS.contains(&file.extension()) || is_automation(file)
}

fn is_automation(file: &SourceFile) -> bool {
    let is_makefile = file.path.file_name().is_some_and(|name| name == "Makefile");
    is_makefile || [".ci", ".cargo", "scripts"].contains(&file.top_folder())
}

/// Scripts beside test data hold texts that must stay as they are.
fn is_test_data(file: &SourceFile) -> bool {
    file.path.parent().is_some_and(|folder| folder.ends_with("tests/data"))
}

fn line_breaches(file: &SourceFile, line: &str) -> Vec<(&'static str, String)> {
    let mut breaches = Vec::new();
    let num_chars = line.chars().count();
    let wraps = !UNWRAPPED_EXTENSIONS.contains(&file.extension()) && !is_test_data(file);
    // An address cannot be broken over two lines.
    if wraps && num_chars > MAX_LINE_CHARS && !line.contains("://") {
        breaches.push(("line-length", format!("{num_chars} columns, at most {MAX_LINE_CHARS}")));
    }
    if line.ends_with([' ', '\t', '\r']) {
        breaches.push(("trailing-space", "white space at the end of the line".to_owned()));
    }
    if file.is_rust() && line.contains('\t') {
        breaches.push(("tab", "a tab in Rust: spaces, or `\\t` in a string".to_owned()));
    }
    if MERGE_MARKERS.iter().any(|marker| line.starts_with(marker)) {
        breaches.push(("merge-marker", "an unfinished merge".to_owned()));
    }
    if is_automation(file) {
        for host in REGISTRY_HOSTS.iter().filter(|&&host| line.contains(host)) {
            breaches.push(("registry", format!("`{host}`: leave the registry to its client")));
        }
    }
    breaches
}

/// Words in comments, macros and silenced lints in code.
fn rust_leftovers(file: &SourceFile, masked: &Masked) -> Vec<Violation> {
    let mut violations = leftover_words(file, &masked.comments);
    for name in LEFTOVER_MACROS {
        for offset in masked.words(name) {
            if masked.code[offset + name.len()..].starts_with('!') {
                let line = line_of(&masked.code, offset);
                let message = format!("`{name}!` does not belong into a commit");
                violations.push(Violation::new(&file.path, line, "leftover", message));
            }
        }
    }
    for offset in masked.words(SILENCED_LINT) {
        let message = format!("`{SILENCED_LINT}`: pass a struct named for its role");
        let line = line_of(&masked.code, offset);
        violations.push(Violation::new(&file.path, line, "silenced-lint", message));
    }
    violations
}

fn leftover_words(file: &SourceFile, text: &str) -> Vec<Violation> {
    let mut violations = Vec::new();
    for word in LEFTOVER_WORDS {
        for offset in words(text, word) {
            let message = format!("`{word}`: do it, or file an issue");
            violations.push(Violation::new(&file.path, line_of(text, offset), "leftover", message));
        }
    }
    violations
}

#[cfg(test)]
mod tests {
    use super::super::violation::{Breaches, lines_and_rules};
    use super::*;

    fn check_all(table: &[(&str, &str, Breaches<'_>)]) {
        for (path, text, expected) in table {
            let mut violations = check(&SourceFile::of(path, text));
            violations.sort();
            assert_eq!(lines_and_rules(&violations), *expected, "{path}: {text}");
        }
    }

    #[test]
    fn lengths_and_white_space() {
        let (fits, over) = ("é".repeat(100), "é".repeat(101));
        let address = format!("https://{}", "a".repeat(100));
        check_all(&[
            ("a.rs", &fits, &[]),
            ("a.rs", &format!("\n{over}"), &[(2, "line-length")]),
            ("a.py", &over, &[(1, "line-length")]),
            ("a.cu", &over, &[(1, "line-length")]),
            ("Makefile", &over, &[(1, "line-length")]),
            (".ci/run", &over, &[(1, "line-length")]),
            ("a.md", &over, &[]),
            ("crates/a/tests/data/make.py", &over, &[]),
            ("a.json", &over, &[]),
            ("a.rs", &address, &[]),
            ("a.md", "a \nb\t\nc\r\n", &[(1, "trailing-space"), (2, "trailing-space")]),
            ("a.rs", "\tf();", &[(1, "tab")]),
            ("Makefile", "\tf", &[]),
        ]);
    }

    #[test]
    fn leftovers() {
        check_all(&[
            ("a.rs", "// TODO: more", &[(1, "leftover")]),
            ("a.rs", "\n/* FIXME */ // XXX", &[(2, "leftover"), (2, "leftover")]),
            ("a.rs", "let a = \"TODO dbg!(x)\"; // TODOS", &[]),
            ("a.rs", "dbg!(x); todo!()", &[(1, "leftover"), (1, "leftover")]),
            ("a.rs", "unimplemented!(\"a\")", &[(1, "leftover")]),
            ("a.rs", "fn todo(dbg: u8) {} // dbg! is fine to speak of", &[]),
            ("a.rs", "#[allow(clippy::too_many_arguments)]", &[(1, "silenced-lint")]),
            ("a.py", "# TODO", &[(1, "leftover")]),
            ("a.md", "TODO", &[(1, "leftover")]),
            ("a.json", "TODO", &[]),
            (
                "a.md",
                "a\n<<<<<<< HEAD\n=======\n>>>>>>> b",
                &[(2, "merge-marker"), (4, "merge-marker")],
            ),
            ("a.rs", "a <<<<<<< b", &[]),
        ]);
    }

    #[test]
    fn registries() {
        check_all(&[
            (".ci/run", "curl https://static.crates.io/x", &[(1, "registry")]),
            ("Makefile", "pip -i https://pypi.org/simple", &[(1, "registry")]),
            ("scripts/a.py", "# pythonhosted.org", &[(1, "registry")]),
            ("README.md", "from crates.io", &[]),
            ("crates/cli/src/hub.rs", "\"huggingface.co\"", &[]),
        ]);
    }
}
