//! Length of functions and of files. Tests are held to the first but not to the second.

use std::ops::Range;

use super::files::SourceFile;
use super::mask::{Masked, line_of};
use super::violation::Violation;

/// From the line of `fn` to its closing brace. Style aims at 40.
const MAX_FUNCTION_LINES: usize = 70;
/// Without unit tests. Style aims at 100 to 400.
const MAX_FILE_LINES: usize = 600;
/// Functions that are one long table or one unrolled kernel: `(path, function, why)`.
const LONG_FUNCTIONS: [(&str, &str, &str); 0] = [];

/// Functions and files that are too long.
pub(crate) fn check(file: &SourceFile) -> Vec<Violation> {
    let Some(masked) = &file.masked else { return Vec::new() };
    let mut violations = long_functions(file, masked);
    violations.extend(long_file(file, masked));
    violations
}

fn long_functions(file: &SourceFile, masked: &Masked) -> Vec<Violation> {
    let mut violations = Vec::new();
    for function in functions(masked) {
        let num_lines = function.lines.len();
        if num_lines > MAX_FUNCTION_LINES && !is_exempt(file, function.name) {
            let name = function.name;
            let message = format!("`{name}` has {num_lines} lines, at most {MAX_FUNCTION_LINES}");
            let line = function.lines.start;
            violations.push(Violation::new(&file.path, line, "function-length", message));
        }
    }
    violations
}

fn is_exempt(file: &SourceFile, function: &str) -> bool {
    LONG_FUNCTIONS.iter().any(|(path, name, _)| file.path.ends_with(path) && *name == function)
}

fn long_file(file: &SourceFile, masked: &Masked) -> Option<Violation> {
    let is_test = file.has_folder("tests") || file.path.ends_with("tests.rs");
    let num_test_lines: usize = test_modules(masked).map(|lines| lines.len()).sum();
    let num_lines = file.text.lines().count() - num_test_lines;
    if is_test || num_lines <= MAX_FILE_LINES {
        return None;
    }
    let message = format!("{num_lines} lines without tests, at most {MAX_FILE_LINES}");
    Some(Violation::new(&file.path, 1, "file-length", message))
}

struct Function<'a> {
    name: &'a str,
    lines: Range<usize>,
}

/// Every function with a body, also those inside others.
fn functions(masked: &Masked) -> impl Iterator<Item = Function<'_>> {
    masked.words("fn").filter_map(|start| {
        let after = masked.code[start + 2..].trim_start();
        let name_len = after.find(|c: char| !c.is_alphanumeric() && c != '_' && c != '#')?;
        let open = body(masked, start)?;
        let name = &after[..name_len];
        (!name.is_empty()).then(|| Function { name, lines: lines(masked, start, open) })
    })
}

/// The brace that opens the body; `None` for a declaration, which ends in a semicolon.
fn body(masked: &Masked, start: usize) -> Option<usize> {
    let mut depth = 0;
    for (offset, byte) in masked.code.bytes().enumerate().skip(start) {
        match byte {
            b'(' | b'[' => depth += 1,
            b')' | b']' => depth -= 1,
            b'{' if depth == 0 => return Some(offset),
            b';' if depth == 0 => return None,
            _ => {}
        }
        if depth < 0 {
            return None; // a pointer type such as `(fn() -> u8)`
        }
    }
    None
}

/// The bodies of `#[cfg(test)] mod …`, with their attribute.
fn test_modules(masked: &Masked) -> impl Iterator<Item = Range<usize>> {
    let attributes = ["#[cfg(test)]", "#[cfg(all(test"];
    let starts = attributes.into_iter().flat_map(|a| masked.code.match_indices(a));
    starts.filter_map(|(start, attribute)| {
        let item = masked.code[start + attribute.len()..].find("mod ")?;
        let between = &masked.code[start..start + attribute.len() + item];
        let open = body(masked, start + attribute.len() + item)?;
        (!between.contains(['{', '}', ';'])).then(|| lines(masked, start, open))
    })
}

fn lines(masked: &Masked, start: usize, open: usize) -> Range<usize> {
    let last = masked.closing_brace(open).min(masked.code.len().saturating_sub(1));
    line_of(&masked.code, start)..line_of(&masked.code, last) + 1
}

#[cfg(test)]
mod tests {
    use super::super::violation::{Breaches, lines_and_rules};
    use super::*;

    fn function_of(num_lines: usize) -> String {
        format!("fn f() {{\n{}}}\n", "    g(\"{\");\n".repeat(num_lines - 2))
    }

    #[test]
    fn finds_functions() {
        let table: [(&str, &[(&str, usize)]); 8] = [
            ("fn a() {}", &[("a", 1)]),
            ("pub fn a<T>(x: [u8; 3])\nwhere\n    T: B,\n{\n}", &[("a", 5)]),
            ("trait A {\n    fn a(&self);\n    fn b() {\n    }\n}", &[("b", 2)]),
            ("fn a() {\n    fn b() {\n    }\n}", &[("a", 4), ("b", 2)]),
            ("// fn a() {\nfn b() {} /* { */", &[("b", 1)]),
            ("struct A(fn() -> u8);\nfn r#a() {\n}", &[("r#a", 2)]),
            ("type F = fn(u8) -> u8;", &[]),
            ("fn a() -> [u8; { 2 }] {\n    '{';\n}", &[("a", 3)]),
        ];
        for (source, expected) in table {
            let masked = Masked::new(source);
            let found: Vec<_> = functions(&masked).map(|f| (f.name, f.lines.len())).collect();
            assert_eq!(found, expected, "{source}");
        }
    }

    #[test]
    fn length_of_functions() {
        for (num_lines, expected) in [(70, &[][..]), (71, &[(1, "function-length")][..])] {
            let file = SourceFile::of("a.rs", &function_of(num_lines));
            assert_eq!(lines_and_rules(&check(&file)), expected, "{num_lines}");
        }
    }

    #[test]
    fn length_of_files() {
        let code = "fn f() {}\n".repeat(600);
        let tests = "#[cfg(test)]\nmod tests {\n    fn f() {}\n}\n";
        let table: [(&str, String, Breaches<'_>); 5] = [
            ("a.rs", code.clone(), &[]),
            ("a.rs", format!("{code}\n"), &[(1, "file-length")]),
            ("a.rs", format!("{code}{tests}"), &[]),
            ("a.rs", format!("{code}#[cfg(test)]\nuse a;\nmod b {{\n}}\n"), &[(1, "file-length")]),
            ("tests/a.rs", format!("{code}\n"), &[]),
        ];
        for (path, text, expected) in table {
            assert_eq!(lines_and_rules(&check(&SourceFile::of(path, &text))), expected, "{path}");
        }
    }
}
