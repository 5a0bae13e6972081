//! Writes Lark.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use super::ast::{Gbnf, Node};
use crate::{GrammarError, lark::literal};

const ROOT: &str = "root";

/// Writes a whole grammar.
pub(super) fn emit(grammar: &Gbnf) -> Result<String, GrammarError> {
    let rules: BTreeMap<&str, &Node> =
        grammar.rules.iter().map(|rule| (rule.name.as_str(), &rule.body)).collect();
    if !rules.contains_key(ROOT) {
        return Err(GrammarError::Refused(format!("there is no rule named {ROOT}")));
    }
    let recursive = recursive_rules(&rules)?;
    let names = grammar.rules.iter().enumerate().map(|(i, rule)| {
        let is_rule = recursive.contains(rule.name.as_str());
        (rule.name.as_str(), if is_rule { format!("rule_{i}") } else { format!("TERM_{i}") })
    });
    let mut writer = Writer { names: names.collect(), recursive, lexemes: Vec::new() };
    let mut lines = vec![format!("start: {}", writer.names[ROOT])];
    for rule in &grammar.rules {
        let body = match writer.recursive.contains(rule.name.as_str()) {
            true => writer.rule(&rule.body),
            false => writer.term(&rule.body),
        };
        lines.push(format!("{}: {body}", writer.names[rule.name.as_str()]));
    }
    lines.append(&mut writer.lexemes);
    Ok(lines.join("\n") + "\n")
}

/// Rules that lead to themselves, and rules that lead to those.
fn recursive_rules<'a>(
    rules: &BTreeMap<&'a str, &'a Node>,
) -> Result<BTreeSet<&'a str>, GrammarError> {
    let mut used_by: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut num_used: BTreeMap<&str, usize> = BTreeMap::new();
    for (&name, body) in rules {
        let mut used = BTreeSet::new();
        body.for_each_rule(&mut |rule| used.extend([rule]));
        if let Some(unknown) = used.iter().find(|rule| !rules.contains_key(*rule)) {
            return Err(GrammarError::Refused(format!("there is no rule named {unknown}")));
        }
        num_used.insert(name, used.len());
        used.iter().for_each(|rule| used_by.entry(*rule).or_default().push(name));
    }
    // Takes away what uses nothing that is left, until nothing more can go.
    let mut free: Vec<&str> = rules.keys().copied().filter(|rule| num_used[rule] == 0).collect();
    while let Some(rule) = free.pop() {
        num_used.remove(rule);
        for user in used_by.get(rule).into_iter().flatten() {
            let left = num_used.get_mut(user).expect("it uses what was there until now");
            *left -= 1;
            free.extend((*left == 0).then_some(*user));
        }
    }
    Ok(num_used.into_keys().collect())
}

struct Writer<'a> {
    names: BTreeMap<&'a str, String>,
    recursive: BTreeSet<&'a str>,
    /// Terminals that stand for stretches of recursive rules.
    lexemes: Vec<String>,
}

impl Writer<'_> {
    fn is_regular(&self, node: &Node) -> bool {
        let mut regular = true;
        node.for_each_rule(&mut |rule| regular &= !self.recursive.contains(rule));
        regular
    }

    /// A terminal's expression.
    fn term(&self, node: &Node) -> String {
        match node {
            Node::Literal(text) => literal(text),
            Node::Class { is_negated, ranges } => class(*is_negated, ranges),
            Node::Any => "/(?s:.)/".to_owned(),
            Node::Rule(name) => self.names[name.as_str()].clone(),
            Node::Sequence(nodes) if nodes.is_empty() => literal(""),
            Node::Sequence(nodes) => self.terms(nodes, " "),
            Node::Alternatives(nodes) => format!("({})", self.terms(nodes, " | ")),
            Node::Repeat { node, min, max } => {
                format!("({}){}", self.term(node), count(*min, *max))
            }
        }
    }

    fn terms(&self, nodes: &[Node], between: &str) -> String {
        let terms: Vec<_> = nodes.iter().map(|node| self.term(node)).collect();
        terms.join(between)
    }

    /// A rule's expression. What holds no recursive rule becomes one lexeme.
    fn rule(&mut self, node: &Node) -> String {
        if self.is_regular(node) {
            return self.lexeme(node);
        }
        match node {
            Node::Rule(name) => self.names[name.as_str()].clone(),
            Node::Sequence(nodes) => {
                let mut parts = Vec::new();
                let mut rest = nodes.as_slice();
                while let Some(first) = rest.first() {
                    let regular = rest.iter().take_while(|node| self.is_regular(node)).count();
                    let (part, len) = match regular {
                        0 => (self.rule(first), 1),
                        _ => (self.lexeme(&Node::Sequence(rest[..regular].to_vec())), regular),
                    };
                    parts.push(part);
                    rest = &rest[len..];
                }
                parts.join(" ")
            }
            Node::Alternatives(nodes) => {
                let parts: Vec<_> = nodes.iter().map(|node| self.rule(node)).collect();
                format!("({})", parts.join(" | "))
            }
            Node::Repeat { node, min, max } => {
                format!("({}){}", self.rule(node), count(*min, *max))
            }
            Node::Literal(_) | Node::Class { .. } | Node::Any => self.lexeme(node),
        }
    }

    fn lexeme(&mut self, node: &Node) -> String {
        let name = format!("LEX_{}", self.lexemes.len());
        self.lexemes.push(format!("{name}: {}", self.term(node)));
        name
    }
}

fn count(min: u32, max: Option<u32>) -> String {
    match (min, max) {
        (0, None) => "*".to_owned(),
        (1, None) => "+".to_owned(),
        (0, Some(1)) => "?".to_owned(),
        (min, None) => format!("{{{min},}}"),
        (min, Some(max)) => format!("{{{min},{max}}}"),
    }
}

fn class(is_negated: bool, ranges: &[(char, char)]) -> String {
    let mut text = String::from(if is_negated { "/[^" } else { "/[" });
    for (first, last) in ranges {
        let (first, last) = (u32::from(*first), u32::from(*last));
        write!(text, "\\x{{{first:X}}}-\\x{{{last:X}}}").expect("a String takes all");
    }
    text + "]/"
}
