//! Why a constraint is refused.

/// Why a constraint is refused. The message says what about it, for whoever wrote it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// It is larger than is taken.
    #[error("has {bytes} bytes; at most {max_bytes} are taken")]
    TooLarge {
        /// Its size.
        bytes: usize,
        /// The limit.
        max_bytes: usize,
    },
    /// It is nested deeper than is taken.
    #[error("is nested more than {max_depth} levels deep")]
    TooDeep {
        /// The limit.
        max_depth: usize,
    },
    /// It is wrong, too costly, or asks for something that cannot be enforced.
    #[error("{0}")]
    Refused(String),
    /// As many constraints are being compiled as may be; try again.
    #[error("too many constraints are being compiled; try again later")]
    Busy,
    /// The tokenizer's vocabulary cannot be used.
    #[error("grammars cannot be followed with this model's vocabulary: {0}")]
    Vocabulary(String),
}
