//! The arrows between rooms, and the walls that keep `unsafe` in.
//!
//! ```text
//! cli → server → grammar → engine → scheduler → kv-cache          (pure)
//!  │     │          │          └───→ model → backend → kernels      (device)
//!  │     ├──────────┴→ tokenizer      sim implements Backend and drives engine
//!  │     └→ observe → engine
//!  ├→ bench → observe, engine, model, backend
//!  └→ sim
//! ```

use std::collections::BTreeSet;

use super::files::SourceFile;
use super::mask::line_of;
use super::violation::Violation;
use super::workspace::{Dependency, Package, Workspace};

const PREFIX: &str = "inflight-";
/// Each room and those it may depend on. A room that is not here has no arrow yet: draw it first.
const ARROWS: [(&str, &[&str]); 14] = [
    (
        "cli",
        &[
            "server",
            "bench",
            "grammar",
            "observe",
            "sim",
            "engine",
            "scheduler",
            "model",
            "backend",
            "tokenizer",
        ],
    ),
    ("server", &["observe", "grammar", "engine", "tokenizer"]),
    ("observe", &["engine"]),
    ("grammar", &["engine", "tokenizer"]),
    ("engine", &["scheduler", "kv-cache", "model", "backend"]),
    ("scheduler", &["kv-cache"]),
    ("kv-cache", &[]),
    ("model", &["backend"]),
    ("backend", &["kernels"]),
    ("kernels", &[]),
    ("tokenizer", &[]),
    ("sim", &["backend", "engine", "scheduler", "kv-cache", "model"]),
    ("bench", &["observe", "engine", "model", "backend"]),
    ("xtask", &[]),
];
/// Tests may also drive a room by simulation.
const TEST_ROOM: &str = "sim";
const UNSAFE_ROOMS: [&str; 2] = ["crates/backend", "crates/kernels"];

/// Dependencies between rooms that no arrow allows.
///
/// A test may use whatever its room stands on, near or far, and the simulation.
pub(crate) fn arrows(files: &[SourceFile], workspace: &Workspace) -> Vec<Violation> {
    workspace.packages.iter().flat_map(|package| package_arrows(files, package)).collect()
}

fn package_arrows(files: &[SourceFile], package: &Package) -> Vec<Violation> {
    let from = room(&package.name);
    let breach = |line, message| Violation::new(&package.manifest, line, "arrow", message);
    let Some(allowed) = arrows_of(from) else {
        return vec![breach(1, format!("room `{from}` has no arrows in xtask/src/tidy/rooms.rs"))];
    };
    let manifest = files.iter().find(|file| file.path == package.manifest);
    let mut violations = Vec::new();
    for dependency in package.dependencies.iter().filter(|d| is_room(d)) {
        let to = room(&dependency.name);
        if !is_allowed(from, to, dependency.is_dev) {
            let line = manifest.map_or(1, |file| line_naming(&file.text, &dependency.name));
            let hint = if allowed.is_empty() { "none".to_owned() } else { allowed.join(", ") };
            violations.push(breach(line, format!("`{from}` → `{to}`; allowed: {hint}")));
        }
    }
    violations
}

fn room(package: &str) -> &str {
    package.strip_prefix(PREFIX).unwrap_or(package)
}

fn is_room(dependency: &Dependency) -> bool {
    dependency.name.starts_with(PREFIX) || arrows_of(&dependency.name).is_some()
}

fn arrows_of(room: &str) -> Option<&'static [&'static str]> {
    ARROWS.iter().find(|(from, _)| *from == room).map(|(_, to)| *to)
}

fn is_allowed(from: &str, to: &str, is_dev: bool) -> bool {
    if is_dev {
        return to == TEST_ROOM || below(from).contains(to);
    }
    arrows_of(from).is_some_and(|allowed| allowed.contains(&to))
}

/// Every room that `from` stands on, directly or through others.
fn below(from: &str) -> BTreeSet<&'static str> {
    let mut found = BTreeSet::new();
    let mut pending: Vec<&str> = arrows_of(from).unwrap_or_default().to_vec();
    while let Some(room) = pending.pop() {
        let Some((room, next)) = ARROWS.iter().find(|(name, _)| *name == room) else { continue };
        if found.insert(*room) {
            pending.extend(*next);
        }
    }
    found
}

fn line_naming(manifest: &str, package: &str) -> usize {
    manifest.lines().position(|line| line.contains(package)).map_or(1, |i| i + 1)
}

/// `unsafe` outside the rooms that touch memory and devices.
pub(crate) fn unsafe_code(file: &SourceFile) -> Vec<Violation> {
    let Some(masked) = &file.masked else { return Vec::new() };
    if UNSAFE_ROOMS.iter().any(|room| file.path.starts_with(room)) {
        return Vec::new();
    }
    let message = format!("`unsafe` lives in {} alone", UNSAFE_ROOMS.join(" and "));
    let lines = masked.words("unsafe").map(|offset| line_of(&masked.code, offset));
    lines.map(|line| Violation::new(&file.path, line, "unsafe", message.clone())).collect()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::super::violation::{Breaches, lines_and_rules};
    use super::*;

    #[test]
    fn allowed_arrows() {
        let table = [
            ("engine", "scheduler", false, true),
            ("engine", "server", false, false),
            ("scheduler", "model", false, false),
            ("model", "engine", false, false),
            ("kv-cache", "backend", false, false),
            ("server", "backend", false, false),
            ("server", "backend", true, true),
            ("engine", "sim", false, false),
            ("engine", "sim", true, true),
            ("scheduler", "engine", true, false),
            ("sim", "model", false, true),
            ("unheard-of", "model", false, false),
        ];
        for (from, to, is_dev, expected) in table {
            assert_eq!(is_allowed(from, to, is_dev), expected, "{from} → {to}, dev {is_dev}");
        }
    }

    /// No room stands on itself: the picture is a picture of arrows, not of circles.
    #[test]
    fn arrows_have_no_circle() {
        for (from, to) in ARROWS {
            assert!(!below(from).contains(from), "{from}");
            assert!(to.iter().all(|room| arrows_of(room).is_some()), "{from}");
        }
    }

    fn package(name: &str, dependencies: &[&str]) -> Package {
        let named = |name: &&str| Dependency { name: (*name).to_owned(), is_dev: false };
        Package {
            name: name.to_owned(),
            manifest: PathBuf::from("Cargo.toml"),
            roots: Vec::new(),
            dependencies: dependencies.iter().map(named).collect(),
        }
    }

    #[test]
    fn breaches_name_both_ends() {
        let manifest = "[dependencies]\nserde = \"1\"\ninflight-engine.workspace = true\n";
        let files = [SourceFile::of("Cargo.toml", manifest)];
        let packages =
            vec![package("inflight-scheduler", &["inflight-kv-cache", "serde", "inflight-engine"])];
        let found = arrows(&files, &Workspace { packages });
        assert_eq!(
            found.iter().map(ToString::to_string).collect::<Vec<_>>(),
            ["Cargo.toml:3: arrow: `scheduler` → `engine`; allowed: kv-cache"]
        );
        let unknown = Workspace { packages: vec![package("inflight-attic", &[])] };
        assert_eq!(lines_and_rules(&arrows(&files, &unknown)), [(1, "arrow")]);
    }

    #[test]
    fn walls_around_unsafe() {
        let table: [(&str, &str, Breaches<'_>); 4] = [
            ("crates/engine/src/a.rs", "\nunsafe { f() }", &[(2, "unsafe")]),
            ("crates/backend/src/a.rs", "unsafe { f() }", &[]),
            ("crates/backend-two/src/a.rs", "unsafe fn f() {}", &[(1, "unsafe")]),
            ("crates/engine/src/a.rs", "#![deny(unsafe_code)] // unsafe \n\"unsafe\"", &[]),
        ];
        for (path, text, expected) in table {
            assert_eq!(lines_and_rules(&unsafe_code(&SourceFile::of(path, text))), expected);
        }
    }
}
