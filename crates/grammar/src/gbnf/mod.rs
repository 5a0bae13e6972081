//! llama.cpp's grammars, translated to `llguidance`'s Lark.
//!
//! Reading order: [`ast`] is what a grammar says, [`parse`] reads it, [`emit`] writes Lark.
//!
//! `llguidance` splits its input into lexemes, GBNF does not. Whatever holds no recursion becomes
//! one lexeme, so that its parts are matched as GBNF means them. Between lexemes the longest match
//! wins: an output is always one that the GBNF grammar accepts, but where lexemes of a recursive
//! rule could be split in several ways, some that it accepts cannot come.
//!
//! # Source
//! llama.cpp's `grammars/README.md`.

mod ast;
mod emit;
mod parse;

use crate::GrammarError;

/// Whether a grammar is in GBNF rather than in Lark: its first rule says `name ::= ...`.
pub fn looks_like(text: &str) -> bool {
    let mut lines = text.lines().map(str::trim);
    let first = lines.find(|line| !line.is_empty() && !line.starts_with('#'));
    let Some(first) = first else { return false };
    let name_len = first.find(|c| !parse::is_name_char(c)).unwrap_or(first.len());
    name_len > 0 && first[name_len..].trim_start().starts_with("::=")
}

/// Translates a grammar.
///
/// # Errors
/// What is wrong with it, and in which line.
pub fn to_lark(text: &str) -> Result<String, GrammarError> {
    emit::emit(&parse::parse(text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_kinds_of_grammar_are_told_apart() {
        assert!(looks_like("# json\n\nroot ::= object"));
        assert!(looks_like("my-rule2   ::=\n \"a\""));
        assert!(!looks_like("start: \"::=\""));
        assert!(!looks_like("%import common.INT\nstart: INT"));
        assert!(!looks_like("start ?: a ::= b"));
        assert!(!looks_like(""));
    }
}
