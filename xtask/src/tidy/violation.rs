//! One breach of one rule, shown as `file:line: rule: message`.

use std::fmt;
use std::path::{Path, PathBuf};

/// Where a rule was broken, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Violation {
    path: PathBuf,
    line: usize,
    rule: &'static str,
    message: String,
}

impl Violation {
    /// `path` is relative to the project's root, `line` counts from 1.
    pub(crate) fn new(path: &Path, line: usize, rule: &'static str, message: String) -> Self {
        Self { path: path.to_owned(), line, rule, message }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}: {}", self.path.display(), self.line, self.rule, self.message)
    }
}

/// What a table of cases expects: line and rule of each breach.
#[cfg(test)]
pub(crate) type Breaches<'a> = &'a [(usize, &'a str)];

#[cfg(test)]
pub(crate) fn lines_and_rules(violations: &[Violation]) -> Vec<(usize, &'static str)> {
    violations.iter().map(|violation| (violation.line, violation.rule)).collect()
}
