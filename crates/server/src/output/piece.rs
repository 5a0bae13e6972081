//! What an output consists of.

/// A part of an output, in the order in which the model said it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// More of what the model thinks.
    Reasoning(String),
    /// More of what it says.
    Text(String),
    /// A tool call begins. Calls are counted from 0; their arguments follow.
    Call { name: String },
    /// More of the latest call's arguments: all of them together are the JSON text.
    Arguments(String),
}

impl Piece {
    /// Adds this piece to `pieces`, to the last one if both are of a kind. Empty ones vanish.
    pub(crate) fn join(self, pieces: &mut Vec<Piece>) {
        match (pieces.last_mut(), self) {
            (_, Self::Reasoning(text) | Self::Text(text) | Self::Arguments(text))
                if text.is_empty() => {}
            (Some(Self::Reasoning(last)), Self::Reasoning(text))
            | (Some(Self::Text(last)), Self::Text(text))
            | (Some(Self::Arguments(last)), Self::Arguments(text)) => *last += &text,
            (_, piece) => pieces.push(piece),
        }
    }
}
