//! Tokens of a request.

/// Counted as vLLM does: a token that ends an output counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TokenCounts {
    /// Each prompt once, however many outputs it has.
    pub(crate) prompt: usize,
    pub(crate) completion: usize,
    /// Those of `completion` that are thoughts; `None` if the model does not tell.
    pub(crate) reasoning: Option<usize>,
}
