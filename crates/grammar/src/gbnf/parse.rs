//! Reads GBNF.

use std::{iter::Peekable, str::Chars};

use super::ast::{Gbnf, Node, Rule};
use crate::GrammarError;

/// Most parentheses inside each other.
const MAX_DEPTH: usize = 64;
/// Most repetitions that can be asked for.
const MAX_REPEAT: u32 = 2000;
/// Most repetitions of a repetition.
const MAX_REPEATS: usize = 4;

pub(super) fn is_name_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-' || c == '_'
}

/// Reads a whole grammar.
pub(super) fn parse(text: &str) -> Result<Gbnf, GrammarError> {
    let mut reader = Reader { rest: text.chars().peekable(), line: 1 };
    let mut grammar = Gbnf::default();
    reader.skip_space(true);
    while reader.peek().is_some() {
        let name = reader.name()?;
        reader.skip_space(false);
        for expected in "::=".chars() {
            reader.expect(expected)?;
        }
        reader.skip_space(true);
        let body = reader.alternatives(MAX_DEPTH, false)?;
        if grammar.rules.iter().any(|rule| rule.name == name) {
            return reader.fail(format!("rule {name} is there twice"));
        }
        grammar.rules.push(Rule { name, body });
        if !matches!(reader.peek(), None | Some('\n' | '\r')) {
            return reader.unexpected();
        }
        reader.skip_space(true);
    }
    Ok(grammar)
}

struct Reader<'a> {
    rest: Peekable<Chars<'a>>,
    line: usize,
}

impl Reader<'_> {
    fn peek(&mut self) -> Option<char> {
        self.rest.peek().copied()
    }

    fn next(&mut self) -> Option<char> {
        let next = self.rest.next();
        self.line += usize::from(next == Some('\n'));
        next
    }

    fn take(&mut self, wanted: char) -> bool {
        let found = self.peek() == Some(wanted);
        if found {
            self.next();
        }
        found
    }

    fn expect(&mut self, wanted: char) -> Result<(), GrammarError> {
        if self.take(wanted) {
            return Ok(());
        }
        let found = self.peek().map_or("the end".to_owned(), |c| format!("{c:?}"));
        self.fail(format!("{wanted:?} was expected, not {found}"))
    }

    fn unexpected<T>(&mut self) -> Result<T, GrammarError> {
        let found = self.peek().map_or("the end".to_owned(), |c| format!("{c:?}"));
        self.fail(format!("unexpected {found}"))
    }

    fn fail<T>(&self, reason: impl std::fmt::Display) -> Result<T, GrammarError> {
        Err(GrammarError::Refused(format!("line {}: {reason}", self.line)))
    }

    /// Skips space and comments, and line ends if they mean nothing here.
    fn skip_space(&mut self, newlines: bool) {
        while let Some(c) = self.peek() {
            match c {
                ' ' | '\t' => {}
                '\n' | '\r' if newlines => {}
                '#' => {
                    while self.peek().is_some_and(|c| c != '\n') {
                        self.next();
                    }
                    continue;
                }
                _ => return,
            }
            self.next();
        }
    }

    fn name(&mut self) -> Result<String, GrammarError> {
        let mut name = String::new();
        while let Some(c) = self.peek().filter(|c| is_name_char(*c)) {
            name.push(c);
            self.next();
        }
        if name.is_empty() { self.unexpected() } else { Ok(name) }
    }

    /// In parentheses line ends mean nothing.
    fn alternatives(&mut self, depth: usize, nested: bool) -> Result<Node, GrammarError> {
        let mut all = vec![self.sequence(depth, nested)?];
        loop {
            if !nested && !self.bar_follows() {
                break;
            }
            self.skip_space(true);
            if !self.take('|') {
                break;
            }
            self.skip_space(true);
            all.push(self.sequence(depth, nested)?);
        }
        Ok(if all.len() == 1 { all.remove(0) } else { Node::Alternatives(all) })
    }

    /// Whether the next thing, on this line or a later one, is a bar.
    fn bar_follows(&self) -> bool {
        let mut ahead = Reader { rest: self.rest.clone(), line: self.line };
        ahead.skip_space(true);
        ahead.peek() == Some('|')
    }

    fn sequence(&mut self, depth: usize, nested: bool) -> Result<Node, GrammarError> {
        let mut nodes = Vec::new();
        loop {
            self.skip_space(nested);
            let node = match self.peek() {
                Some('"') => self.literal()?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.next();
                    Node::Any
                }
                Some('(') => self.group(depth)?,
                Some(c) if is_name_char(c) => Node::Rule(self.name()?),
                Some('<' | '!') => return self.fail("tokens by name are not supported"),
                _ => break,
            };
            nodes.push(self.repeated(node)?);
        }
        Ok(if nodes.len() == 1 { nodes.remove(0) } else { Node::Sequence(nodes) })
    }

    fn group(&mut self, depth: usize) -> Result<Node, GrammarError> {
        let Some(depth) = depth.checked_sub(1) else {
            return Err(GrammarError::TooDeep { max_depth: MAX_DEPTH });
        };
        self.expect('(')?;
        let node = self.alternatives(depth, true)?;
        self.skip_space(true);
        self.expect(')')?;
        Ok(node)
    }

    fn repeated(&mut self, mut node: Node) -> Result<Node, GrammarError> {
        for _ in 0..MAX_REPEATS {
            let (min, max) = match self.peek() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => {
                    node = self.counted(node)?;
                    continue;
                }
                _ => return Ok(node),
            };
            self.next();
            node = Node::Repeat { node: Box::new(node), min, max };
        }
        self.fail(format!("more than {MAX_REPEATS} repetitions of each other"))
    }

    /// `{3}`, `{3,}` or `{3,5}`.
    fn counted(&mut self, node: Node) -> Result<Node, GrammarError> {
        self.expect('{')?;
        let min = self.count()?;
        let max = match self.take(',') {
            false => Some(min),
            true if self.peek() == Some('}') => None,
            true => Some(self.count()?),
        };
        self.expect('}')?;
        if max.is_some_and(|max| max < min) {
            return self.fail("a repetition's maximum is below its minimum");
        }
        Ok(Node::Repeat { node: Box::new(node), min, max })
    }

    fn count(&mut self) -> Result<u32, GrammarError> {
        let mut digits = String::new();
        while let Some(c) = self.peek().filter(char::is_ascii_digit) {
            digits.push(c);
            self.next();
        }
        match digits.parse() {
            Ok(count) if count <= MAX_REPEAT => Ok(count),
            Ok(_) => self.fail(format!("repetitions are limited to {MAX_REPEAT}")),
            Err(_) => self.fail("a repetition needs a number"),
        }
    }

    fn literal(&mut self) -> Result<Node, GrammarError> {
        self.expect('"')?;
        let mut text = String::new();
        while !self.take('"') {
            text.push(self.character()?);
        }
        Ok(Node::Literal(text))
    }

    fn class(&mut self) -> Result<Node, GrammarError> {
        self.expect('[')?;
        let is_negated = self.take('^');
        let mut ranges = Vec::new();
        while !self.take(']') {
            let first = self.character()?;
            let mut last = first;
            if self.take('-') {
                if self.take(']') {
                    ranges.extend([(first, first), ('-', '-')]);
                    return Ok(Node::Class { is_negated, ranges });
                }
                last = self.character()?;
            }
            if last < first {
                return self.fail(format!("the range {first:?}-{last:?} is empty"));
            }
            ranges.push((first, last));
        }
        if ranges.is_empty() {
            return self.fail("[] matches nothing");
        }
        Ok(Node::Class { is_negated, ranges })
    }

    /// A character of a literal or class, which may be escaped.
    fn character(&mut self) -> Result<char, GrammarError> {
        match self.next() {
            Some('\\') => {}
            Some('\n') | None => return self.fail("a text in quotes or brackets has no end"),
            Some(c) => return Ok(c),
        }
        let digits = match self.next() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some(c @ ('\\' | '"' | '[' | ']' | '-' | '^' | '/')) => return Ok(c),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            Some(c) => return self.fail(format!("the escape \\{c} is not known")),
            None => return self.fail("a text in quotes or brackets has no end"),
        };
        let mut code = 0;
        for _ in 0..digits {
            let Some(digit) = self.next().and_then(|c| c.to_digit(16)) else {
                return self.fail(format!("an escape needs {digits} hexadecimal digits"));
            };
            code = code << 4 | digit;
        }
        match char::from_u32(code) {
            Some(c) => Ok(c),
            None => self.fail(format!("U+{code:04X} is no character")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(text: &str) -> Node {
        parse(&format!("root ::= {text}\n")).unwrap().rules.remove(0).body
    }

    fn literal(text: &str) -> Node {
        Node::Literal(text.to_owned())
    }

    fn repeat(node: Node, min: u32, max: Option<u32>) -> Node {
        Node::Repeat { node: Box::new(node), min, max }
    }

    #[test]
    fn every_form_is_read() {
        let class = |is_negated, ranges: &[(char, char)]| Node::Class {
            is_negated,
            ranges: ranges.to_vec(),
        };
        let rule = || Node::Rule("a-b_1".to_owned());
        let cases = [
            (r#""a\"\\\n\x41\u00e9\U0001F600""#, literal("a\"\\\nAé😀")),
            (
                r"[a-z0\]^-]",
                class(false, &[('a', 'z'), ('0', '0'), (']', ']'), ('^', '^'), ('-', '-')]),
            ),
            (r"[^\x00-\x1F]", class(true, &[('\0', '\u{1f}')])),
            (".", Node::Any),
            ("a-b_1", rule()),
            ("a-b_1 .", Node::Sequence(vec![rule(), Node::Any])),
            ("a-b_1* # comment", repeat(rule(), 0, None)),
            (
                ".+ | .?",
                Node::Alternatives(vec![repeat(Node::Any, 1, None), repeat(Node::Any, 0, Some(1))]),
            ),
            (".{3}", repeat(Node::Any, 3, Some(3))),
            (".{3,}", repeat(Node::Any, 3, None)),
            (".{0,5}", repeat(Node::Any, 0, Some(5))),
            ("(\n. |\n \"b\" # c\n)", Node::Alternatives(vec![Node::Any, literal("b")])),
            (".\n  | \"b\"", Node::Alternatives(vec![Node::Any, literal("b")])),
            (". |", Node::Alternatives(vec![Node::Any, Node::Sequence(vec![])])),
        ];
        for (text, expected) in cases {
            assert_eq!(body(text), expected, "{text}");
        }
    }

    #[test]
    fn mistakes_are_named_with_their_lines() {
        let check = |text: &str, expected: &str| {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        };
        check("root ::= .\nroot ::= .", "line 2: rule root is there twice");
        check("root = .", "line 1: ':' was expected, not '='");
        check("root ::= \"a", "line 1: a text in quotes");
        check("root ::= .\n\n x ::= (.", "line 3: ')' was expected, not the end");
        check("root ::= .)", "line 1: unexpected ')'");
        check("root ::= .{2,1}", "maximum");
        check("root ::= .{5000}", "limited to 2000");
        check("root ::= .{}", "needs a number");
        check("root ::= [b-a]", "is empty");
        check("root ::= []", "matches nothing");
        check(r#"root ::= "\q""#, r"\q");
        check(r#"root ::= "\uD800""#, "no character");
        check("root ::= <think>", "tokens by name");
        check(&format!("root ::= {}.{}", "(".repeat(65), ")".repeat(65)), "64 levels");
    }
}
