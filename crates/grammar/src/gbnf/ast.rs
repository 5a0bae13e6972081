//! What a GBNF grammar says.

/// Rules in the order of the text.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Gbnf {
    pub(super) rules: Vec<Rule>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Rule {
    pub(super) name: String,
    pub(super) body: Node,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Node {
    Literal(String),
    /// One character in, or not in, ranges with both ends included.
    Class {
        is_negated: bool,
        ranges: Vec<(char, char)>,
    },
    /// Any one character.
    Any,
    Rule(String),
    Sequence(Vec<Node>),
    Alternatives(Vec<Node>),
    Repeat {
        node: Box<Node>,
        min: u32,
        max: Option<u32>,
    },
}

impl Node {
    /// Calls `visit` with the name of every rule that is referred to.
    pub(super) fn for_each_rule<'a>(&'a self, visit: &mut impl FnMut(&'a str)) {
        match self {
            Self::Rule(name) => visit(name),
            Self::Sequence(nodes) | Self::Alternatives(nodes) => {
                nodes.iter().for_each(|node| node.for_each_rule(visit));
            }
            Self::Repeat { node, .. } => node.for_each_rule(visit),
            Self::Literal(_) | Self::Class { .. } | Self::Any => {}
        }
    }
}
